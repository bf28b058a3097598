"""The reported numbers of products and gradients compared with arithmetic, and with counters inside the programs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.hypergradients import HypergradientState
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.inner.base import InnerState
from hyperpush.programs import Average, Exchange, Local, Repeat, Scope, Sequence, Server, profile, stepwise, traced
from hyperpush.programs.counting import repeated
from hyperpush.tasks.logistic import logistic

PROBLEM = hp.extend.Problem(lambda x, h, b: h * jnp.sum(x**3), lambda x, h, b: h**2 * jnp.sum(x**2))
NETWORK = hp.networks.Ring(4)
KEY = jax.random.key(5)


def bend(x, times=1):
    """Take `times` Hessian products, one after the other."""
    for _ in range(times):
        x = PROBLEM.hessian_product(jnp.ones_like(x), jnp.ones(()), None, x)
    return x


# ------------------------------------------------------------- inside a leaf


def many(x):
    return jnp.stack([x] * 5)


def loop(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 100, bend, x)


def solved(x):
    with repeated(9):  # one product for the first residual, then one in each iteration
        return jax.scipy.sparse.linalg.cg(bend, x, maxiter=9)[0]


def nested(x):
    with repeated(3):
        again = jax.lax.while_loop(
            lambda x: jnp.sum(x) < 10, lambda x: jax.lax.fori_loop(0, 4, lambda _, x: bend(x), x), x
        )
    return bend(again)


def gradient(x):
    return PROBLEM.inner_gradient(x, jnp.ones(()), None)


@pytest.mark.parametrize(
    ("f", "hessian", "jacobian", "gradients"),
    [
        (lambda x: bend(x, 2), 2, 0, 0),
        (lambda x: PROBLEM.products(x, jnp.ones(()), None, x), 1, 1, 0),
        (lambda x: PROBLEM.products(x, jnp.ones(()), None, x)[0], 1, 0, 0),
        (lambda x: PROBLEM.products(x, jnp.ones(()), None, x)[1], 0, 1, 0),
        (lambda x: PROBLEM.jacobian_product(x, jnp.ones(()), None, x), 0, 1, 0),
        (lambda x: (gradient(x), PROBLEM.outer_gradients(x, jnp.ones(()), None)[1]), 0, 0, 2),
        (lambda x: (bend(x), x)[1], 0, 0, 0),
        (lambda x: jax.lax.fori_loop(0, 7, lambda _, x: bend(x, 2), x), 14, 0, 0),
        (lambda x: jax.lax.scan(lambda x, _: (x + 1, bend(x)), x, None, length=6), 6, 0, 0),
        (lambda x: jax.lax.scan(lambda x, _: (x + 1, bend(x)), x, None, length=6)[0], 0, 0, 0),
        (lambda x: jax.vmap(bend)(many(x)), 5, 0, 0),
        (lambda x: jax.lax.map(bend, many(x), batch_size=2), 5, 0, 0),
        (lambda x: jax.jit(bend)(jax.jit(bend)(x)), 2, 0, 0),
        (lambda x: jax.checkpoint(bend)(x), 1, 0, 0),
        (lambda x: jax.lax.cond(x[0] > 0, bend, lambda x: bend(x, 3), x), 3, 0, 0),
        (lambda x: jax.jacfwd(gradient)(x), 3, 0, 0),
        (lambda x: jax.jacrev(gradient)(x), 3, 0, 0),
        (lambda x: jax.vjp(gradient, x)[1](x), 1, 0, 0),
        (solved, 10, 0, 0),
        (nested, 13, 0, 0),
    ],
)
def test_what_a_leaf_does(f, hessian, jacobian, gradients):
    for _ in range(2):  # in the second pass JAX has cached much of the trace
        _, work = traced(lambda x, ctx: f(x), 4, None, jax.ShapeDtypeStruct((3,), jnp.float32))
        assert (work["hessian_products"], work["jacobian_products"], work["gradients"]) == (
            hessian,
            jacobian,
            gradients,
        )


def test_a_loop_of_unknown_length_must_say_how_often_it_runs():
    with pytest.raises(hp.InvalidInput, match=r"hessian_products: got 'in a loop that ends on a condition'.*repeated"):
        traced(lambda x, ctx: loop(x), 4, None, jnp.ones(3))
    with pytest.raises(hp.InvalidInput, match=r"times: got -1; allowed: a whole number from 0"), repeated(-1):
        pass


# ---------------------------------------------------------- inside a program


def same(x, ctx):
    return x


def does(times):
    return lambda *args: bend(args[0], times)


def get(times):
    return lambda x, ctx: (bend(x, times), jnp.ones(()))


def keep(x, *rest):
    return x


def observed(x, inbox, ctx):
    return bend(jnp.where(inbox.heard, inbox.sent, x[0]))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (Local(does(2)), 6 * 2),
        (Exchange(does(2), lambda x, inbox, ctx: bend(inbox.mix(x), 3)), 6 * 5),
        (Exchange(same, keep, weights=lambda x, ctx: jnp.ones(4) * bend(x)[0]), 6),
        (Exchange(same, observed, observe=True), 6),
        (Average(get(2), lambda x, mean, mass, ctx: bend(mean), rounds=5), 6 * 3),
        (Average(get(2), lambda x, mean, mass, ctx: bend(mean), rounds=5, by="exact"), 6 * 3),
        (Server(does(2), lambda messages, key: messages, lambda x, answer, ctx: bend(answer, 3)), 6 * 5),
        (Scope(Local(does(4)), does(2), lambda x, inner, ctx: bend(inner)), 6 * 7),
        (Scope(Local(lambda x, ctx: (x, bend(x))), same, lambda x, inner, ctx: bend(inner[1], 2)), 6 * 3),
        (Repeat(Local(does(1)), 5), 6 * 5),
        (Repeat(Local(does(1)), 0), 0),
        # The length of this loop is agreed on each time it is entered; assume that it ran seven times in total.
        (Repeat(Local(does(3)), 5, times=lambda x, ctx: jnp.sum(bend(x, 2)).astype(int)), 7 * 3 + 6 * 2),
        (Repeat(Local(does(3)), 5, until=lambda x, ctx: jnp.sum(bend(x, 2)) > 0), 7 * 3 + 7 * 2),
    ],
)
def test_every_leaf_of_every_node_counts(node, expected):
    """The leaf is in a loop of three inside a loop of two."""
    program = Sequence(Local(same), Repeat(Sequence(Repeat(Sequence(node), 3)), 2))
    for tree in (program, stepwise(program)):
        found = profile(tree, jnp.ones(4), jnp.zeros(1), 4)
        assert found.total({(1, 0, 0, 0, 0, 0): 7})["hessian_products"] == expected


def work(state, ctx, times=1):
    """Take products and count them in the state: (x, goal, number of products)."""
    x, goal, done = state
    return x + 0 * bend(x, times), goal, done + times


def served(host):
    return Server(
        lambda state, ctx: state[0],
        lambda messages, key: messages,
        lambda state, answer, ctx: work((answer, state[1] + 1, state[2]), ctx, 4),
        host=host,
    )


COUNTING = Repeat(Local(work), 20, times=lambda state, ctx: state[1], name="times")
VOTING = Repeat(Local(partial(work, times=10)), 50, until=lambda state, ctx: state[2] >= 13 * state[1], name="until")
AGREED = Sequence(Repeat(Sequence(COUNTING, served(False)), 3, name="outer"), VOTING)
ENGINES = {"simulate": hp.Simulate(), "shard": hp.Shard(3), "threads": hp.Threads()}


START = (jnp.ones((4, 2)), jnp.full(4, 2, jnp.int32), jnp.zeros(4, jnp.int32))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_loops_that_the_run_ends(engine):
    outcome = engine.run(AGREED, NETWORK, START, jnp.zeros((4, 1)), KEY)
    # There are 2 + 3 + 4 single products and three answers of 4. Then tens follow until there are 13 times the last
    # goal, which is 5.
    assert np.all(outcome.states[2] == 9 + 12 + 50)
    assert outcome.work["hessian_products"] == 71
    votes = 5 * NETWORK.flood_rounds()
    assert (outcome.rounds, outcome.floats) == (3 + votes, 3 * 2 + votes)


def test_a_server_in_plain_python():
    outcome = hp.Simulate().run(Repeat(served(True), 3), NETWORK, START, jnp.zeros((4, 1)), KEY)
    assert np.all(outcome.states[2] == 12)
    assert outcome.work["hessian_products"] == 12


# ------------------------------------------------------------------- methods

MADE = logistic(4, 0, examples=8)


def work_of(program, states):
    one = jax.tree.map(lambda leaf: leaf[0], (states, MADE.data))
    total = profile(program, one[0], one[1], 4).total({})
    return tuple(total[kind] for kind in ("hessian_products", "jacobian_products", "gradients"))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (hp.HGP(20, 3, 0.1), (20, 20, 1)),
        (hp.HGP(20, 3, 0.1, independent_batches=True, averaging="exact"), (20, 20, 1)),
        (hp.hypergradients.LocalGradient(7), (2 * 7, 1 + 10, 1)),  # two systems, and ten products for the norm of B_i
        (hp.hypergradients.LocalGradient(7, singular="minimum-norm"), (7, 1 + 10, 1)),
        (hp.hypergradients.DirectGradient(), (0, 0, 1)),
        (hp.hypergradients.DirectedRB(10, 0.1), (10, 10, 1)),
        (hp.hypergradients.DirectedRB(10, 0.1, independent_batches=True), (10, 10, 1)),
        (hp.hypergradients.VRHGP(10, 0.1), (20, 20, 1)),
        (hp.hypergradients.ExactRB(10, 0.1), (10, 10, 1)),
    ],
)
def test_estimators(estimator, expected):
    estimator = estimator.with_options(links="means") if hasattr(estimator, "links") else estimator
    links = known_links(estimator, NETWORK, None, MADE)
    states = HypergradientState(MADE.params, MADE.hypers, jnp.zeros_like(MADE.hypers), links)
    assert work_of(estimator.program(MADE.problem), states) == expected


@pytest.mark.parametrize(
    ("solver", "gradients"),
    [
        (hp.SGP(30, 0.1), 30),
        (hp.SGP(30, 0.1, variant="gradient-after"), 30),
        (hp.DSGD(30, 0.1), 30),
        (hp.FedAvg(3, 0.1, epochs=5), 15),
        (hp.FedAvg(3, 0.1, epochs=5, batch_size=2), 3 * 5 * (8 // 2)),
    ],
)
def test_solvers(solver, gradients):
    assert work_of(solver.program(MADE.problem), InnerState(MADE.params, MADE.hypers)) == (0, 0, gradients)


@pytest.mark.long
def test_results_report_them():
    for engine in (hp.Simulate(), hp.Threads()):
        found = hp.hypergradient(MADE, hp.HGP(6, 2, 0.1), NETWORK, key=KEY, engine=engine).costs
        assert (found.hessian_products, found.jacobian_products, found.gradients) == (6, 6, 1)
        assert found.accesses == {"train": 12, "validation": 1}
    trained = hp.train(MADE, hp.SGP(5, 0.1), NETWORK, key=KEY).costs
    assert (trained.hessian_products, trained.jacobian_products, trained.gradients) == (0, 0, 5)
    assert trained.accesses == {"train": 5}
