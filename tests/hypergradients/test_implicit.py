"""Implicit differentiation with exact averages compared with closed forms in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import setting, with_data
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.hypergradients import oracles
from hyperpush.tasks.logistic import cross_entropy, logistic

pytestmark = pytest.mark.usefixtures("float64")
NETWORK = hp.networks.RandomDirected(4)
DAMPING = 0.7


def estimate(estimator, made, network: hp.networks.Network = NETWORK, **options):
    return hp.hypergradient(made, estimator, network, key=1, **options)


class Quadratics:
    """Four clients at different params away from the solution, and the systems that estimators solve there."""

    def __init__(self):
        task, self.first, self.second, _, self.largest = setting(4, 5)
        self.params = np.asarray(task.params) + np.random.default_rng(3).normal(size=task.params.shape)
        self.made, second = task.at(params=jnp.asarray(self.params)), self.second
        misfit = np.einsum("nij,nj->ni", second["map"], self.params) - second["target"]
        self.along_x = np.einsum("nij,ni->nj", second["map"], misfit)
        self.along_hyper = np.asarray(task.hypers) - second["hyper_target"]
        self.hessian = self.first["hessian"].mean(0)
        # (1/n)Σ∂_xF_j divided by n again, so that the system uses the mean Hessian instead of the sum
        self.source = self.along_x.sum(0) / 16

    def value(self, q):
        return self.along_hyper / 4 - self.first["coupling"] @ q


@pytest.fixture
def quadratics(float64):  # noqa: F811
    return Quadratics()


def counted(found):
    costs = found.costs
    return costs.rounds, costs.floats, costs.hessian_products, costs.jacobian_products


def solution(state, ctx):
    return state.q


def test_conjugate_gradients_reach_the_closed_form(quadratics):
    found = estimate(hp.hypergradients.ImplicitCG(6, DAMPING), quadratics.made, record={"ImplicitCG": solution})
    hessian, source = quadratics.hessian + DAMPING * np.eye(4), quadratics.source
    truth = np.linalg.solve(hessian, source)
    np.testing.assert_allclose(found.value, quadratics.value(truth), rtol=1e-9, atol=1e-11)
    # Every step takes the products with two vectors and their norms; the norm of B_i takes ten more products.
    assert counted(found) == (7, 4 + 6 * (2 * 4 + 2), 6 * 2, 11)
    # Every iterate is the best of its Krylov space.
    basis = np.stack([source, hessian @ source], axis=1)
    second = basis @ np.linalg.solve(basis.T @ hessian @ basis, basis.T @ source)
    np.testing.assert_allclose(found.history["ImplicitCG"][1], np.broadcast_to(second, (4, 1, 4)), rtol=1e-9)
    assert np.linalg.norm(second - truth) > 1e-3


def test_dense_is_the_closed_form(quadratics):
    found = estimate(hp.hypergradients.Dense(), quadratics.made)
    truth = quadratics.value(np.linalg.solve(quadratics.hessian, quadratics.source))
    assert np.linalg.norm(truth - quadratics.along_hyper / 4) > 0.1
    np.testing.assert_allclose(found.value, truth, rtol=1e-9, atol=1e-11)
    assert (found.costs.rounds, found.costs.floats) == (1, 4 * 4 + 4 + 1)


def test_a_tolerance_ends_early(quadratics):
    tolerance = 1e-2
    found = estimate(hp.hypergradients.ImplicitCG(1000, tolerance=tolerance), quadratics.made)
    assert found.costs.rounds - 1 in (2, 3, 4)  # no vote is needed: all clients see the same numbers
    # The error of q is at most its part of the tolerance, although 4 iterations would be exact.
    truth = np.linalg.solve(quadratics.hessian, quadratics.source)
    error = np.linalg.norm(found.value - quadratics.value(truth), axis=1)
    reach = np.linalg.norm(quadratics.first["coupling"], 2, axis=(1, 2))
    assert np.all(error <= 1.01 * tolerance * reach * np.linalg.norm(truth))


def test_hgp_with_exact_averages_is_its_series(quadratics):
    step = float(1 / quadratics.largest)
    found = estimate(hp.HGP(3, pushes=1, step_size=step, averaging="exact"), quadratics.made)
    map_ = np.eye(4) - step * quadratics.hessian
    q = step * (np.eye(4) + map_ + map_ @ map_) @ quadratics.source
    np.testing.assert_allclose(found.value, quadratics.value(q), rtol=1e-9, atol=1e-11)
    assert (found.costs.rounds, found.costs.floats) == (3, 3 * 4)


def test_the_client_target(quadratics):
    found = estimate(hp.hypergradients.ClientGradient(6, DAMPING), quadratics.made)
    q = np.linalg.solve(4 * (quadratics.hessian + DAMPING * np.eye(4)), quadratics.along_x.T).T
    truth = quadratics.along_hyper - np.einsum("nhd,nd->nh", quadratics.first["coupling"], q)
    np.testing.assert_allclose(found.value, truth, rtol=1e-9, atol=1e-11)
    assert counted(found) == (7, 4 * 4 + 6 * (5 * 4 + 5), 6 * 5, 11)


def test_without_anything_to_solve_the_direct_gradient_remains(quadratics):
    """Zero residuals cause no division by zero."""
    nothing = {name: np.zeros_like(quadratics.second[name]) for name in ("map", "target")}
    made = with_data(quadratics.made, validation={**quadratics.second, **nothing})
    found = estimate(hp.hypergradients.ClientGradient(6, DAMPING), made)
    np.testing.assert_allclose(found.value, quadratics.along_hyper, rtol=1e-12)


def joined(params):
    return jnp.append(params["slope"], params["offset"])


def losses(params, hyper, batch):
    return cross_entropy(joined(params), batch)


def penalty(params, hyper):
    return 0.5 * joined(hyper) @ joined(params) ** 2


def outer_penalty(params, hyper):
    return 0.1 * hyper["offset"] ** 2


def test_pytrees_and_hessians_that_depend_on_the_params():
    made = logistic(3, 0, examples=8, features=2, rate=0.3)
    params = np.random.default_rng(0).normal(size=(3, 3))
    params, hypers = (hp.per_client({"slope": a[:, :2], "offset": a[:, 2]}) for a in (params, np.asarray(made.hypers)))
    task = hp.Task(
        inner=losses,
        penalty=penalty,
        outer=losses,
        outer_penalty=outer_penalty,
        params=params,
        hypers=hypers,
        train=made.train,
        validation=made.validation,
    )
    truth = oracles.dense(task.problem, task.params, task.hypers, task.data)
    assert np.linalg.norm(truth["slope"]) > 1e-2
    for estimator in (hp.hypergradients.ImplicitCG(5), hp.hypergradients.Dense()):
        found = estimate(estimator, task, hp.networks.FullyConnected(3)).value
        for name in ("slope", "offset"):
            np.testing.assert_allclose(found[name], truth[name], rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("kind", ["ImplicitCG", "ClientGradient", "LocalGradient"])
def test_a_system_needs_a_step(kind):
    with pytest.raises(hp.InvalidInput, match=rf"{kind}\.steps: got 0; allowed: a whole number from 1"):
        getattr(hp.hypergradients, kind)(0)
