"""Properties of hypergradients for any problem: linearity, symmetry, and independence of the step size."""

import jax
import numpy as np
import pytest
from closed_forms import setting, with_data
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import some
from wide import float64  # noqa: F401

import hyperpush as hp

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS = 5
ESTIMATORS = {
    "HGP": hp.HGP(20, 2, 0.2),
    "TrackedHGP": hp.TrackedHGP(30, 0.1, 2, tolerance=None, acceleration=0),
    "DirectedRB": hp.hypergradients.DirectedRB(20, 0.1, links="means"),
    "VRHGP": hp.hypergradients.VRHGP(20, 0.1, links="means"),
    "exact": hp.HGP(20, 1, 0.2, averaging="exact"),
}
# These choose weights by their iterates, so they are linear only after convergence.
ACCELERATED = hp.TrackedHGP(200, 0.2, 2, tolerance=None)
SOLVERS = {"accelerated": ACCELERATED, "ImplicitCG": hp.hypergradients.ImplicitCG(6)}


def recorded(seed: int) -> np.ndarray:
    """Return links that change over time, each of them undirected."""
    up = np.random.default_rng(seed).random((40, CLIENTS, CLIENTS)) < 0.5
    up[0] = True
    return up


def estimate(estimator, steps, hypers, first, second):
    task, network = with_data(setting(CLIENTS, 3).task, first, second, hypers), hp.networks.Trace(CLIENTS, steps)
    return np.asarray(hp.hypergradient(task, estimator, network, key=0).value)


@pytest.mark.parametrize("estimator", some({**ESTIMATORS, **SOLVERS}, ["HGP", "accelerated"]))
@given(weight=st.floats(-3, 3), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_linear_in_the_outer_gradient(estimator, weight, seed):
    """The outer gradient is affine in the outer targets here, so mixed targets give mixed estimates."""
    task, first, second, *_ = setting(CLIENTS, 3)
    one, two = np.random.default_rng(seed).normal(size=(2, *second["target"].shape))

    def at(target):
        return estimate(estimator, recorded(0), task.hypers, first, {**second, "target": target})

    mixed = at(weight * one + (1 - weight) * two)
    np.testing.assert_allclose(mixed, weight * at(one) + (1 - weight) * at(two), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("estimator", some({**ESTIMATORS, "accelerated": ACCELERATED}, ["HGP", "accelerated"]))
@given(order=st.permutations(range(CLIENTS)), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_permuting_clients_permutes_the_result(estimator, order, seed):
    task, first, second, *_ = setting(CLIENTS, 3)
    order, steps = np.asarray(order), recorded(seed)
    own = estimate(estimator, steps, task.hypers, first, second)
    theirs = jax.tree.map(lambda leaf: leaf[order], (task.hypers, first, second))
    permuted = estimate(estimator, steps[:, order][:, :, order], *theirs)
    np.testing.assert_allclose(permuted, own[order], rtol=1e-7, atol=1e-9)


def test_the_step_size_leaves_no_trace_once_converged():
    """With exact averages, the fixed point is the same for every step size."""
    task, first, second, truth, largest = setting(CLIENTS, 3)
    for share in (0.3, 1.0, 1.7):
        found = estimate(hp.HGP(3000, 1, share / largest, averaging="exact"), recorded(0), task.hypers, first, second)
        np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-10)
