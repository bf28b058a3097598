"""Identity of peers: replays, second processes and mismatched newcomers are refused with a reason."""

import copy
import threading
import time
from dataclasses import replace

import pytest
from engines.peer.impostor import Impostor
from engines.peer.parties import DIGEST, Places, together

from hyperpush.base.errors import Absent, HyperpushError, InUse, Refused
from hyperpush.base.processes.starter import free_ports
from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.control import Card, ControlMessage, Departure, Topic

NOBODY = frozenset[int]()


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def pair():
    """Return two of three peers, which have agreed on the run."""
    at = Places(3)
    made = [at.open(client, mode="asynchronous", close_after=60.0) for client in (0, 1)]
    together(2, lambda client: made[client].ready(everyone=False))
    until(lambda: made[0].neighbors[1].agreed and made[1].neighbors[0].agreed)
    yield at, *made
    for each in made:
        each.close()


def impostor(at, sender, incarnation=7):
    return Impostor(at.run, sender, "p0", at.address(0), None, 3, incarnation=incarnation)


def test_replays_of_another_run_or_process_are_refused_and_counted(pair):
    at, first, _ = pair
    before = first.neighbors[1].incarnation
    with impostor(at, "p1") as stranger:
        stranger.digest, time_to_link = first.members.run, time.sleep(0.5)
        assert time_to_link is None
        stranger.send(1, b"of an earlier run", run=b"another!", incarnation=before)
        stranger.send(1, b"of an earlier process", incarnation=before - 1)
        hello = Topic.HELLO, Departure.NO, 0, before - 1, 12345, first.members.run, NOBODY, NOBODY
        stranger.put("control", ControlMessage(*hello, more=first.members.card).pack(3))
        stranger.send(1, b"after a hello that answers nobody", incarnation=before - 1)
        done = Topic.DONE, Departure.NO, 0, before - 1, first.members.incarnation, first.members.run, NOBODY, NOBODY
        stranger.put("control", ControlMessage(*done).pack(3))
        until(lambda: first.rejections["another-incarnation"] == 3)
        assert first.rejections["another-run"] == 1
    assert first.collect(0, []) == []
    assert first.neighbors[1].incarnation == before
    assert not first.neighbors[1].done
    assert first.status()["p1"]["refused"] == {"another-run": 1, "another-incarnation": 3}


def test_a_process_whose_place_was_taken_is_told_so(pair):
    at, first, second = pair
    elsewhere = copy.copy(at)
    elsewhere.ports = [at.ports[0], *free_ports(1), at.ports[2]]
    again = elsewhere.open(1, mode="asynchronous")
    try:
        again.ready(everyone=False)
        until(lambda: first.neighbors[1].incarnation == again.members.incarnation)
        with pytest.raises(InUse, match="p1: another process has taken the place of p1: p0 has accepted that process"):
            until(lambda: second.send(0, 0, b"from the one before"), 20)
    finally:
        again.close()


def test_a_second_process_with_yesterdays_configuration_ends_alone(pair):
    """Its liveliness token, and the end of the token, are not attributed to the member."""
    at, first, second = pair
    elsewhere = copy.copy(at)
    elsewhere.ports = [at.ports[0], *free_ports(1), at.ports[2]]
    again = elsewhere.open(1, mode="asynchronous", digest=b"yesterday's configuration.......")
    try:
        with pytest.raises(HyperpushError, match="holds another configuration than p1"):
            until(lambda: again.ready(everyone=False), 20)
    finally:
        again.close()
    time.sleep(2.0)
    assert first.present([1]) == [1]
    second.send(0, 0, b"still here")
    until(lambda: first.collect(0, []) == [(1, b"still here")])


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"digest": b"y" * 32}, "another-configuration", "holds another configuration than"),
        ({"code": b"other code......"}, "another-code", "runs other code than"),
    ],
)
@pytest.mark.long
def test_a_newcomer_that_does_not_fit_is_refused_alone(change, reason, words):
    at, given = Places(3), {"digest": DIGEST, "code": b"the code........", "patience": 20.0}
    made = [at.open(client, **given) for client in (0, 1)]
    late = None
    try:
        waiting = threading.Thread(target=lambda: [each.ready(everyone=False) for each in made], daemon=True)
        waiting.start()
        until(lambda: made[0].neighbors[1].agreed and made[1].neighbors[0].agreed)
        late = at.open(2, **{**given, **change})
        with pytest.raises(HyperpushError, match=words) as told:
            late.ready()
        for digest in (next(iter(change.values())), given[next(iter(change))]):
            assert digest.hex()[:16] in str(told.value)
        until(lambda: made[0].rejections[reason] and made[1].rejections[reason])
        waiting.join(30)
        made[0].send(1, 0, b"we go on")
        assert made[1].collect(0, [0]) == [(0, b"we go on")]
        made[0].patience = 0.3
        with pytest.raises(Refused, match=rf"from p2.*: p2 \(.*…\) {words}"):
            made[0].collect(0, [2])
    finally:
        for each in [*made, *([late] if late else [])]:
            each.close()


