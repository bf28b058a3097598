"""Exchanges between blocks of clients equal a matrix product, and send no more rows than links need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines import keys
from hyperpush.engines.compiled.routes import routes
from hyperpush.engines.shard import Shard
from hyperpush.programs import Exchange, Repeat

KEY = jax.random.key(2)
ROUNDS = 3


PUSH = Repeat(Exchange(lambda s, ctx: s[0], lambda s, inbox, ctx: (inbox.mix(s[0]), s[1])), ROUNDS)
LARGEST = Exchange(
    lambda s, ctx: s[1], lambda s, inbox, ctx: (s[0], jnp.maximum(s[1], inbox.total)), weights="ones", reduce="max"
)


@pytest.mark.parametrize(
    ("network", "rows"),
    [
        (hp.networks.Ring(30), 2),  # dense links; 30 clients on four devices need padding
        (hp.networks.DirectedRing(40), 1),
        (hp.networks.OnePeerExponential(64), None),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_neighbours_hear_what_they_should(network, rows):
    n, block = network.clients, -(-network.clients // 4)
    found = routes(network, 4, block)
    assert found is not None
    possible = network.possible().toarray()
    blocks = np.arange(n) // block
    # Each device receives at most one row for each client elsewhere that is linked to one of its own clients.
    most = max(np.count_nonzero(possible[blocks == b].any(0) & (blocks != b)) for b in range(4))
    assert most <= sum(found.sizes) < 3 * block
    if rows is not None:
        assert sum(found.sizes) == rows
    x = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    outcome = Shard().run(PUSH, network, (x, x), jnp.zeros((n, 1)), KEY)
    matrices = [hp.networks.matrix(network, keys.network_key(KEY), t) for t in range(ROUNDS)]
    expected = x.astype(np.float64)
    for matrix in matrices:
        expected = np.asarray(matrix, np.float64) @ expected
    np.testing.assert_allclose(outcome.states[0], expected, rtol=1e-5, atol=1e-6)
    if network.name == "ring":
        heard = Shard().run(LARGEST, network, (x, x), jnp.zeros((n, 1)), KEY).states[1]
        np.testing.assert_array_equal(heard, np.max([np.roll(x, shift, 0) for shift in (-1, 0, 1)], axis=0))


def test_links_that_lead_everywhere_are_summed_and_scattered():
    for network in (hp.networks.RandomDirected(8), hp.networks.FullyConnected(8), hp.networks.KOut(40, 3)):
        assert routes(network, 4, network.clients // 4) is None
    assert routes(hp.networks.Ring(30), 1, 30) is None
