"""Running sums in the simulator, and invalid messages to a running peer."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines import peer
from hyperpush.engines.simulate import Simulate
from hyperpush.engines.threads import Threads, run_peers
from hyperpush.engines.transport import MemoryTransport, wire
from hyperpush.programs import Exchange, Local, Repeat, Scope, Server
from hyperpush.tasks.quadratic import quadratic

KEY = jax.random.key(11)


def receive(state, inbox, ctx):
    return jax.tree.map(lambda mine, others: inbox.own * mine + others, state, inbox.total)


def push_sum(rounds):
    return Repeat(Exchange(lambda s, ctx: s, receive, conserved=True), rounds, name="push-sum")


def test_ten_thousand_faulty_rounds_conserve_mass_and_find_the_mean():
    with jax.enable_x64(True):
        network = hp.networks.RandomDirected(20)  # every client's receivers change in every round
        values = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)))
        faults = hp.Faults(loss=0.3, duplicate=0.1, delay=5)
        start = (values, jnp.ones(20))
        outcome = Simulate(faults=faults).run(push_sum(10_000), network, start, jnp.zeros((20, 1)), KEY)
        w, mass = outcome.states
        (in_flight_w, in_flight_mass) = next(iter(outcome.totals.values())).in_flight()
        np.testing.assert_allclose(w.sum(0) + in_flight_w, values.sum(0), atol=1e-9)
        np.testing.assert_allclose(mass.sum() + in_flight_mass, 20, atol=1e-9)
        np.testing.assert_allclose(w / mass[:, None], np.tile(values.mean(0), (20, 1)), atol=1e-9)
        assert np.all(mass > 0)
        assert in_flight_mass > 0.1  # some mass is always in transit, so totals are needed


def test_float32_keeps_mass_and_mean_over_thousands_of_rounds():
    """Plain float32 totals would shift the mean by 3e-5 here; low-order parts and exact shares prevent it."""
    network, values = hp.networks.RandomDirected(20), jnp.asarray(np.random.default_rng(0).normal(size=20), jnp.float32)
    faults = hp.Faults(loss=0.3, duplicate=0.1, delay=5)
    outcome = Simulate(faults=faults).run(push_sum(3000), network, (values, jnp.ones(20)), jnp.zeros((20, 1)), KEY)
    w, mass = (np.asarray(part, np.float64) for part in outcome.states)
    np.testing.assert_allclose(w / mass, np.full(20, np.asarray(values, np.float64).mean()), atol=1e-6)
    _, in_flight = next(iter(outcome.totals.values())).in_flight()
    # A tenth of the worst case: each of 20 clients rounds its own mass by half a unit in each of 3,000 rounds. With the
    # compiler's usual options multiply-adds are fused, and the error is 1.2e-4; without optimization it is below 1e-4.
    assert mass.sum() + float(in_flight) == pytest.approx(20, abs=20 * 3000 * 0.1 * 2**-24)


@pytest.mark.parametrize("engine", [Simulate, Threads])
def test_a_restarted_push_sum_takes_nothing_from_the_one_before(engine):
    """Three averages run in a row at the same place of the program, each of values ten times as large as the last."""

    def enter(state, ctx):
        return state[0] * 10.0**ctx.round, jnp.ones(())

    def leave(state, pushed, ctx):
        return state[0], pushed[0] / pushed[1] / 10.0**ctx.round

    again = Repeat(Scope(push_sum(60), enter, leave), 3, name="again")
    start = (jnp.arange(4.0), jnp.zeros(4))
    faults = hp.Faults(loss=0.3, delay=2)
    outcome = engine(faults=faults).run(again, hp.networks.RandomDirected(4), start, jnp.zeros((4, 1)), KEY)
    np.testing.assert_allclose(outcome.states[1], np.full(4, 1.5), rtol=1e-4)


def test_without_faults_declared_nothing_changes():
    network, start = hp.networks.RandomDirected(5), (jnp.arange(5.0), jnp.ones(5))
    program = push_sum(30)
    plain = Simulate().run(program, network, start, jnp.zeros((5, 1)), KEY)
    sums = Simulate(faults=hp.Faults()).run(program, network, start, jnp.zeros((5, 1)), KEY)
    np.testing.assert_allclose(sums.states, plain.states, rtol=1e-5)


@pytest.mark.parametrize("engine", [Simulate, Threads])
def test_hgp_is_refused_where_messages_get_lost(engine):
    made = quadratic(4, 0)
    lossy, network = engine(faults=hp.Faults(loss=0.3)), hp.networks.RandomDirected(4)
    with pytest.raises(hp.InvalidInput, match=r"faults.*HGP"):
        hp.hypergradient(made, hp.HGP(100, 10, 0.2), network, key=KEY, engine=lossy)


@pytest.mark.parametrize("engine", [Simulate, Threads])
def test_votes_and_servers_are_refused_where_messages_get_lost(engine):
    vote = Repeat(push_sum(1), 5, until=lambda s, ctx: s[1] > 0)
    serve = Server(lambda s, ctx: s[0], lambda messages, key: messages, lambda s, answer, ctx: s)
    lossy = engine(faults=hp.Faults(loss=0.3))
    for program in (vote, serve):
        with pytest.raises(hp.InvalidInput, match=r"faults.*, which (servers|votes on ending a loop) require"):
            lossy.run(program, hp.networks.Ring(4), (jnp.ones(4),) * 2, jnp.zeros((4, 1)), KEY)


def mutations(good: bytes) -> list[bytes]:
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    future = bytearray(good)
    future[4] = 99
    return [b"", b"hello", good[:-7], good + b"\0" * 9, bytes(flipped), bytes(future), b"\xff" * 5000]


def test_hostile_bytes_do_not_change_a_run():
    network, program = hp.networks.RandomDirected(4), push_sum(12)
    start = (jnp.arange(4.0), jnp.ones(4))
    clean = Threads().run(program, network, start, jnp.zeros((4, 1)), KEY)
    hub = MemoryTransport(4, None, None, 30.0)
    node = zlib.crc32(repr(((0,), 0)).encode())
    good = (np.float32(3.0), np.float32(1.0))

    def message(sender, node=node, view=0, weight=0.5, tree=good, step=3, kind=wire.Kind.MESSAGE):
        return wire.encode(wire.Header(view, node, step, sender, 0, weight, kind), tree)

    hostile = [
        *mutations(bytes(message(1))),
        message(2),  # client 1 sends it and claims to be client 2
        message(1, node=123),
        message(1, view=7),
        message(1, kind=wire.Kind.TOTAL),  # this link uses no running sums
        message(1, kind=wire.Kind.DURABLE, tree=np.zeros(0)),
        message(1, weight=40.0),
        message(1, weight=float("nan")),
        message(1, tree=(np.float32("nan"), np.float32(1.0))),
        message(1, tree=(np.zeros(3, np.float32), np.float32(1.0))),
        message(1, tree=(np.float64(1.0), np.float32(1.0))),
        message(1, tree=[np.float32(1.0)] * 3),
    ]
    for payload in hostile:
        hub.inject(0, 3, 1, payload)
    hub.inject(0, 5, 1, message(1, step=1))  # well-formed, but of a round long past
    peers = [peer.Peer(client, network, hub.endpoint(client), KEY) for client in range(4)]
    outcome = run_peers(hub, peers, program, start, jnp.zeros((4, 1)))
    np.testing.assert_array_equal(outcome.states, clean.states)
    assert sum(outcome.rejected.values()) == len(hostile)
    assert {"wrong-sender", "wrong-node", "wrong-kind", "wrong-view", "wrong-weight", "not-finite"} <= set(
        outcome.rejected
    )
    assert outcome.late == 1


def test_a_peer_that_diverges_ends_the_run_for_all():
    grow = Exchange(lambda s, ctx: s, lambda s, inbox, ctx: s * 1e10 + inbox.total)
    with pytest.raises(hp.Diverged, match=r"growth diverged \(NaN or infinity\) in round"):
        Threads().run(
            Repeat(grow, 20, name="growth"), hp.networks.FullyConnected(3), jnp.ones(3), jnp.zeros((3, 1)), KEY
        )


def test_a_peer_does_not_return_what_is_not_finite():
    grow = Repeat(Local(lambda s, ctx: s * 1e30), 5, name="growth")
    for run in (Threads().run, Simulate().run):
        with pytest.raises(hp.Diverged, match=r"growth diverged \(NaN or infinity\) in round 2"):
            run(grow, hp.networks.FullyConnected(2), jnp.ones(2), jnp.zeros((2, 1)), KEY)


def test_a_silent_peer_is_an_error_not_a_hang():
    network = hp.networks.FullyConnected(3)
    hub = MemoryTransport(3, None, None, 0.5)
    lonely = peer.Peer(0, network, hub.endpoint(0), KEY)
    with pytest.raises(hp.HyperpushError, match=r"waiting for senders \[1, 2\]"):
        lonely.run(push_sum(3), (jnp.ones(()), jnp.ones(())), jnp.zeros(1))
