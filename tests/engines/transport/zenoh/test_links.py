"""Messages wait in a window of rounds with a limit on bytes; dropped messages are counted and requested again."""

from collections import Counter

from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.links import ROOM, SMALL, WINDOW, Link
from hyperpush.engines.transport.zenoh.parts import OPEN, PART_BYTES, split

SIZE = 1000


def made(in_step, limit=SIZE):
    drops = Counter()
    return Link(limit, in_step, lambda reason: drops.update([reason])), drops


def give(link, step, size=SIZE, needed=0, number=None):
    for header, part in split(step if number is None else number, step, step.to_bytes(8, "little") + bytes(size - 8)):
        link.add(header, bytes(part), needed)


def test_messages_of_far_rounds_are_dropped_and_near_ones_kept():
    link, drops = made(in_step=True)
    for step in range(10_000, 10_100):
        give(link, step)
    assert not link.mail
    assert drops == {RefusalReason.OVERFLOW: 100}
    give(link, 0)
    assert link.has(0)
    for step in range(10_000, 10_100):  # many at once, of rounds near the needed one
        give(link, step, needed=9_990)
    assert [step for step, _ in link.mail] == [0, *range(10_000, 9_990 + WINDOW + 1)]


def test_waiting_bytes_are_a_few_of_the_longest_message_whoever_sends_how_many():
    limit = 9 << 20
    for in_step in (True, False):
        link, drops = made(in_step, limit)
        for step in range(12):
            give(link, step, limit)
            assert link.waiting <= ROOM * limit
        assert len(link.mail) == ROOM
        assert drops == {RefusalReason.OVERFLOW: 12 - ROOM}
        kept = sorted(step for step, _ in link.mail)
        assert kept == list(range(ROOM)) if in_step else kept == list(range(12 - ROOM, 12))
    link, drops = made(in_step=False)
    for step in range(WINDOW):  # all small messages that an honest sender may have in transit fit
        give(link, step, 8)
    assert not drops
    assert link.room == SMALL


def test_a_dropped_message_is_asked_for_once_when_it_has_its_turn():
    link, _ = made(in_step=True)
    for step in range(WINDOW + 2):
        give(link, step)
    late = WINDOW  # the number of messages in a window that starts at round 0
    for step in range(late):
        assert not link.asks_again(step)
        assert len(link.take(step)) == 1
    assert link.asks_again(late)
    assert not link.asks_again(late)
    give(link, late, needed=late)
    assert len(link.take(late)) == 1


def test_at_ones_own_pace_old_totals_make_room_for_new_ones():
    link, drops = made(in_step=False)
    for step in range(3 * WINDOW):
        give(link, step)
    newest = [int.from_bytes(payload[:8], "little") for payload in link.take(0)]
    assert newest == list(range(2 * WINDOW, 3 * WINDOW))
    assert drops == {RefusalReason.OVERFLOW: 2 * WINDOW}


def test_payloads_that_are_never_completed_are_bounded_and_counted():
    link, drops = made(in_step=True, limit=2 * PART_BYTES)
    for number in range(20):
        header, part = next(split(number, 1, bytes(2 * PART_BYTES)))
        link.add(header, bytes(part), 0)
    assert len(link.assembly._open) == OPEN
    assert drops == {RefusalReason.INCOMPLETE: 20 - OPEN}
    assert not link.mail
