"""Members leave at once, while others are away, or killed meanwhile: no mass is lost, no wait is endless."""

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines.peer.hall import Hall, Kept, Seat, walk
from engines.peer.parties import push_sum, together, values

import hyperpush as hp
from hyperpush.base.errors import HyperpushError
from hyperpush.engines.peer import Left, Peer, ending
from hyperpush.engines.peer.channels import Channel
from hyperpush.engines.peer.messenger import Messenger
from hyperpush.engines.peer.state import PeerState, Stage
from hyperpush.engines.transport import wire
from hyperpush.engines.transport.wire import Kind
from hyperpush.programs import Exchange, Repeat

CLIENTS, ROUNDS = 4, 30
NETWORK = hp.networks.FullyConnected(CLIENTS)
PROGRAM = push_sum(ROUNDS)
START = values(CLIENTS)


def start(client):
    return jnp.asarray(START[client]), jnp.ones(())


def held(facts):
    """Return the (w, ω) of a checkpoint, including what was received since."""
    pending, (w, mass) = facts["channels"][0]["pending"], facts["state"]
    return w + pending[:-2], float(mass) + pending[-2]  # the last number is the mass that the engine tracks


def leaving(hall, when, **each):
    """Run all members, ask those in `when` to leave in that round, and return their results and stores."""
    stores = [Kept() for _ in range(CLIENTS)]

    def ask(peer, client, name, done):
        if when.get(client) == done:
            peer.leave()

    def party(client):
        try:
            options = {name: given.get(client) for name, given in each.items()}
            return walk(hall, NETWORK, PROGRAM, start, client, store=stores[client], on_progress=ask, **options)[0]
        except Left:
            return "left"
        except HyperpushError as error:
            return error

    return together(CLIENTS, party), stores


def check_all_of_it(states):
    """Check that the remaining members hold all values and the mass of all members."""
    assert sum(float(mass) for _, mass in states) == pytest.approx(CLIENTS, rel=1e-12)
    np.testing.assert_allclose(sum(np.asarray(w) for w, _ in states), START.sum(0), atol=1e-11)
    assert all(mass > 0 for _, mass in states)


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize(("gone", "at"), [((2, 3), (5, 5)), ((0, 1), (5, 5)), ((0, 3), (6, 4)), ((1, 2, 3), (5, 6, 5))])
def test_two_or_more_leave_at_once(gone, at, loss):
    hall = Hall(CLIENTS, loss=loss, seed=len(gone) + at[0])
    found, _ = leaving(hall, dict(zip(gone, at, strict=True)))
    assert [each for each in range(CLIENTS) if isinstance(found[each], str)] == list(gone)
    check_all_of_it([found[each] for each in range(CLIENTS) if each not in gone])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(2, 8))])
def test_if_all_leave_the_last_one_keeps_everything_and_says_so(seed):
    rounds = 4 + np.random.default_rng(seed).permutation(CLIENTS) % (1 + seed % 4)
    found, stores = leaving(Hall(CLIENTS, loss=0.2, seed=seed), dict(enumerate(rounds.tolist())))
    kept = [each for each in range(CLIENTS) if not isinstance(found[each], str)]
    assert len(kept) == 1
    last = kept[0]
    assert f"peer {last}: all others have left" in str(found[last])
    assert "its mass, which stays in its checkpoint" in str(found[last])
    w, mass = held(stores[last].load())
    assert mass == pytest.approx(CLIENTS, rel=1e-12)
    np.testing.assert_allclose(w, START.sum(0), atol=1e-11)
    for each in set(range(CLIENTS)) - {last}:
        assert held(stores[each].load())[1] == 0


def test_nobody_leaves_while_somebody_is_away():
    """A member that is away has not agreed to a leave; the mass is transferred only after that member has returned."""
    hall, seen = Hall(CLIENTS), []

    def away(payload, seat):
        if 3 not in hall.leaving:
            return False
        hall.die(0)
        time.sleep(0.3)
        seen.append(3 in hall.left)
        return True

    found, _ = leaving(hall, {3: 4}, dies={0: [away]})
    assert (seen, found[3], hall.closed) == ([False], "left", frozenset())
    check_all_of_it(found[:3])


