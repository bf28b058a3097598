"""A metric that chooses the outer step and is released with noise: its sensitivity, its noise and its cost."""

import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.algorithms.base import BilevelState
from hyperpush.algorithms.stopping import StoppingState
from hyperpush.engines.simulate import evaluate
from hyperpush.privacy import Gaussian, Laplace
from hyperpush.verbs.budget import budget

CLIENTS, EXAMPLES, STEPS, ORDER, INNER, SCALE = 400, 8, 3, 5, 4, 2.0
BOUNDS = (2.0, 6.0)
SGD = hp.optimizer("sgd", learning_rate=0.1)


class Watched(BilevelState):
    watch: Any = None


def cost(x, hyper, rows):
    return 0.5 * jnp.sum((x - hyper - rows) ** 2, axis=-1)


def first_column(x, hyper, rows):
    return rows[:, 0]


def task(noise, clients=3, holdout=None, **options):
    rows = jnp.ones((clients, EXAMPLES, 2))
    given: Any = {"train": rows, "validation": rows, "holdout": rows if holdout is None else holdout}
    made = hp.Task(inner=cost, outer=cost, params=jnp.zeros(2), hypers=jnp.zeros(2), **given)
    return made.private(noise=noise, clip=1.0, curvature=1.0, coupling=1.0, **options)


def released(noise, values, key=0):
    """Return the noisy contribution to the mean of `values` that every client sends."""
    holdout = jnp.stack([values, values], -1)
    made = task(noise, len(values), holdout)
    stop = hp.EarlyStopping(first_column, on="holdout", patience=1, bounds=BOUNDS)
    state = Watched(made.params, made.hypers, watch=jax.vmap(StoppingState.start)(made.params, made.hypers))
    program = made.problem.protect(stop.program(made.problem))
    network = hp.networks.FullyConnected(len(values))
    return np.asarray(evaluate(program, network, state, made.data, jax.random.key(key))[0].watch.own)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("noise", "deviation"), [(Gaussian(SCALE), SCALE), (Laplace(SCALE), math.sqrt(2) * SCALE)])
@pytest.mark.long
def test_noise_is_in_units_of_what_one_example_can_change(noise, deviation):
    values = jnp.tile(jnp.array([3.0, 5.0, 5.0, 5.0, 4.0, 4.0, 100.0, -100.0]), (CLIENTS, 1))
    found = released(noise, values)
    unit = (BOUNDS[1] - BOUNDS[0]) / EXAMPLES
    error = deviation * unit / math.sqrt(CLIENTS)
    assert found.mean() == pytest.approx((3 + 5 + 5 + 5 + 4 + 4 + 6 + 2) / EXAMPLES, abs=4 * error)
    # The relative standard deviation of an estimated deviation is at most √(κ − 1)/2; the kurtosis κ is 3 or 6.
    assert found.std() == pytest.approx(deviation * unit, rel=4 * math.sqrt(5) / 2 / math.sqrt(CLIENTS))
    # Changing one example moves the released value by at most the unit, and by exactly the unit between the bounds.
    pairs = [(-1e9, 1e9), (2.0, 6.0), (3.0, 4.5), (jnp.nan, 1e9)]
    changes = [
        released(noise, values.at[:, 0].set(one)) - released(noise, values.at[:, 0].set(other)) for one, other in pairs
    ]
    expected = [-unit, -unit, -1.5 / EXAMPLES, -unit / 2]  # NaN counts as the middle of the bounds
    for change, by in zip(changes, expected, strict=True):
        np.testing.assert_allclose(change, by, rtol=1e-9)


