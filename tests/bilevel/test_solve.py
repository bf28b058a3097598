"""The three outer problems on quadratics, whose optima NumPy knows: own hypers, one for all, one for all alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_forms import closed_form, mean_outer_cost
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.bilevel.history import spent
from hyperpush.bilevel.solve import program
from hyperpush.engine.layout import check_repairable
from hyperpush.estimators.state import Hyper
from hyperpush.problems.quadratic import quadratic
from hyperpush.program import Exchange, Local, Repeat, Within, contains, survey

pytestmark = pytest.mark.usefixtures("float64")

FULL, RANDOM = hp.networks.FullyConnected(3), hp.networks.RandomDirected(3)
CHEAP = (hp.Alone(1, 0.1), hp.DirectGradient(), optax.sgd(0.1))
NOISE = hp.Noise(hp.Laplace(1), 1.0, 1.0, 1.0)
STOP = hp.EarlyStopping(lambda params, hyper, batch: jnp.sum(hyper), None, 1)


def data(made):
    return jax.tree.map(np.asarray, (made.inner_data, made.outer_data))


def least_squares(made):
    """F̄ is the mean of ½‖rows·λ − right‖², λ all hypers in one vector: x* is affine in them."""
    first, second = data(made)
    n, h, d = first["coupling"].shape
    inverse = np.linalg.inv(first["hessian"].sum(0))
    slope = -inverse @ first["coupling"].reshape(n * h, d).T  # x* = slope·λ + offset
    offset = inverse @ first["linear"].sum(0)
    rows = np.concatenate([second["map"] @ slope, np.eye(n * h).reshape(n, h, n * h)], axis=1)
    right = np.concatenate([second["target"] - second["map"] @ offset, second["hyper_target"]], axis=1)
    return rows.reshape(-1, n * h), right.ravel()


def personal_optimum(made):
    rows, right = least_squares(made)
    return np.linalg.lstsq(rows, right, rcond=None)[0].reshape(made.hypers.shape)


def common_optimum(made):
    rows, right = least_squares(made)
    n, h = made.hypers.shape
    return np.linalg.lstsq(rows @ np.tile(np.eye(h), (n, 1)), right, rcond=None)[0]


def alone_optimum(made):
    """The common hyper that is best on average when client i's params are A_i^{-1}(b_i − C_iᵀλ)."""
    first, second = data(made)
    inverse, eye = np.linalg.inv(first["hessian"]), np.eye(made.hypers.shape[1])
    slopes = -second["map"] @ inverse @ first["coupling"].transpose(0, 2, 1)
    misfits = second["target"] - np.einsum("nij,njk,nk->ni", second["map"], inverse, first["linear"])
    rows = np.concatenate([*slopes, *[eye] * len(slopes)])
    return np.linalg.lstsq(rows, np.concatenate([misfits.ravel(), second["hyper_target"].ravel()]), rcond=None)[0]


def solve(made, network, inner, estimator, outer, outer_steps, **options):
    return hp.solve(
        made.problem,
        network,
        inner=inner,
        hypergradient=estimator,
        outer=outer,
        outer_steps=outer_steps,
        params=made.params,
        hypers=made.hypers,
        inner_data=made.inner_data,
        outer_data=made.outer_data,
        key=jax.random.key(0),
        **options,
    )


