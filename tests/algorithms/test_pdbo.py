"""Three outer problems on quadratics with optima known to NumPy: personal hypers, a common hyper, and local params."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import closed_form, data, least_squares, mean_outer_cost
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.algorithms import CDBOLocal
from hyperpush.algorithms.base import LOOP, BilevelState
from hyperpush.engines.run_checks import check_repairable
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.programs import Exchange, Local, Scope, contains, program_of
from hyperpush.tasks.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")

FULL, RANDOM = hp.networks.FullyConnected(3), hp.networks.RandomDirected(3)
ALONE, LOCAL, DIRECT = hp.LocalSGD(1, 0.1), hp.hypergradients.LocalGradient(), hp.hypergradients.DirectGradient()
CHEAP = (ALONE, DIRECT, hp.optimizer("sgd", learning_rate=0.1))


def sgd(rate):
    return hp.optimizer("sgd", learning_rate=rate)


def personal_optimum(made):
    rows, right = least_squares(made)
    return np.linalg.lstsq(rows, right, rcond=None)[0].reshape(made.hypers.shape)


def common_optimum(made):
    rows, right = least_squares(made)
    n, h = made.hypers.shape
    return np.linalg.lstsq(rows @ np.tile(np.eye(h), (n, 1)), right, rcond=None)[0]


def alone_optimum(made):
    """Return the common hyper with the lowest mean outer cost, where client i's params are A_i^{-1}(b_i − C_iᵀλ)."""
    first, second = data(made)
    inverse, eye = np.linalg.inv(first["hessian"]), np.eye(made.hypers.shape[1])
    slopes = -second["map"] @ inverse @ first["coupling"].transpose(0, 2, 1)
    misfits = second["target"] - np.einsum("nij,njk,nk->ni", second["map"], inverse, first["linear"])
    rows = np.concatenate([*slopes, *[eye] * len(slopes)])
    return np.linalg.lstsq(rows, np.concatenate([misfits.ravel(), second["hyper_target"].ravel()]), rcond=None)[0]


def test_hypers_of_ones_own_reach_their_optimum():
    """With exact averages, every step of PDBO has a closed form."""
    made = quadratic(3, 1)
    first, second = data(made)
    best = personal_optimum(made)
    inner = hp.SGP(80, 0.4, observe=True)  # HGP does not need the observed links, and they must not change its result
    found = hp.solve(made, hp.PDBO(inner, hp.HGP(80, 1, 0.4), sgd(1.0), 60), FULL, key=0)
    np.testing.assert_allclose(found.hypers, best, atol=1e-7)
    history, start = found.history, np.asarray(made.hypers)
    np.testing.assert_array_equal(history.steps, range(61))
    norms = history.hypergradient_norm
    assert norms is not None
    assert np.isnan(norms[0]).all()
    np.testing.assert_allclose(norms[1], np.linalg.norm(closed_form(start, first, second), axis=1), rtol=1e-7)
    np.testing.assert_allclose(history.hypers[0], start)
    # The outer rate is 1, so each step equals the hypergradient at the hypers before it.
    for step in (0, 7):
        gradient = closed_form(np.asarray(history.hypers[step]), first, second)
        np.testing.assert_allclose(history.hypers[step + 1], history.hypers[step] - gradient, atol=1e-7)
    moved = np.linalg.norm(np.diff(history.hypers, axis=0), axis=-1)
    np.testing.assert_allclose(moved, norms[1:], rtol=1e-7, atol=1e-12)
    np.testing.assert_array_equal(history.hypers[-1], found.hypers)
    for step in (0, 1, 60):
        expected = mean_outer_cost(np.asarray(history.hypers[step]), first, second)
        assert np.asarray(history.cost)[step].mean() == pytest.approx(expected, rel=1e-7)
    # 80 rounds send 4 params and the mass; every outer step adds 80 rounds each for the hypergradient and the params.
    rounds = 80 + 160 * np.arange(61)
    np.testing.assert_array_equal(history.rounds, rounds)
    np.testing.assert_array_equal(history.floats, 5 * rounds)
    assert (found.costs.rounds, found.costs.floats, found.best_step) == (rounds[-1], 5 * rounds[-1], 60)
    assert found.costs.hessian_products == found.costs.jacobian_products == 60 * 80
    assert found.costs.accesses == {"train": 60 * 2 * 80 + 61 * 80, "validation": 60}
    assert history.metrics == {}


def test_a_warm_start_and_an_estimator_that_reverses_links():
    made = quadratic(3, 1)
    inner, estimator = (
        hp.SGP(200, hp.schedule("milestones", 0.1, (150,))),
        hp.hypergradients.DirectedRB(200),  # DirectedRB takes SGP's last step size
    )
    found = hp.solve(made, hp.PDBO(inner, estimator, sgd(0.5), 30, restart=False), RANDOM, key=0)
    best = personal_optimum(made)
    assert np.linalg.norm(found.hypers - best) < 0.1 * np.linalg.norm(made.hypers - best)
    assert np.asarray(found.history.hypergradient_norm).shape == (31, 3)