@pytest.mark.parametrize("when", ["first", "acknowledging", "done"])
@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.long
def test_killed_while_it_drains_it_ends_with_the_same(when, loss):
    """The member dies at its last totals, at acknowledgments of the others' totals, or after it was done."""
    hall = Hall(CLIENTS, loss=loss)

    def dies(payload, seat):
        kind = wire.peek(payload).kind
        if when == "first":
            return kind == Kind.LAST_TOTAL
        if when == "acknowledging":
            return kind == Kind.DURABLE
        return 1 in hall.done

    if when == "done":  # a member that got no acknowledgment of its last totals asks for it again
        hall.drops = lambda payload, seat: (
            seat.client == 1 and 1 not in hall.lost and wire.peek(payload).kind == Kind.DURABLE
        )
    found, stores = leaving(hall, {}, dies={1: [dies]})
    assert 1 in hall.lost
    check_all_of_it(found)
    assert all(hall.alive.values())
    for store, (w, mass) in zip(stores, found, strict=True):  # the result was stored before it was announced
        kept_w, kept_mass = held(store.load())
        assert kept_mass == pytest.approx(float(mass), rel=1e-12)
        np.testing.assert_allclose(kept_w, w, atol=1e-12)


def test_who_vanishes_for_good_after_it_was_done_is_closed_out_by_those_who_are_not():
    """The vanished member never acknowledged 0's totals, so 0 cannot end with it, nor can it have ended without 0."""
    hall = Hall(CLIENTS, patience=20.0, close_after=0.2)

    def unsaid(payload, seat):
        return (seat.client, seat.to, wire.peek(payload).kind) == (1, 0, Kind.DURABLE)

    hall.drops = unsaid

    def party(client):
        dies = [lambda payload, seat: 1 in hall.done] if client == 1 else None
        try:
            return walk(hall, NETWORK, PROGRAM, start, client, dies=dies)
        except AssertionError:  # the member has no store to restart from
            assert client == 1
            return None

    found = together(CLIENTS, party)
    rest = [found[each] for each in (0, 2, 3)]
    assert found[1] is None
    assert all(peer.closed == {1} for _, peer in rest)
    assert sum(float(mass) for (_, mass), _ in rest) == pytest.approx(3, rel=1e-12)
    np.testing.assert_allclose(sum(np.asarray(w) for (w, _), _ in rest), START[[0, 2, 3]].sum(0), atol=1e-11)


def test_killed_when_all_is_over_it_says_again_that_it_is_done(monkeypatch):
    """The restart revoked its end at members that had not looked yet, so it must announce its end again."""
    hall, ended, lives = Hall(CLIENTS, patience=20.0), threading.Event(), []
    looks = Seat.everyone_done

    def held_back(seat):
        while seat.client == 2 and looks(seat) and not ended.is_set():
            time.sleep(0.005)
        seat.hear()
        return looks(seat)

    monkeypatch.setattr(Seat, "everyone_done", held_back)

    class Mortal(Kept):
        def save(self, facts):
            super().save(facts)
            if facts["stage"] == Stage.OVER:
                lives.append(facts)
                hall.die(1)
                raise ConnectionAbortedError

    def party(client):
        try:
            return walk(hall, NETWORK, PROGRAM, start, client, store=Mortal() if client == 1 else Kept())[0]
        finally:
            if client == 1:
                ended.set()

    check_all_of_it(together(CLIENTS, party))
    assert len(lives) == 1