ESTIMATORS = {  # transmitted products with H_i; one product with B_i follows at the end
    "HGP": (hp.HGP(ORDER, 2, 0.1), ORDER),
    "TrackedHGP": (hp.TrackedHGP(ORDER, 0.1, tolerance=None), ORDER),
    "DirectedRB": (hp.hypergradients.DirectedRB(ORDER, 0.1), ORDER),
    "VRHGP": (hp.hypergradients.VRHGP(ORDER, 0.1), 2 * ORDER - 1),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_run_that_chooses_its_step_costs_all_its_releases(name):
    estimator, products = ESTIMATORS[name]
    stop = hp.EarlyStopping(first_column, on="holdout", patience=1, bounds=BOUNDS)
    method = hp.PDBO(hp.SGP(INNER, 0.1), estimator, SGD, STEPS, stop=stop)
    wanted = {"train": (STEPS + 1) * INNER + STEPS * products, "validation": STEPS, "holdout": STEPS + 1}
    found = budget(task(Gaussian(9.0)), method)
    assert found.releases == wanted
    direct = dp_accounting.pld.PLDAccountant()
    direct.compose(dp_accounting.GaussianDpEvent(9.0), sum(wanted.values()))
    assert found.epsilon(1e-5) == pytest.approx(direct.get_epsilon(1e-5), rel=2e-3)
    pure = budget(task(Laplace(9.0)), method)
    assert pure.epsilon() == pytest.approx(sum(wanted.values()) / 9)
    assert pure.epsilon(on="holdout") == pytest.approx((STEPS + 1) / 9)


def test_the_step_is_chosen_by_what_was_released():
    made, network = task(Gaussian(9.0)), hp.networks.RandomDirected(3)
    stop = hp.EarlyStopping(first_column, on="holdout", patience=9, mode="max", bounds=BOUNDS)
    method = hp.PDBO(hp.SGP(INNER, 0.1), hp.hypergradients.VRHGP(ORDER, 0.1), SGD, STEPS, stop=stop)
    found = hp.solve(made, method, network, key=0)
    watched: Any = found.history.watched
    assert np.unique(watched[:, 0]).size == STEPS + 1  # the metric itself is constant, so only noise decides
    assert found.best_step == np.argmax(watched[:, 0])
    np.testing.assert_array_equal(found.hypers, np.asarray(found.history.hypers)[found.best_step])
    assert found.privacy.releases == found.costs.accesses == budget(made, method, network).releases


def own_weights(metric):
    """Return a task with example weights that stay with their owner without noise, and a metric."""
    rows = jnp.ones((3, EXAMPLES))
    made = hp.Task(
        inner=lambda x, weight, a: jax.nn.sigmoid(weight) * (x - a) ** 2,
        outer=lambda x, weight, a: (x - a) ** 2,
        params=0.0,
        hypers=hp.per_example(rows),
        train=rows,
        validation=rows,
        holdout=rows,
    )
    stop = hp.EarlyStopping(metric, on="holdout", patience=1, bounds=(0, 1))
    method = hp.PDBO(hp.SGP(INNER, 0.1), hp.HGP(ORDER, 2, 0.1), hp.optimizer("adam", learning_rate=0.1), 2, stop=stop)
    return budget(made.private(noise=Laplace(1.0), clip=1.0, curvature=1.0, hypers="per example"), method)


def test_a_metric_of_clean_hypers_is_refused():
    assert own_weights(lambda x, weight, a: (x - a) ** 2).releases["holdout"] == 3
    with pytest.raises(hp.InvalidInput, match=r"stop\.metric.*hypers of single examples.*hypers='shared'"):
        own_weights(lambda x, weight, a: (x - a) ** 2 + jnp.mean(weight))


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2, 1), (0.0, math.inf), (0,), "01"])
def test_bounds_are_two_numbers_of_which_the_first_is_less(bounds):
    with pytest.raises(hp.InvalidInput, match=r"EarlyStopping\.bounds"):
        hp.EarlyStopping("cost", on="holdout", patience=1, bounds=bounds)


def test_bounds_clip_a_metric_without_privacy_too():
    rows = jnp.array([[[1.0], [3.0], [9.0]]] * 2)
    zeros: Any = {"params": jnp.zeros(1), "hypers": jnp.zeros(1)}
    made = hp.Task(inner=cost, outer=cost, **zeros, train=rows, validation=rows, holdout=rows)
    stop = hp.EarlyStopping(first_column, on="holdout", patience=1, bounds=BOUNDS)
    found = hp.solve(made, hp.PDBO(hp.SGP(1, 0.1), ESTIMATORS["HGP"][0], SGD, 0, stop=stop), hp.networks.Ring(2), key=0)
    watched: Any = found.history.watched
    np.testing.assert_allclose(watched, (2 + 3 + 6) / 3, rtol=1e-6)