def test_one_hyper_for_all():
    """A common hyper by SGP on the outer level, which is exact for exact averages and a linear optimizer."""
    made = quadratic(3, 1, common=True)
    first, second = data(made)
    best, start, rate = common_optimum(made), np.asarray(made.hypers), 0.2
    assert np.linalg.norm(best - personal_optimum(made)) > 0.5
    method = hp.CDBO(hp.SGP(80, 0.4), hp.HGP(80, 1, 0.4), sgd(rate), 100, tracked=False)
    found = hp.solve(made, method, FULL, key=0)
    np.testing.assert_allclose(found.hypers, np.broadcast_to(best, (3, 3)), atol=1e-7)
    np.testing.assert_allclose(found.hyper, best, atol=1e-7)
    # A common λ moves along dF̄/dλ, which is the sum of the derivatives by each client's own copy.
    after = start.mean(0) - rate * closed_form(start, first, second).sum(0)
    np.testing.assert_allclose(found.history.hypers[1], np.broadcast_to(after, (3, 3)), rtol=1e-7)
    # Besides params and hypergradients, each outer step sends three hypers and the mass once.
    assert found.costs.rounds == 80 + 100 * 161
    assert found.costs.floats == 5 * (80 + 100 * 160) + 4 * 100


def test_one_hyper_for_all_along_a_tree():
    """With exact outer means, all clients reach the optimum with equal values, on directed links with Adam."""
    made = quadratic(3, 1, common=True)
    inner = hp.FedAvg(80, 0.4, averaging="tree")
    adam = hp.optimizer("adam", learning_rate=hp.schedule("milestones", 0.1, (200, 300)))
    method = hp.CDBO(inner, hp.TreeCG(), adam, 400, averaging="tree")
    found = hp.solve(made, method, hp.networks.DirectedRing(3), key=0)
    np.testing.assert_allclose(found.hyper, common_optimum(made), atol=1e-6)
    np.testing.assert_array_equal(found.hypers, np.broadcast_to(found.hypers[0], (3, 3)))
    assert found.status.converged is True


def test_one_hyper_for_all_who_train_alone():
    """Tracking on random links with Adam reaches the optimum; without tracking the run ends 0.2 away."""
    made = quadratic(3, 1, common=True)
    best = alone_optimum(made)
    assert min(np.linalg.norm(best - other) for other in (common_optimum(made), personal_optimum(made))) > 0.3
    inner, estimator = hp.LocalSGD(80, 0.4), hp.hypergradients.LocalGradient(8)
    adam = hp.optimizer("adam", learning_rate=0.1)
    found = hp.solve(made, CDBOLocal(inner, estimator, adam, 400, restart=False, pushes=2), RANDOM, key=0)
    np.testing.assert_allclose(found.hypers, np.broadcast_to(best, (3, 3)), atol=1e-7)
    assert (found.costs.rounds, found.costs.floats) == (800, 800 * (3 + 1 + 3))


def test_one_hyper_for_all_who_train_alone_needs_no_setting():
    made = quadratic(3, 1, common=True)
    found = hp.solve(made, CDBOLocal(steps=3), RANDOM, key=0)
    first, _ = data(made)
    pulls = first["linear"] - np.einsum("nhd,nh->nd", first["coupling"], found.hypers)
    np.testing.assert_allclose(found.params, np.linalg.solve(first["hessian"], pulls[..., None])[..., 0], atol=1e-6)
    assert found.status.converged is True


@pytest.mark.parametrize("tracked", [True, False])
def test_the_outer_level_survives_lost_messages(tracked):
    """Every exchange conserves what is pushed, and nothing restarts its running sums."""
    tree = hp.CDBO(*CHEAP, 2, tracked=tracked).program(quadratic(3, 1).problem)
    check_repairable(tree, True)
    assert contains(tree, is_exchange)
    assert not contains(tree, lambda node: isinstance(node, Exchange) and not node.conserved)
    # All exchanges are in one scope, which is entered once; no other scope has exchanges.
    assert isinstance(tree, Scope)
    assert not contains(tree.body, lambda node: isinstance(node, Scope) and contains(node, is_exchange))


def is_exchange(node):
    return isinstance(node, Exchange)


def test_zero_outer_steps_only_train():
    made = quadratic(3, 1)
    found = hp.solve(made, hp.PDBO(*CHEAP, 0), FULL, key=0)
    np.testing.assert_array_equal(found.hypers, made.hypers)
    assert np.abs(found.params).max() > 0.01
    assert (found.costs.rounds, found.best_step) == (0, 0)
    assert np.asarray(found.history.cost).shape == (1, 3)
    assert np.isnan(np.asarray(found.history.hypergradient_norm)).all()
    np.testing.assert_array_equal(found.history.rounds, [0])


