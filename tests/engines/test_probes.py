"""Six small programs that stress the nodes; all engines that can run a program must give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from repeats import some

import hyperpush as hp
from hyperpush.engines.faults import Faults
from hyperpush.engines.shard import Shard
from hyperpush.engines.simulate import Simulate
from hyperpush.engines.threads import Threads
from hyperpush.inner.base import InnerState
from hyperpush.programs import Average, Exchange, Local, Repeat, Scope, Sequence, Server
from hyperpush.tasks.logistic import logistic

ENGINES = {
    "simulate": Simulate().run,
    "shard-2": Shard(2).run,
    "shard-4": Shard(4).run,
    "peer": Threads().run,
}
NETWORK = hp.networks.RandomDirected(6, probability=(0.4, 0.8))
KEY = jax.random.key(5)
NOTHING = jnp.zeros((6, 1))


def values(n=6):
    return jnp.asarray(np.random.default_rng(3).normal(size=n), jnp.float32)


@pytest.fixture(params=["simulate", "shard-4", "peer"])  # six clients on four devices need padding
def engine(request):
    return ENGINES[request.param]


@pytest.mark.parametrize("engine", some(ENGINES, ("shard-4", "peer")))
def test_sgp_of_logistic_regression(engine):
    made = logistic(6, 1, examples=20)
    program = hp.SGP(50, 0.5, batch_size=7, observe=True).program(made.problem)
    arguments = (program, NETWORK, InnerState(made.params, made.hypers), made.data, KEY)
    truth, outcome = Simulate().run(*arguments), engine(*arguments)
    # Check that the reference is not trivial before comparing with it.
    assert np.abs(truth.states.params).max() > 0.1
    for mine, theirs in zip(jax.tree.leaves(outcome.states), jax.tree.leaves(truth.states), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert (outcome.rounds, outcome.floats, outcome.step) == (50, 50 * 7, 50)


@pytest.mark.parametrize("by", ["push", "gossip", "exact"])
def test_averaging(engine, by):
    network = NETWORK if by == "push" else hp.networks.StaticUndirected(6, probability=0.6)
    average = Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean, rounds=9, by=by)
    start = jnp.stack([values(), values() ** 2], axis=1)
    outcome = engine(average, network, start, NOTHING, KEY)
    expected = start
    if by == "exact":
        expected = jnp.broadcast_to(start.mean(0), start.shape)
    else:
        matrices = [hp.networks.matrix(network, jax.random.fold_in(KEY, 1), t, by) for t in range(9)]
        product = np.linalg.multi_dot([np.asarray(m, np.float64) for m in reversed(matrices)])
        expected = product @ np.asarray(start, np.float64)
        if by == "push":
            expected = expected / (product @ np.ones(6))[:, None]
    np.testing.assert_allclose(outcome.states, expected, rtol=1e-5, atol=1e-6)


def test_maximum_by_consensus(engine):
    flood = Exchange(
        send=lambda x, ctx: x,
        receive=lambda x, inbox, ctx: jnp.maximum(x, inbox.total),
        weights="ones",
        reduce="max",
    )
    outcome = engine(Repeat(flood, NETWORK.flood_rounds()), NETWORK, values(), NOTHING, KEY)
    np.testing.assert_array_equal(outcome.states, np.full(6, values().max()))


def test_an_agreed_number_of_rounds(engine):
    """Push scalars until all ratios are stable, agree on the number of pushes, and use it for a second loop."""

    def receive(state, inbox, ctx):
        w, mass, _, count = state
        mixed, weight = inbox.own * w + inbox.total[0], inbox.own * mass + inbox.total[1]
        return mixed, weight, jnp.abs(mixed / weight - w / mass), count + 1

    push = Exchange(lambda s, ctx: (s[0], s[1]), receive)
    probe = Repeat(push, 200, until=lambda s, ctx: s[2] < 1e-3, name="probe")
    again = Repeat(push, 200, times=lambda s, ctx: s[3], name="again")
    ones, zeros = jnp.ones(6), jnp.zeros(6)
    start = (values(), ones, zeros, zeros.astype(jnp.int32))
    outcome = engine(Sequence(probe, again), NETWORK, start, NOTHING, KEY)
    truth = Simulate().run(Sequence(probe, again), NETWORK, start, NOTHING, KEY)
    count = np.asarray(truth.states[3])
    assert np.all(count == count[0])
    assert 4 < count[0] < 200
    np.testing.assert_array_equal(outcome.states[3], count)
    np.testing.assert_allclose(outcome.states[0] / outcome.states[1], np.full(6, values().mean()), atol=1e-3)
    # There are `count` pushes of two numbers; after every second push, clients agree on one number.
    agreements = int(count[0]) // 2 * NETWORK.flood_rounds()
    assert outcome.rounds == int(count[0]) + agreements
    assert outcome.floats == 2 * int(count[0]) + agreements


def test_a_server_that_ranks(engine):
    """A task that no average can solve: every client learns its rank, with noise drawn at the server."""

    def compute(messages, key):
        return jnp.argsort(jnp.argsort(messages)), jax.random.normal(key, messages.shape)

    rank = Server(lambda s, ctx: s[0], compute, lambda s, answer, ctx: (s[0], *answer))
    start = (values(), jnp.zeros(6, jnp.int32), jnp.zeros(6))
    outcome = engine(Repeat(rank, 2), NETWORK, start, NOTHING, KEY)
    np.testing.assert_array_equal(outcome.states[1], np.argsort(np.argsort(values())))
    truth = Simulate().run(Repeat(rank, 2), NETWORK, start, NOTHING, KEY)
    assert np.std(truth.states[2]) > 0.1
    np.testing.assert_allclose(outcome.states[2], truth.states[2], rtol=1e-6)


def push_sum(rounds, conserved):
    def receive(state, inbox, ctx):
        return jax.tree.map(lambda mine, others: inbox.own * mine + others, state, inbox.total)

    return Repeat(Exchange(lambda s, ctx: s, receive, conserved=conserved), rounds, name="push-sum")


CAREFUL, CARELESS = push_sum(50, conserved=True), push_sum(50, conserved=False)
LONG = push_sum(120, conserved=True)


@pytest.mark.parametrize("engine", [Simulate, Threads])
def test_running_sums_under_loss(engine):
    faults = Faults(loss=0.3, duplicate=0.1, delay=5)
    start = (values(), jnp.ones(6))
    outcome = engine(faults=faults).run(CAREFUL, NETWORK, start, NOTHING, KEY)
    truth = Simulate(faults=faults).run(CAREFUL, NETWORK, start, NOTHING, KEY)
    w, mass = outcome.states
    np.testing.assert_allclose(w / mass, np.full(6, values().mean()), atol=1e-3)
    if engine is Simulate:  # a longer run, where rounds cost nothing
        w, mass = engine(faults=faults).run(LONG, NETWORK, start, NOTHING, KEY).states
        np.testing.assert_allclose(w / mass, np.full(6, values().mean()), atol=2e-6)
    np.testing.assert_allclose(outcome.states, truth.states, rtol=1e-4, atol=1e-5)
    # Without running sums the same faults destroy mass, so the test can fail.
    lost = engine(faults=faults).run(CARELESS, NETWORK, start, NOTHING, KEY)
    assert float(lost.states[1].sum()) < 0.1
    assert lost.late > 0


def test_local_draws_are_the_same_everywhere(engine):
    noise = Repeat(Local(lambda x, ctx: x + jax.random.normal(ctx.key) * (1 + ctx.round)), 3)
    outcome = engine(Sequence(noise, noise), NETWORK, jnp.zeros(6), NOTHING, KEY)
    truth = Simulate().run(Sequence(noise, noise), NETWORK, jnp.zeros(6), NOTHING, KEY)
    assert np.std(truth.states) > 0.1
    np.testing.assert_allclose(outcome.states, truth.states, rtol=1e-6, atol=1e-6)


def test_no_two_leaves_share_a_key(engine):
    """Every random draw of a program has a unique key, in every leaf."""

    def note(state, ctx):
        drawn, count = state
        return drawn.at[count].set(jax.random.bits(ctx.key, dtype=jnp.uint32)), count + 1

    def send(state, ctx):
        return jax.random.bits(ctx.key, dtype=jnp.uint32)

    def receive(state, inbox, ctx):
        return note((state[0].at[state[1]].set(inbox.total), state[1] + 1), ctx)

    leaf = Local(note)
    talk = Exchange(send, receive, weights="ones", reduce="max")
    inside = Scope(Repeat(leaf, 2), note, lambda state, inner, ctx: note(inner, ctx))
    start = (jnp.zeros((6, 24), jnp.uint32), jnp.zeros(6, jnp.int32))
    program = Repeat(Sequence(leaf, inside, talk, leaf), 3)
    drawn, count = engine(program, NETWORK, start, NOTHING, KEY).states
    # Draws per iteration: leaf, enter, 2 × body, leave, another client's draw from its message, receive, leaf.
    assert np.all(count == 24)
    own = np.delete(np.asarray(drawn).reshape(6, 3, 8), 5, axis=2)
    assert len(np.unique(own)) == own.size
    assert not np.isin(np.asarray(drawn).reshape(6, 3, 8)[:, :, 5], own).any()


@pytest.mark.parametrize("dtype", some({"int": jnp.int32, "bool": jnp.bool_, "bfloat16": jnp.bfloat16}, ["bfloat16"]))
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_messages_of_any_type(engine, dtype, reduce):
    start = (jnp.arange(6) % 3).astype(dtype)

    def receive(state, inbox, ctx):
        return state[0], inbox.total.astype(jnp.float32)

    once = Exchange(lambda s, ctx: s[0], receive, reduce=reduce)
    outcome = engine(once, hp.networks.Ring(6), (start, jnp.zeros(6)), NOTHING, KEY)
    left, right = np.roll(np.asarray(start, np.float32), 1), np.roll(np.asarray(start, np.float32), -1)
    expected = (left + right) / 3 if reduce == "sum" else np.maximum(left, right)
    np.testing.assert_allclose(outcome.states[1], expected, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)


def test_padding_clients_answer_to_nobody():
    """Padding copies the client whose own problem is unstable alone, though not together with the others."""
    problem = hp.extend.Problem(lambda x, h, b: b * x**2 / 2, lambda x, h, b: x)
    curvature = jnp.array([0.1, 0.1, 3.0])
    program = hp.SGP(600, 1.0).program(problem)
    network = hp.networks.FullyConnected(3)
    arguments = (
        program,
        network,
        InnerState(jnp.ones(3), jnp.ones(3)),
        hp.extend.Data.pair(curvature, curvature),
        KEY,
    )
    truth = Simulate().run(*arguments)
    found = Shard(2).run(*arguments)
    np.testing.assert_allclose(found.states.params, truth.states.params, atol=1e-6)


@pytest.mark.parametrize("every", [1, 3])
def test_a_recorded_loop_runs_the_agreed_number_of_times(engine, every):
    count = Repeat(Local(lambda s, ctx: s + 1), 10, times=lambda s, ctx: 9 - s, name="count")
    outcome = engine(
        count, NETWORK, jnp.zeros(6, jnp.int32), NOTHING, KEY, record={"count": lambda s, ctx: s}, every=every
    )
    assert np.all(outcome.states == 9)
    np.testing.assert_array_equal(outcome.history["count"][:, 0], np.arange(every, 10, every))


def test_what_cannot_be_recorded_is_refused(engine):
    loop = Repeat(Local(lambda s, ctx: s), 2, name="loop")
    with pytest.raises(hp.InvalidInput, match=r"record: got 'lop'.*loop"):
        engine(loop, NETWORK, jnp.zeros(6), NOTHING, KEY, record={"lop": lambda s, ctx: s})
    with pytest.raises(hp.InvalidInput, match="every"):
        engine(loop, NETWORK, jnp.zeros(6), NOTHING, KEY, every=0)
