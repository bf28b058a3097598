"""After a removal, enclosing averages restart with the stage, records are not repeated, stages do not mix."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from engines.peer.hall import Hall, Kept, numbers, walk
from engines.peer.parties import push_sum, together, values

import hyperpush as hp
from hyperpush.engines.peer import Left
from hyperpush.engines.peer.channels import Channel, Channels
from hyperpush.engines.transport import wire
from hyperpush.engines.transport.wire import Kind
from hyperpush.programs import Exchange, Repeat, Scope, Sequence

CLIENTS, ROUNDS, TIMES = 3, 12, 4
NETWORK = hp.networks.FullyConnected(CLIENTS)
START = values(CLIENTS)
STAGE = Scope(
    push_sum(ROUNDS),
    enter=lambda state, ctx: (jnp.zeros(7).at[0].set(ctx.client), jnp.ones(())),  # longer than the enclosing state
    leave=lambda state, inner, ctx: state,
)
LASTING = Exchange(lambda state, ctx: state, lambda state, inbox, ctx: inbox.mix(state), conserved=True)
INNER, OUTER = 8, 4  # numbers in a message of the stage, and of the enclosing exchange


def start(client):
    return jnp.asarray(START[client]), jnp.ones(())


def vanishing(hall, blocks):
    """Return hooks: client 2 dies for good in its third pass, and 0 and 1 wait at a message of given size."""

    def hook(client):
        passed = {INNER: 0, OUTER: 0}

        def dies(payload, seat):
            size = numbers(payload)
            if size not in passed or wire.peek(payload).kind == Kind.LAST_TOTAL:
                return False
            passed[size] += 1
            third = passed[OUTER] > 2 * (CLIENTS - 1) and (client == 2 or size == blocks[client])
            if third and client == 2:
                return True
            while third and 2 not in hall.closed:
                time.sleep(0.01)
                seat.missing()
            return False

        return [dies]

    return hook


@pytest.mark.parametrize("blocks", [(INNER, OUTER), (OUTER, INNER), (INNER, INNER)])
def test_what_lasts_around_a_stage_starts_anew_with_it(blocks):
    """Some members are inside the stage and some between stages; then the others hold their own mass exactly once."""
    hall = Hall(CLIENTS, close_after=0.2)
    hook = vanishing(hall, blocks)
    program = Repeat(Sequence(STAGE, LASTING), TIMES, name="outer")
    record = {"outer": lambda state, ctx: state[1], "average": lambda state, ctx: state[1]}

    def party(client):
        try:
            return walk(hall, NETWORK, program, start, client, dies=hook(client), record=record)
        except AssertionError:  # the member has no store to restart from
            assert client == 2
            return None

    *rest, gone = together(CLIENTS, party)
    assert gone is None
    assert all(peer.closed == {2} for _, peer in rest)
    assert sum(float(mass) for (_, mass), _ in rest) == pytest.approx(2, rel=1e-12)
    np.testing.assert_allclose(sum(np.asarray(w) for (w, _), _ in rest), START[:2].sum(0), atol=1e-12)
    for _, peer in rest:
        assert {name: len(rows) for name, rows in peer.history.items()} == {"outer": TIMES, "average": TIMES * ROUNDS}


RATIO = Scope(push_sum(ROUNDS), lambda value, ctx: (value, jnp.ones(())), lambda value, held, ctx: held[0] / held[1])
AVERAGES = Repeat(RATIO, 2, name="outer")


@pytest.mark.parametrize("killed", [False, True])
def test_records_of_a_stage_that_starts_anew_are_not_kept_twice(killed):
    """Each round has one record, even if it ran in two views or its member was killed in the stage before."""
    hall = Hall(CLIENTS, close_after=0.4)
    record = {"average": lambda state, ctx: state[1]}

    def dies_at(steps):
        return [lambda payload, seat: numbers(payload) > 0 and wire.peek(payload).step >= steps]

    def pace(peer, client, name, done):
        while client != 2 and peer.step > ROUNDS + 6 and hall.alive[2]:  # no member ends before the third has vanished
            time.sleep(0.005)

    def party(client):
        store = Kept() if client == 0 and killed else None
        dies = dies_at(ROUNDS + 6) if client == 2 else dies_at(ROUNDS + 3) if store else None
        own = {"store": store, "dies": dies, "on_progress": pace, "record": record}
        try:
            return walk(hall, NETWORK, AVERAGES, lambda k: jnp.asarray(START[k]), client, **own)
        except AssertionError:
            assert client == 2
            return None

    *rest, _ = together(CLIENTS, party)
    for _, peer in rest:
        assert peer.closed == {2}
        assert len(peer.history["average"]) == 2 * ROUNDS
        assert all(np.isfinite(row) and row > 0 for row in peer.history["average"])
        assert peer.counts.rounds > 2 * ROUNDS  # some rounds ran twice


def test_who_leaves_when_the_others_have_gone_on_changes_nothing_for_them():
    """The leaver's mass belongs to a finished stage; the next stage averages only what the others brought to it."""
    hall = Hall(CLIENTS)
    steps = dict.fromkeys(range(CLIENTS), 0)

    def look(peer, client, name, done):
        steps[client] = peer.step
        if client == 2 and (name, done) == ("average", ROUNDS - 2):
            while min(steps[0], steps[1]) < ROUNDS + 2:
                time.sleep(0.005)
            peer.leave()
        # The other two keep pace with each other so that their values mix, and wait for the leaver in the next stage.
        while client != 2 and (
            steps[client] > steps[1 - client] + 1 or (steps[client] > ROUNDS + 4 and 2 not in hall.leaving)
        ):
            time.sleep(0.005)

    def party(client):
        try:
            record = {"outer": lambda state, ctx: state}
            return walk(
                hall, NETWORK, AVERAGES, lambda k: jnp.asarray(START[k]), client, on_progress=look, record=record
            )
        except Left:
            return None

    *rest, gone = together(CLIENTS, party)
    assert gone is None
    brought = np.mean([np.asarray(peer.history["outer"][0]) for _, peer in rest], axis=0)
    assert np.abs(brought - START[:2].mean(0)).max() > 1e-3  # it contains the leaver's value from the stage before
    for value, peer in rest:
        assert peer.closed == set()
        np.testing.assert_allclose(value, brought, atol=1e-4)


