"""Wide messages of dense networks over several devices: the rows that are sent, in slices or whole, of every type."""

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


TYPES = {"float": jnp.float32, "half": jnp.bfloat16, "int": jnp.int32}
NUMBERS = np.random.default_rng(0).integers(0, 9, (len(TYPES), CLIENTS, WIDTH))
SENT = {name: jnp.asarray(numbers, dtype) for (name, dtype), numbers in zip(TYPES.items(), NUMBERS, strict=True)}
FOUND = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), SENT)


@pytest.fixture(params=[2, 4], ids=["even", "padding"], scope="module")
def devices(request):
    return jax.devices()[: request.param]


@pytest.fixture(params=["rows", "sliced", "sums"], scope="module")
def path(request):
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "sliced":
            patched.setattr(placement, "SLICE_NUMBERS", 70)  # 8 or 11 columns at a time
        if request.param == "sums":
            patched.setattr(placement, "FEW", 1)
        jax.clear_caches()
        yield
    jax.clear_caches()


def as_float(message):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), message)


def run(program, devices, names):
    start = tuple({name: part[name] for name in names} for part in (SENT, FOUND))
    return Shard(devices).run(program, NETWORK, start, NOTHING, KEY).states[1]


@pytest.mark.long
def test_an_exchange(devices, path):
    once = Exchange(lambda s, ctx: s[0], lambda s, inbox, ctx: (s[0], as_float(inbox.total)))
    mixing = np.array(matrix(NETWORK, keys.network_key(KEY), 0))
    np.fill_diagonal(mixing, 0)
    for name, found in run(once, devices, TYPES).items():
        rtol = 1e-2 if name == "half" else 1e-5
        np.testing.assert_allclose(found, mixing @ np.asarray(SENT[name], np.float32), rtol=rtol, atol=1e-6)


def test_an_average_that_is_one_product(devices, path):
    average = Average(lambda s, ctx: (s[0], jnp.ones(())), lambda s, mean, mass, ctx: (s[0], as_float(mean)), rounds=60)
    for name, found in run(average, devices, ("float", "half")).items():
        mean = np.broadcast_to(np.asarray(SENT[name], np.float32).mean(0), found.shape)
        np.testing.assert_allclose(found, mean, rtol=2e-2 if name == "half" else 1e-4)
