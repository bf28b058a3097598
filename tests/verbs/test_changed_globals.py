"""A global or a closure that a loss, a metric or a schedule reads may change between two calls of one process."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled import compile

SCALE, RATE = {"train": 1.0, "metric": 1.0}, [0.25]
NETWORK = hp.networks.FullyConnected(3)


@pytest.fixture(autouse=True)
def fresh():
    SCALE.update(train=1.0, metric=1.0)
    RATE[0] = 0.25


def loss(x, hyper, a):
    return (x - SCALE["train"] * a) ** 2


def metric(x, hyper, a):
    return SCALE["metric"] * x


def rate(step):
    return RATE[0]


def run():
    ones = jnp.ones((3, 4))
    task = hp.Task(inner=loss, outer=loss, params=0.0, hypers=0.0, train=ones, validation=ones)
    return hp.train(task, hp.SGP(40, rate), NETWORK, key=0, metrics={"twice": metric}, every=40)


def test_a_loss_is_read_anew():
    np.testing.assert_allclose(run().params, 1.0, rtol=1e-5)
    SCALE["train"] = 3.0
    np.testing.assert_allclose(run().params, 3.0, rtol=1e-5)


def measured():
    history = run().history
    assert history is not None
    return history.metrics["twice"][-1]


def test_a_metric_is_read_anew():
    np.testing.assert_allclose(measured(), 1.0, rtol=1e-5)
    SCALE["metric"] = 2.0
    np.testing.assert_allclose(measured(), 2.0, rtol=1e-5)


def test_a_schedule_is_read_anew():
    np.testing.assert_allclose(run().params, 1.0, rtol=1e-5)
    RATE[0] = 0.0  # (1 − 2η)^40 of the distance is left, which is all of it
    np.testing.assert_allclose(run().params, 0.0, atol=1e-6)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_closure_over_an_array_is_read_anew(size):
    def train_with(shift):
        ones = jnp.ones((3, 4))
        moved = {"by": shift}
        task = hp.Task(
            inner=lambda x, h, a: (x - a - moved["by"][0]) ** 2,
            outer=loss,
            params=0.0,
            hypers=0.0,
            train=ones,
            validation=ones,
        )
        first = hp.train(task, hp.SGP(40, 0.25), NETWORK, key=0).params
        moved["by"] = shift + 1
        return first, hp.train(task, hp.SGP(40, 0.25), NETWORK, key=0).params

    first, second = train_with(np.zeros(size, np.float32))
    np.testing.assert_allclose(first, 1.0, rtol=1e-5)
    np.testing.assert_allclose(second, 2.0, rtol=1e-5)


def test_nothing_compiles_where_nothing_changed():
    run()
    with compile.counting() as counts:
        run()
    assert counts.compilations == 0


class Shifted(eqx.Module):
    """A cost that has a number."""

    by: float

    def __call__(self, x, hyper, a):
        return SCALE["train"] * (x - a - self.by) ** 2


def test_a_number_of_a_cost_compiles_nothing_and_what_its_code_reads_does():
    def run(by):
        ones = jnp.ones((3, 4))
        task = hp.Task(inner=Shifted(by), outer=loss, params=0.0, hypers=0.0, train=ones, validation=ones)
        return hp.train(task, hp.SGP(40, 0.25), NETWORK, key=0, metrics={"off": Shifted(by)}, every=40)

    run(0.0)
    with compile.counting() as counts:
        np.testing.assert_allclose(run(2.0).params, 3.0, rtol=1e-5)
    assert counts.compilations == 0
    SCALE["train"] = 0.0
    np.testing.assert_array_equal(run(2.0).params, 0.0)