def test_hypers_of_ones_own_reach_their_optimum():
    """Exact averages: what `solve` does at every outer step has a closed form."""
    made = quadratic(3, 1)
    first, second = data(made)
    best = personal_optimum(made)
    inner = hp.SGP(80, 0.4, observe=True)  # what it sees of the links is of no use to HGP, and in nobody's way
    found = solve(made, FULL, inner, hp.HGP(80, 1, 0.4), optax.sgd(1.0), 60)
    np.testing.assert_allclose(found.hypers, best, atol=1e-7)
    history, start = found.history, np.asarray(made.hypers)
    np.testing.assert_allclose(history.norms[0], np.linalg.norm(closed_form(start, first, second), axis=1), rtol=1e-7)
    np.testing.assert_allclose(history.hypers[0], start)
    np.testing.assert_allclose(history.hypers[1:], history.hypers[:-1] - found.hypergradients)
    np.testing.assert_array_equal(history.hypers[-1], found.hypers)
    for step in (0, 1, 60):
        expected = mean_outer_cost(np.asarray(history.hypers[step]), first, second)
        assert found.outer_costs[step].mean() == pytest.approx(expected, rel=1e-7)
    # 80 rounds of (4 params, mass), then in every outer step as many for the hyper-gradient and again for the params.
    rounds = 80 + 160 * np.arange(61)
    np.testing.assert_array_equal(history.rounds, rounds)
    np.testing.assert_array_equal(history.floats, 5 * rounds)
    assert (found.rounds, found.floats, found.best_step) == (rounds[-1], 5 * rounds[-1], 60)
    assert found.hessian_products == found.jacobian_products == 60 * 80
    assert history.metrics is None


def test_a_warm_start_and_an_estimator_that_reverses_links():
    made = quadratic(3, 1)
    inner, estimator = hp.SGP(200, hp.milestones(0.1, (150,)), observe=True), hp.DirectedRB(200, 0.02)
    found = solve(made, RANDOM, inner, estimator, optax.sgd(0.5), 30, restart=False, trace=False)
    best = personal_optimum(made)
    assert np.linalg.norm(found.hypers - best) < 0.1 * np.linalg.norm(made.hypers - best)
    assert found.history.norms.shape == (30, 3)
    assert found.history.hypers is found.hypergradients is None


def test_one_hyper_for_all():
    """By SGP on the outer level, which is exact where averages are and the optimiser is linear."""
    made = quadratic(3, 1)
    first, second = data(made)
    best, start, rate = common_optimum(made), np.asarray(made.hypers), 0.2
    assert np.linalg.norm(best - personal_optimum(made)) > 0.5
    together = hp.OuterConsensus(tracked=False)
    found = solve(made, FULL, hp.SGP(80, 0.4), hp.HGP(80, 1, 0.4), optax.sgd(rate), 100, consensus=together)
    np.testing.assert_allclose(found.hypers, np.broadcast_to(best, (3, 3)), atol=1e-7)
    # A common λ moves along dF̄/dλ, the sum of the derivatives by each client's own.
    after = start.mean(0) - rate * closed_form(start, first, second).sum(0)
    np.testing.assert_allclose(found.history.hypers[1], np.broadcast_to(after, (3, 3)), rtol=1e-7)
    # Besides params and hyper-gradients, three hypers and the mass travel once per outer step.
    assert found.rounds == 80 + 100 * 161
    assert found.floats == 5 * (80 + 100 * 160) + 4 * 100


def test_one_hyper_for_all_who_train_alone():
    """By tracking, on random links and with Adam; without it this ends 0.2 away."""
    made = quadratic(3, 1)
    best = alone_optimum(made)
    assert min(np.linalg.norm(best - other) for other in (common_optimum(made), personal_optimum(made))) > 0.3
    inner, estimator, together = hp.Alone(80, 0.4), hp.LocalGradient(8), hp.OuterConsensus(pushes=2)
    found = solve(made, RANDOM, inner, estimator, optax.adam(0.1), 400, restart=False, consensus=together)
    np.testing.assert_allclose(found.hypers, np.broadcast_to(best, (3, 3)), atol=1e-7)
    assert (found.rounds, found.floats) == (800, 800 * (3 + 1 + 3))


@pytest.mark.parametrize("tracked", [True, False])
def test_the_outer_level_survives_lost_messages(tracked):
    """All that is pushed is conserved, and nothing restarts its running sums."""
    tree = program(quadratic(3, 1).problem, *CHEAP, 2, True, hp.OuterConsensus(tracked=tracked))
    check_repairable(tree, True)
    assert contains(tree, is_exchange)
    assert not contains(tree, lambda node: isinstance(node, Exchange) and not node.conserved)
    assert not contains(tree, lambda node: isinstance(node, Within) and contains(node, is_exchange))


def is_exchange(node):
    return isinstance(node, Exchange)


