"""`hp.average` returns exact weighted means, the same for every client and engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp

NETWORK = hp.networks.RandomDirected(5)
VALUES = {"a": np.arange(15.0).reshape(5, 3) - 4, "b": np.array([1.0, 4, 9, 16, 25])}
WEIGHTS = np.array([1.0, 0, 2, 3, 0.5])


@pytest.mark.parametrize("engine", [hp.Simulate(), hp.Threads(), hp.Shard()])
def test_weighted_mean_is_exact_and_equal_on_every_engine(engine):
    found = hp.average(VALUES, NETWORK, key=3, weights=WEIGHTS, engine=engine)
    np.testing.assert_allclose(found.value["a"], np.average(VALUES["a"], axis=0, weights=WEIGHTS), rtol=1e-6)
    np.testing.assert_allclose(found.value["b"], np.average(VALUES["b"], weights=WEIGHTS), rtol=1e-6)
    assert found.status.converged
    assert found.costs.rounds > 0
    assert found.costs.bytes > 0


def test_mean_in_float64():
    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=(5, 2))
        found = hp.average(values, NETWORK, key=0)
    np.testing.assert_allclose(found.value, values.mean(0), rtol=1e-14)


def test_values_that_cancel_are_said_to_be_inaccurate():
    values = jnp.array([1e6, -1e6, 1e-3, 0.0, 0.0])
    found = hp.average(values, NETWORK, key=0)
    assert found.status.converged is False
    assert found.status.reason == "inaccurate"
    assert hp.average(values, NETWORK, key=0, tolerance=1e6).status.converged


def test_all_values_zero_are_exact():
    assert hp.average(jnp.zeros((5, 2)), NETWORK, key=0).status.error == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"values": np.ones((4, 2))}, "values: got 'float64 of shape (4, 2)'"),
        ({"values": {}}, "at least one number"),
        ({"values": np.array(["a"] * 5)}, "values"),
        ({"values": np.array([1, 2, np.nan, 3, 4])}, "NaN or infinity"),
        ({"weights": [1, 2]}, "weights"),
        ({"weights": [0, 0, 0, 0, 0]}, "at least one weight above 0"),
        ({"weights": [1, -1, 0, 0, 0]}, "weights[1]"),
        ({"tolerance": 0}, "tolerance"),
        ({"network": 5}, "network"),
        ({"engine": "threads"}, "engine"),
        ({"engine": hp.Threads(faults=hp.Faults(loss=0.1))}, "peers that lose messages"),
        ({"key": -1}, "key"),
    ],
)
def test_refuses(change, says):
    given = {"values": jnp.ones((5, 2)), "network": NETWORK, "key": 0} | change
    with pytest.raises(hp.InvalidInput) as error:
        hp.average(given.pop("values"), given.pop("network"), **given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