class Counting(hp.hypergradients.LocalGradient):
    """Estimator whose value is the number of its earlier calls, as far as its memory lasts."""

    def memory(self, params, hyper):
        return jnp.zeros(())

    def program(self, problem):
        def estimate(state, ctx):
            before = state.memory
            value = jax.tree.map(lambda leaf: jnp.full_like(leaf, -1 if before is None else before), state.hyper)
            return HypergradientState(
                state.params, state.hyper, value, state.links, None if before is None else before + 1
            )

        return Local(estimate)


@pytest.mark.parametrize("restart", [True, False], ids=["restart", "warm"])
def test_an_estimator_finds_its_memory_again_and_params_only_without_restart(restart):
    made = quadratic(3, 1)
    method, states = hp.PDBO(ALONE, Counting(), sgd(1.0), 4, restart=restart), BilevelState(made.params, made.hypers)
    record = {LOOP: lambda state, ctx: state.hypergradient}
    recipe = program_of(method, made.problem)
    run = hp.Simulate().run(recipe, FULL, states, made.data, jax.random.key(0), record=record)
    np.testing.assert_array_equal(run.history[LOOP][:, 1, 2], [0, 1, 2, 3])
    found = hp.solve(made, method, FULL, key=0)
    hypers = np.asarray(made.hypers) - np.cumsum([0, 0, 1, 2, 3])[:, None, None]
    np.testing.assert_allclose(found.history.hypers, hypers)
    first, x = data(made)[0], np.zeros(made.params.shape)
    for hyper in hypers[-1:] if restart else hypers:
        pull = first["linear"] - np.einsum("nhd,nh->nd", first["coupling"], hyper)
        x = x - 0.1 * (np.einsum("nij,nj->ni", first["hessian"], x) - pull)
    np.testing.assert_allclose(found.params, x)


def test_a_single_estimate_remembers_nothing():
    made = quadratic(3, 1)
    once = hp.hypergradient(made, Counting(), FULL, key=0)
    np.testing.assert_array_equal(once.value, np.full((3, 3), -1))


def test_rows_are_every_so_many_steps():
    """Rounds and floats in the row of a step equal those of a run of that many steps."""
    made = quadratic(3, 1)
    inner, estimator = hp.SGP(5, 0.1), hp.HGP(4, 2, 0.1)
    found = hp.solve(made, hp.PDBO(inner, estimator, sgd(0.1), 6), FULL, key=0, every=3).history
    np.testing.assert_array_equal(found.steps, [0, 3, 6])
    np.testing.assert_array_equal(found.rounds, 5 + (5 + 8) * found.steps)
    for row, steps in enumerate(found.steps):
        shorter = hp.solve(made, hp.PDBO(inner, estimator, sgd(0.1), int(steps)), FULL, key=0)
        assert (found.rounds[row], found.floats[row]) == (shorter.costs.rounds, shorter.costs.floats)
        np.testing.assert_allclose(found.hypers[row], shorter.hypers, rtol=1e-12)
        np.testing.assert_allclose(np.asarray(found.cost)[row], np.asarray(shorter.history.cost)[-1], rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: solve(hp.PDBO(*CHEAP, 1), every=0), ("every", "0", "from 1")),
        (lambda: hp.PDBO(hp.SGP(5, 0.1), LOCAL, CHEAP[2], 1), ("PDBO.hypergradient", "LocalGradient after SGP", "HGP")),
        (
            lambda: hp.PDBO(ALONE, hp.HGP(1, 1, 0.1), CHEAP[2], 1),
            ("PDBO.hypergradient", "HGP after LocalSGD", "LocalGradient"),
        ),
        (lambda: CDBOLocal(hp.SGP(5, 0.1), DIRECT, CHEAP[2], 1), ("CDBOLocal.inner", "SGP", "LocalSGD")),
        (lambda: hp.PDBO(*CHEAP[:2], 0.1, 1), ("PDBO.outer", "0.1", "an object")),  # pyright: ignore
        (lambda: solve(hp.CDBO(*CHEAP, 1)), ("task.common", "common=True", "CDBO", "PDBO")),
        (lambda: solve(hp.PDBO(*CHEAP, 1), common=True), ("task.common", "common=False", "PDBO", "CDBO")),
        (
            lambda: solve(hp.PDBO(*CHEAP, 1), hp.networks.FullyConnected(4)),
            ("network", "4 clients", "a network of 3 clients"),
        ),
    ],
    ids=[
        "every",
        "local after shared",
        "shared after local",
        "shared for CDBOLocal",
        "outer",
        "personal",
        "common",
        "clients",
    ],
)
def test_what_cannot_be_used_is_named(make, words):
    with pytest.raises(hp.InvalidInput) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def solve(method, network=FULL, common=False, **options):
    return hp.solve(quadratic(3, 1, common=common), method, network, key=0, **options)