def test_zero_outer_steps_only_train():
    made = quadratic(3, 1)
    found = solve(made, FULL, *CHEAP, 0)
    np.testing.assert_array_equal(found.hypers, made.hypers)
    assert np.abs(found.params).max() > 0.01
    assert (found.rounds, found.best_step) == (0, 0)
    assert found.outer_costs.shape == (1, 3)
    assert found.hypergradients is None
    np.testing.assert_array_equal(found.history.rounds, [0])


class Counting(hp.LocalGradient):
    """The number of times it was asked before, as far as it remembers."""

    def memory(self, params, hyper):
        return jnp.zeros(())

    def program(self, problem):
        def estimate(state, ctx):
            before = state.memory
            value = jax.tree.map(lambda leaf: jnp.full_like(leaf, -1 if before is None else before), state.hyper)
            return Hyper(state.params, state.hyper, value, state.links, None if before is None else before + 1)

        return Local(estimate)


@pytest.mark.parametrize("restart", [True, False], ids=["restart", "warm"])
def test_an_estimator_finds_its_memory_again_and_params_only_without_restart(restart):
    made = quadratic(3, 1)
    found = solve(made, FULL, hp.Alone(1, 0.1), Counting(), optax.sgd(1.0), 4, restart=restart)
    np.testing.assert_array_equal(found.hypergradients[:, 1, 2], [0, 1, 2, 3])
    hypers = np.asarray(made.hypers) - np.cumsum([0, 0, 1, 2, 3])[:, None, None]
    np.testing.assert_allclose(found.history.hypers, hypers)
    first, x = data(made)[0], np.zeros(made.params.shape)
    for hyper in hypers[-1:] if restart else hypers:
        pull = first["linear"] - np.einsum("nhd,nh->nd", first["coupling"], hyper)
        x = x - 0.1 * (np.einsum("nij,nj->ni", first["hessian"], x) - pull)
    np.testing.assert_allclose(found.params, x)


def test_a_single_estimate_remembers_nothing():
    made = quadratic(3, 1)
    once = hp.hypergradient(made.problem, Counting(), FULL, *made[1:], jax.random.key(0))
    np.testing.assert_array_equal(once.value, np.full((3, 3), -1))


def test_costs_by_step_only_where_steps_are_equal():
    nothing = Local(lambda state, ctx: state)
    loop, start = Repeat(nothing, 3, until=lambda state, ctx: state), survey(nothing, jnp.zeros(()), None, 3)
    assert spent(start, loop, (6, 6), 2) is None
    np.testing.assert_array_equal(spent(start, nothing, (6, 4), 2), [[0, 0], [3, 2], [6, 4]])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hp.OuterConsensus(pushes=0), ("OuterConsensus.pushes", "0", "from 1")),
        (lambda: solve(quadratic(3, 1), FULL, *CHEAP, -1), ("outer_steps", "-1", "from 0")),
        (lambda: solve(quadratic(3, 1), FULL, *CHEAP, 1, every=2), ("every", "2", "every outer step")),
        (
            lambda: solve(quadratic(3, 1), FULL, hp.SGP(5, 0.1, privacy=NOISE), *CHEAP[1:], 1),
            ("hypergradient", "DirectGradient", "privacy=Noise"),
        ),
        (
            lambda: solve(quadratic(3, 1), FULL, hp.SGP(5, 0.1, privacy=NOISE), *CHEAP[1:], 0, stop=STOP),
            ("stop", "early stopping", "None"),
        ),
        (
            lambda: solve(quadratic(3, 1), FULL, CHEAP[0], hp.HGP(1, 1, 0.1, privacy=NOISE), CHEAP[2], 0),
            ("inner", "Alone", "privacy=Noise"),
        ),
        (lambda: solve(quadratic(3, 1), hp.networks.FullyConnected(4), *CHEAP, 1), ("params", "(3, 4)", "4 clients")),
    ],
    ids=["pushes", "outer_steps", "every", "half private", "private stop at 0", "half private at 0", "clients"],
)
def test_what_cannot_be_used_is_named(make, words):
    with pytest.raises(hp.InvalidInput) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