def test_versions_are_refused_as_versions(pair):
    at, first, _ = pair
    with impostor(at, "p2") as stranger:
        stranger.live()
        until(lambda: stranger.heard)
        hello = Topic.HELLO, Departure.NO, 0, 7, stranger.heard[-1].incarnation, first.members.run, NOBODY, NOBODY
        old = bytearray(ControlMessage(*hello, more=first.members.card).pack(3))
        old[3:4] = b"4"
        stranger.put("control", bytes(old))
        until(lambda: first.rejections["wrong-version"])
        assert first.status()["p2"]["unfit"] == "p2 has version 4, this is 5"
        card = replace(first.members.card, jax="0.4.1")
        stranger.put("control", ControlMessage(*hello, more=card).pack(3))
        until(lambda: first.rejections["another-jax"])
        assert first.status()["p2"]["unfit"].startswith("p2 has JAX 0.4.1, p0 has JAX ")


def test_a_card_survives_the_way_and_says_nothing_but_ascii():
    card = Card(DIGEST, bytes(range(16)), "0.9.1.dev20261119", 1 << 40, bytes(16))
    assert Card.unpack(card.pack()) == replace(card, jax="0.9.1.dev2026111")


def test_content_that_cannot_be_true_ends_a_run_in_step_for_all(pair):
    at = Places(3, run="step")
    made = [at.open(client) for client in range(3)]
    try:
        together(3, lambda client: made[client].ready())
        made[0].refuse(2, RefusalReason.BAD_CHECKSUM, 31)
        made[0].acknowledge(1)
        made[0].refuse(2, RefusalReason.NOT_FINITE, 32)
        with pytest.raises(Refused, match="peer p0: p2's message in step 32 was refused: not finite") as told:
            made[0].collect(0, [1])
        assert told.value.exit_code == 5
        for other in made[1:]:
            with pytest.raises(Refused, match="p0 has ended: p2's message in step 32 was refused: not finite"):
                other.collect(0, [0])
        assert made[0].news()[-1] == "p2's message in step 32 was refused: not finite"
    finally:
        for each in made:
            each.close()


def test_at_its_own_pace_the_third_refused_content_removes_a_member(pair):
    _, first, second = pair
    for number in range(3):
        assert first.closed == set()
        first.refuse(1, RefusalReason.WRONG_MASS, number)
    assert first.closed == {1}
    with pytest.raises(Absent, match="removed by p0"):
        until(lambda: second.present([0]) is None, 20)
    assert "removed: p1, by p0" in first.news()


def test_ended_certificates_and_refused_messages_are_the_reason_of_a_wait_in_vain(pair):
    _, first, second = pair
    first.asynchronous = first.members.asynchronous = False
    first.patience = 0.2
    first.refuse(1, RefusalReason.BAD_CHECKSUM, 9)
    with pytest.raises(Refused, match="from p1: p1's message in step 9 was refused: bad checksum"):
        first.collect(9, [1])
    with pytest.raises(Absent, match="p1 is there, in step"):  # the refusal concerned another step
        first.collect(10, [1])
    first.neighbors[1].ends = int(time.time()) - 5
    second.close()
    until(lambda: not first.neighbors[1].alive)
    with pytest.raises(Absent, match=r"from p1 \(absent\): p1's certificate ended at \d\d:\d\d UTC"):
        first.collect(11, [1])