def test_two_who_leave_in_different_stages_do_not_wait_for_each_other():
    """Client 0 leaves in the second stage, which client 1 never reaches; client 2 holds what both brought."""
    hall, handed_over, peers = Hall(CLIENTS, patience=15.0), threading.Event(), {}

    def look(peer, client, name, done):
        peers[client] = peer
        if client == 0 and peer.step == ROUNDS + 2:
            while 2 not in peers or peers[2].step < ROUNDS + 2:  # both have sent a third to client 1, in vain
                time.sleep(0.005)
            peer.leave()
        if client == 1 and peer.step == 5:
            while 0 not in hall.leaving:
                time.sleep(0.005)
            peer.leave()
        while client == 2 and peer.step == ROUNDS + 4 and not {0, 1} <= hall.leaving:
            time.sleep(0.005)
        if client == 2 and peer.step == ROUNDS + 6:  # the client has sent its last totals
            handed_over.wait(60)

    def watch(payload, seat):
        if wire.peek(payload).kind == Kind.TRANSFER:
            handed_over.set()
        return False

    def party(client):
        own = {"dies": watch if client == 0 else None, "on_progress": look}
        record = {"outer": lambda state, ctx: state}
        try:
            return walk(hall, NETWORK, AVERAGES, lambda k: jnp.asarray(START[k]), client, record=record, **own)[0]
        except Left:
            return None

    *gone, value = together(CLIENTS, party)
    assert gone == [None, None]
    brought = [np.asarray(peers[client].history["outer"][0]) for client in (0, 2)]
    np.testing.assert_allclose(value, np.mean(brought, axis=0), atol=1e-12)


def test_who_leaves_where_something_lasts_hands_it_over_though_the_others_are_in_the_next_stage():
    hall, steps = Hall(CLIENTS, patience=10.0), dict.fromkeys(range(CLIENTS), 0)
    program, third = Repeat(Sequence(STAGE, LASTING), TIMES, name="outer"), 2 * (ROUNDS + 1)

    def look(peer, client, name, done):
        steps[client] = peer.step
        if client == 2 and peer.step == third - 1 and name == "average":
            while min(steps[0], steps[1]) < third + 2:
                time.sleep(0.005)
            peer.leave()
        while client != 2 and peer.step == third + 3 and 2 not in hall.leaving:
            time.sleep(0.005)

    def party(client):
        try:
            return walk(hall, NETWORK, program, start, client, on_progress=look)[0]
        except Left:
            return None

    *rest, gone = together(CLIENTS, party)
    assert gone is None
    assert sum(float(mass) for _, mass in rest) == pytest.approx(CLIENTS, rel=1e-12)
    np.testing.assert_allclose(sum(np.asarray(w) for w, _ in rest), START.sum(0), atol=1e-12)


def test_a_channel_has_another_name_in_each_view():
    channels = Channels()
    channels.add(Channel((0,), jnp.zeros(3), tolerant=True))
    names = {channels.number((0,))}
    for epoch in ((5,), (5, 77), (5, 78), (6,)):
        channels.restart((), epoch)
        names.add(channels.number((0,)))
    assert len(names) == 5
    assert len(channels.past) == 4
    assert list(channels.numbered) == [channels.number((0,))]
