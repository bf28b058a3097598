"""Properties of every registered hypergradient estimator. A new one is tested as soon as it is registered."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_suite import CLIENTS, ENGINE, CommonSuite, compiled  # noqa: F401
from repeats import some
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.methods.registry import registered

EXAMPLES, SIZE = 6, 3
EXAMPLE = {name: each.example() for name, each in registered("hypergradients").items()}
# Few steps, with mini-batches if possible: all engines must draw the same examples.
QUICK = {"steps": 5, "pushes": 2, "batch_size": 2}
METHODS = {
    name: method.with_options(**{option: QUICK[option] for option in QUICK.keys() & method.options().keys()})
    for name, method in EXAMPLE.items()
    if name != "Automatic"
}
FEW = ("HGP", "TrackedHGP", "ITDBackward", "VRHGP")
METHODS["Automatic"] = EXAMPLE["Automatic"]  # with mini-batches it runs TrackedHGP, which takes hundreds of steps


def losses(x, log_rate, batch):
    inputs, targets = batch
    return 0.5 * (inputs @ x - targets) ** 2


def penalty(x, log_rate):
    return 0.5 * jnp.exp(log_rate) * jnp.sum(x**2)


def outer_penalty(x, log_rate):
    return 0.5 * log_rate**2


@cache
def numbers():
    generator = np.random.default_rng(0)
    data = [
        (generator.normal(size=(CLIENTS, EXAMPLES, SIZE)), generator.normal(size=(CLIENTS, EXAMPLES))) for _ in range(2)
    ]
    return *data, np.linspace(-1, 1, CLIENTS)


@cache
def task(wide=False):
    """Return ridge regressions with a rate for each client; the clients start at different params."""
    train, validation, log_rates = numbers()
    params = np.random.default_rng(1).normal(size=(CLIENTS, SIZE))
    train, validation, log_rates, params = jax.tree.map(jnp.asarray, (train, validation, log_rates, params))
    return hp.Task(
        inner=losses,
        penalty=penalty,
        outer=losses,
        outer_penalty=outer_penalty,
        params=hp.per_client(params),
        hypers=hp.per_client(log_rates),
        train=train,
        validation=validation,
    )


def closed_form():
    """By NumPy, return x*, λ_max of the mean Hessian, and (1/n)λ_i − e^{λ_i} x*ᵀ(Σ H_k)⁻¹ (1/n)Σ_j ∂_xF_j."""
    (inputs, targets), (others, wanted), log_rates = numbers()
    hessian = np.einsum("nmi,nmj->ij", inputs, inputs) / EXAMPLES + np.exp(log_rates).sum() * np.eye(SIZE)
    x = np.linalg.solve(hessian, np.einsum("nmi,nm->i", inputs, targets) / EXAMPLES)
    source = np.einsum("nmi,nm->i", others, others @ x - wanted) / EXAMPLES / CLIENTS
    value = log_rates / CLIENTS - np.exp(log_rates) * (x @ np.linalg.solve(hessian, source))
    return x, np.linalg.eigvalsh(hessian)[-1] / CLIENTS, value


class TestEstimators(CommonSuite):
    METHODS = METHODS
    FEW = FEW

    @staticmethod
    def run(method, engine=ENGINE, network=None):
        kind = hp.networks.RandomUndirected if method.info.network == "undirected" else hp.networks.RandomDirected
        network = network or kind(CLIENTS)
        start = task()
        if hasattr(method, "links"):  # the estimator needs links observed in training
            # the step size of the differentiated iteration
            rate = 0.1 if method.step_size is None else method.step_size
            start = hp.train(start, hp.SGP(20, rate), network, key=1, engine=engine).task
        return hp.hypergradient(start, method, network, key=3, engine=engine)

    @staticmethod
    def values(result):
        return result.value

    def test_mini_batches_are_drawn(self, method):
        if getattr(method, "batch_size", None) is not None:
            everything = self.reference(method.with_options(batch_size=None))
            assert np.abs(self.reference(method).value - everything.value).max() > 1e-4


# Estimators along trees have separate tests (test_tree_cg, test_automatic).
@pytest.mark.parametrize("method", some(EXAMPLE, EXAMPLE.keys() - {"Automatic", "TreeCG"}))
@pytest.mark.usefixtures("float64")
def test_generous_settings_give_the_closed_form(method):
    """On a complete network, averages are exact at once, and SGP's fixed point is the inner solution."""
    if method.info.target != "global":
        pytest.skip(f"its target is {method.info.target}")
    x, largest, truth = closed_form()
    step_size = float(0.5 / largest)
    generous = {"steps": 600, "step_size": step_size, "solver": hp.SGP(600, step_size), "alpha": 1.0, "beta": 0.0}
    method = method.with_options(**{name: given for name, given in generous.items() if hasattr(method, name)})
    # Use a new task, because the cached one is in float32.
    start = task.__wrapped__() if method.trains else task.__wrapped__().at(params=np.broadcast_to(x, (CLIENTS, SIZE)))
    found = hp.hypergradient(start, method, hp.networks.FullyConnected(CLIENTS), key=0)
    np.testing.assert_allclose(found.value, truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", some(EXAMPLE, EXAMPLE.keys() - {"Automatic", "ClientGradient", "ImplicitCG"}))
def test_on_a_private_task_every_access_is_a_release_or_it_is_refused(method):
    noise = {"noise": hp.privacy.Gaussian(1.0), "clip": 1.0, "curvature": 1.0, "coupling": 1.0}
    hidden = task().private(**noise)
    if method.info.matrices or method.exact:  # these use Hessians, for which there is no release
        with pytest.raises(hp.InvalidInput, match=r"tolerates no noise" if method.exact else r"\.py:\d+.*derivative"):
            hp.budget(hidden, method)
        return
    releases, accesses = hp.budget(hidden, method).releases, TestEstimators.reference(method).costs.accesses
    # These outer losses do not depend on the hypers: ∂_λF comes from the penalty alone and needs no noise.
    assert releases.get("validation", 0) == (method.info.target != "direct")
    assert accesses["validation"] > 0
    if hasattr(method, "singular"):  # under noise a system cannot be examined, so fewer examples are used
        accesses = hp.hypergradient(hidden, method, hp.networks.RandomDirected(CLIENTS), key=3).costs.accesses
    if not method.info.private:  # the private program is the same, with noise
        assert releases.get("train", 0) == accesses.get("train", 0)


def flat(x, hyper, rows):
    """Return losses whose derivatives are all zero, so that only noise is left."""
    return 0.0 * jnp.sum(rows * x, axis=-1) * hyper


@pytest.mark.parametrize("method", some(EXAMPLE, FEW))
def test_noise_of_zero_gradients_has_the_variance_of_a_release(method):
    """One release of ∂_λF is part of the estimate; Jacobian products are clipped to almost nothing."""
    if not method.info.private:
        pytest.skip("it has no private form of its own")
    clients, scale = 500, 2.0
    rows, noise = jnp.zeros((clients, 10, 2)), hp.privacy.Gaussian(scale)
    quiet = hp.Task(inner=flat, outer=flat, params=jnp.zeros(2), hypers=0.0, train=rows, validation=rows)
    quiet = quiet.private(noise=noise, clip=5.0, curvature=0.1, coupling=1e-9)  # the sensitivity is 2·5/10 = 1
    found = hp.hypergradient(quiet, method, hp.networks.FullyConnected(clients), key=0)
    assert np.var(clients * np.asarray(found.value)) == pytest.approx(scale**2, rel=0.2)
