"""Wide messages of dense networks over several devices: rows that are sent, in slices or not, of any type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines import keys
from hyperpush.engines.compiled import placement
from hyperpush.engines.shard import Shard
from hyperpush.networks.mixing import matrix
from hyperpush.programs import Average, Exchange

CLIENTS, WIDTH, KEY = 6, 50, jax.random.key(5)
NETWORK = hp.networks.RandomDirected(CLIENTS, probability=(0.4, 0.8))
NOTHING = jnp.zeros((CLIENTS, 1))


@pytest.fixture(params=[2, 4], ids=["even", "padding"])
def devices(request):
    return jax.devices()[: request.param]


@pytest.fixture(params=["rows", "sliced", "sums"])
def path(request, monkeypatch):
    if request.param == "sliced":
        monkeypatch.setattr(placement, "SLICE_NUMBERS", 70)  # 8 or 11 columns at a time
    if request.param == "sums":
        monkeypatch.setattr(placement, "FEW", 1)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def message(dtype):
    numbers = np.random.default_rng(0).integers(0, 9, (CLIENTS, WIDTH))
    return jnp.asarray(numbers, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32], ids=["float", "half", "int"])
def test_an_exchange(devices, path, dtype):
    def receive(state, inbox, ctx):
        return state[0], inbox.total.astype(jnp.float32)

    once = Exchange(lambda s, ctx: s[0], receive)
    sent = message(dtype)
    found = Shard(devices).run(once, NETWORK, (sent, jnp.zeros((CLIENTS, WIDTH))), NOTHING, KEY).states[1]
    mixing = np.array(matrix(NETWORK, keys.network_key(KEY), 0))
    np.fill_diagonal(mixing, 0)
    half = dtype == jnp.bfloat16
    np.testing.assert_allclose(found, mixing @ np.asarray(sent, np.float32), rtol=1e-2 if half else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float", "half"])
def test_an_average_that_is_one_product(devices, path, dtype):
    average = Average(
        lambda s, ctx: (s[0], jnp.ones(())),
        lambda s, mean, mass, ctx: (s[0], mean.astype(jnp.float32)),
        rounds=60,
    )
    sent = message(dtype)
    found = Shard(devices).run(average, NETWORK, (sent, jnp.zeros((CLIENTS, WIDTH))), NOTHING, KEY).states[1]
    mean = np.broadcast_to(np.asarray(sent, np.float32).mean(0), found.shape)
    np.testing.assert_allclose(found, mean, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-4)
