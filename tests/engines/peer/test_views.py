"""A member that vanishes for good is removed, and current averages restart among the remaining members."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines.peer.hall import Kept
from engines.peer.parties import Places, push_sum, together, values

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer import Left, Peer
from hyperpush.engines.run_checks import check_conserved
from hyperpush.engines.transport import MemoryTransport, wire
from hyperpush.engines.transport.faulty import Faulty
from hyperpush.programs import Exchange, Repeat, Scope, Sequence

CLIENTS, ROUNDS = 3, 80


class Mortal:
    """A transport whose peer dies at its n-th message."""

    def __init__(self, transport, messages):
        self.transport, self.remaining = transport, messages

    def send(self, to, step, payload):
        self.remaining -= 1
        if self.remaining < 0:
            self.transport.close()
            raise ConnectionAbortedError
        self.transport.send(to, step, payload)

    def collect(self, step, expected):
        return self.transport.collect(step, expected)

    def close(self):
        self.transport.close()

    def __getattr__(self, name):
        return getattr(self.transport, name)


def averages(times):
    """Return a program that averages values and then averages the averages, each time with new mass."""
    ratio = Scope(
        push_sum(ROUNDS),
        enter=lambda value, ctx: (value, jnp.ones(())),
        leave=lambda value, held, ctx: held[0] / held[1],
    )
    return Repeat(ratio, times, name="outer")


@pytest.mark.parametrize(("program", "survivors"), [(averages(2), "inside"), (push_sum(ROUNDS), "outside")])
def test_the_rest_have_the_average_of_the_rest(program, survivors):
    places = Places(CLIENTS)
    network = hp.networks.RandomDirected(CLIENTS, probability=(0.4, 0.8))
    start = values(CLIENTS)

    def party(client):
        transport = places.open(client, mode="asynchronous", close_after=1.0, longest_wait=0.2)
        mortal = Mortal(transport, 12 if client == 2 else 10**9)
        try:
            transport.ready()
            with jax.enable_x64(True):
                peer = Peer(client, network, mortal, jax.random.key(3), tolerant=True)
                own = jnp.asarray(start[client])
                state = peer.run(program, own if survivors == "inside" else (own, jnp.ones(())), None)
            return state, peer.closed, peer.counts.rounds
        except ConnectionAbortedError:
            return None
        finally:
            transport.close()

    *left, dead = together(CLIENTS, party)
    assert dead is None
    for state, closed, rounds in left:
        assert closed == {2}
        assert rounds > ROUNDS * (2 if survivors == "inside" else 1)  # some rounds ran twice
        value = state if survivors == "inside" else state[0] / state[1]
        np.testing.assert_allclose(value, start[:2].mean(0), atol=1e-6)
    if survivors == "outside":
        assert sum(float(state[1]) for state, *_ in left) == pytest.approx(2, rel=1e-12)


class Killed(Mortal):
    """A transport whose peer dies while it hands over its mass, at the n-th message of the transfer."""

    def send(self, to, step, payload):
        self.remaining -= wire.peek(payload).kind == wire.Kind.TRANSFER
        if self.remaining < 0:
            self.transport.close()
            raise ConnectionAbortedError
        self.transport.send(to, step, payload)


def leavers(program, start_of, at, faults, dies_at=None):
    """Run `program`, ask client 2 to leave at (loop, iteration), and return what the others hold at the end."""
    places = Places(CLIENTS)
    network = hp.networks.RandomDirected(CLIENTS, probability=(0.4, 0.8))

    def party(client, store=None, dies=dies_at):
        transport = places.open(client, mode="asynchronous", close_after=100.0, longest_wait=0.2)
        lossy = Faulty(transport, faults, 4, client)
        if client == 2 and dies is not None:
            store = Kept()
            lossy = Killed(lossy, dies)
        try:
            transport.ready(everyone=store is None or store.kept is None)
            with jax.enable_x64(True):
                peer = Peer(client, network, lossy, jax.random.key(3), tolerant=True, store=store)

                def leave(name, done, total):
                    if client == 2 and (name, done) == at:
                        peer.leave()

                return peer.run(program, start_of(client), None, progress=leave), peer.closed
        except Left:
            return None
        except ConnectionAbortedError:
            return party(client, store, None)  # the same peer, restarted
        finally:
            transport.close()

    return together(CLIENTS, party)


@pytest.mark.parametrize("dies_at", [None, 0])
def test_who_leaves_hands_its_mass_over_even_if_it_is_killed_while_it_does(dies_at):
    start = values(CLIENTS)
    *left, gone = leavers(
        push_sum(250),
        lambda client: (jnp.asarray(start[client]), jnp.ones(())),
        ("average", 7),
        Faults(loss=0.3, duplicate=0.2, delay=2),
        dies_at,
    )
    assert gone is None
    assert sum(float(mass) for (_, mass), _ in left) == pytest.approx(CLIENTS, rel=1e-12)
    np.testing.assert_allclose(sum(np.asarray(w) for (w, _), _ in left), start.sum(0), atol=1e-11)
    for (w, mass), closed in left:
        assert closed == set()
        np.testing.assert_allclose(w / mass, start.mean(0), atol=1e-6)


def test_who_leaves_at_the_end_of_a_stage_does_not_stop_the_next():
    """Wherever the others are by then, they finally agree on a value between the initial ones."""
    start = values(CLIENTS)
    *left, gone = leavers(averages(2), lambda client: jnp.asarray(start[client]), ("average", ROUNDS - 1), Faults())
    assert gone is None
    for value, closed in left:
        assert closed == set()
        np.testing.assert_allclose(value, left[0][0], atol=1e-6)
        assert np.all(value >= start.min(0) - 1e-9)
        assert np.all(value <= start.max(0) + 1e-9)
        # The result differs from the average of the other two, because the leaver's value was mixed in for a whole
        # stage.
        assert np.abs(value - start[:2].mean(0)).max() > 0.1 * np.abs(start.mean(0) - start[:2].mean(0)).max()


def test_nobody_leaves_in_step():
    peer = Peer(0, hp.networks.Ring(3), MemoryTransport(3).endpoint(0), jax.random.key(0))
    with pytest.raises(InvalidInput, match="mode: got 'synchronous'"):
        peer.leave()


def test_programs_that_cannot_wait_are_refused_at_ones_own_pace():
    check_conserved(averages(2))
    gossip = Exchange(lambda state, ctx: state, lambda state, inbox, ctx: state, weights="gossip")
    for program in (Repeat(gossip, 3), Sequence(push_sum(2), gossip)):
        with pytest.raises(InvalidInput, match=r"mode: got 'asynchronous'; allowed: synchronous"):
            check_conserved(program)
    with pytest.raises(InvalidInput, match="faults"):
        check_conserved(Repeat(push_sum(2), 3, until=lambda state, ctx: jnp.ones((), bool)))