def test_what_is_acknowledged_for_good_is_durable():
    """When a member says that it stores a total durably, its store contains that total."""
    hall, wrong, seen = Hall(CLIENTS, loss=0.2), [], []
    stores = [Kept() for _ in range(CLIENTS)]

    def watch(payload, seat):
        header = wire.peek(payload)
        if header.kind == Kind.DURABLE:
            seen.append(header.counter)
            durable = stores[seat.client].load()["channels"][0]["in"][0].get(str(seat.to), 0)
            if header.counter > durable:
                wrong.append((seat.client, seat.to, header.counter, durable))
        return False

    def party(client):
        return walk(hall, NETWORK, PROGRAM, start, client, store=stores[client], dies=[watch])[0]

    check_all_of_it(together(CLIENTS, party))
    assert wrong == []
    assert len(seen) >= CLIENTS * (CLIENTS - 1)


def after(state, inbox, ctx):
    """Apply push-sum, then step along −x = −z/ω from the earlier point, as SGP with `order="gradient-after"` does."""
    z, mass = inbox.mix(state)
    return z - 0.01 * state[0] / state[1], mass


@pytest.mark.parametrize("lives", [1, 3])
def test_a_transfer_that_divides_by_the_mass_continues_after_a_kill(lives):
    """A member that has transferred its mass must not divide by it or transfer it again."""
    program = Repeat(Exchange(lambda state, ctx: state, after, conserved=True), 30, name="descent")
    hall = Hall(CLIENTS, patience=20.0)
    store = Kept()

    def dies(payload, seat):
        return wire.peek(payload).kind == Kind.TRANSFER

    def ask(peer, client, name, done):
        if (client, done) == (3, 6):
            peer.leave()

    def party(client):
        mine = {"store": store, "dies": [dies] * lives, "on_progress": ask} if client == 3 else {}
        try:
            return walk(hall, NETWORK, program, start, client, **mine)[0]
        except Left:
            return "left"

    *rest, gone = together(CLIENTS, party)
    assert gone == "left"
    for w, mass in rest:
        assert np.isfinite(w).all()
        assert mass > 0
    assert sum(float(mass) for _, mass in rest) == pytest.approx(CLIENTS, rel=1e-12)


def test_who_is_far_behind_is_waited_for_as_long_as_it_gets_on(monkeypatch):
    """A member one stage behind counts as alive while it makes progress, even beyond `patience` in total."""
    hall, now = Hall(2, patience=10.0), [0.0]
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    messenger = Messenger(0, Seat(hall, 0), True, PeerState(0), 3)
    messenger.channels.add(Channel((0,), jnp.zeros(3), tolerant=True))
    past = messenger.channels.number((0,))
    messenger.channels.restart((), (1,))
    waiting = ending._Wait(messenger, lambda: None)

    def wait(seconds):
        waiting.look()
        waiting.rest([1], "to be done")
        now[0] += seconds
        waiting.rest([1], "to be done")

    for step in range(1, 6):
        hall.mail[0].append((1, wire.encode(wire.Header(0, past, step, 1, step), np.zeros(3))))
        wait(9.0)
    hall.done[1] = frozenset()  # the message that it is done counts as news, too
    wait(9.0)
    hall.mail[0].append((1, wire.encode(wire.Header(0, past, 5, 1, 5), np.zeros(3))))  # a repeated message is no news
    with pytest.raises(HyperpushError, match=r"peer 0: no news within 10 s, waiting for \[1\] to be done"):
        wait(2.0)


@pytest.mark.parametrize("leaves", [False, True])
def test_who_hears_nothing_gives_up_after_its_patience(leaves):
    """The others are there but never acknowledge the message."""
    hall = Hall(2, patience=0.3)
    peer = Peer(0, hp.networks.FullyConnected(2), Seat(hall, 0), jax.random.key(0), tolerant=True)
    if leaves:
        peer.leave()
    says = r"\[1\] to send their last totals" if leaves else r"\[1\] to take in what was sent to them"
    with pytest.raises(HyperpushError, match=rf"peer 0: no news within 0\.3 s, waiting for {says}"):
        peer.run(push_sum(3), (jnp.ones(3), jnp.ones(())), None)
