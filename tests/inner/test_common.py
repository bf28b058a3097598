"""Properties of every registered inner solver, including those of personalization and BiG-Fed."""

import jax.numpy as jnp
import numpy as np
import pytest
from common_suite import CLIENTS, ENGINE, NETWORK, CommonSuite, compiled  # noqa: F401

import hyperpush as hp
from hyperpush.inner.base import InnerSolver
from hyperpush.methods.registry import registered

CLASSES = {name: each for kind in ("inner", "baselines", "big_fed") for name, each in registered(kind).items()}
METHODS = {
    name: each.example()
    for name, each in CLASSES.items()
    # FedEM's model is a Python object, which examples in the registry cannot contain
    if issubclass(each, InnerSolver) and name != "FedEM"
}
SIGMA, SIZE, STEP = 0.5, 400, 0.1
TASK = hp.tasks.quadratic(CLIENTS, seed=0)


class TestInnerSolvers(CommonSuite):
    METHODS = METHODS
    FEW = ("SGP", "DSGD", "FedAvg", "ClusteredFL")

    @staticmethod
    def run(method, engine=ENGINE, network=NETWORK):
        return hp.train(TASK, method, network, key=0, engine=engine)

    @staticmethod
    def values(result):
        return result.params


def flat(x, hyper, rows):
    """Return losses whose derivatives are all zero, so that only noise is left."""
    return 0.0 * jnp.sum(x) ** 3 * rows


@pytest.mark.parametrize("name", METHODS)
def test_without_gradients_a_private_run_is_noise_of_the_promised_size(name):
    """Each release moves a client by noise of size step·σ. The clients' mean has variance releases·(step·σ)²/n."""
    method, rows = METHODS[name], jnp.ones((CLIENTS, 10))
    task = hp.Task(inner=flat, outer=flat, params=jnp.zeros(SIZE), hypers=0.0, train=rows, validation=rows)
    # One of ten examples changes a mean by at most 2·clip/10 = 1, which is the unit of the noise.
    private = task.private(noise=hp.privacy.Gaussian(SIGMA), clip=5.0)
    if method.solves:  # it evaluates costs, and there is no release for costs
        with pytest.raises(hp.InvalidInput, match="on a private task"):
            hp.budget(private, method)
        return
    if name == "ClusteredFL":  # its clients send the changes of their training, and there is no release for them
        with pytest.raises(hp.InvalidInput, match=r"clustered\.py:\d+ .*private data in its result, without noise"):
            hp.budget(private, method)
        return
    if name not in registered("inner"):  # these take other steps than plain gradient steps
        assert hp.budget(private, method).releases["train"] > 0
        return
    found = hp.train(private, method, hp.networks.FullyConnected(CLIENTS), key=0)
    expected = found.costs.accesses["train"] * (STEP * SIGMA) ** 2 / CLIENTS
    assert np.var(np.mean(found.params, axis=0)) == pytest.approx(expected, rel=4.5 * np.sqrt(2 / SIZE))
    assert found.privacy.releases == found.costs.accesses
