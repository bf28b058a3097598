"""What holds for the links of every network, at every step, in every block of senders."""

import functools

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpush import networks
from hyperpush.errors import InvalidInput
from hyperpush.networks.hashing import words
from hyperpush.networks.links import densify


def recorded(clients: int, seed: int, both_ways: bool) -> np.ndarray:
    steps = np.random.default_rng(seed).random((3, clients, clients)) < 0.4
    steps[0] |= np.roll(np.eye(clients, dtype=bool), 1, axis=1)
    return steps | steps.transpose(0, 2, 1) if both_ways else steps


NETWORKS = {
    "fully-connected": lambda: networks.FullyConnected(6),
    "fully-connected, one client": lambda: networks.FullyConnected(1),
    "static-undirected": lambda: networks.StaticUndirected(12),
    "static-undirected, fastest": lambda: networks.StaticUndirected(9, 0.5, seed=1, mixing="fastest-mixing"),
    "static-undirected, sparse": lambda: networks.StaticUndirected(60, 0.1, seed=2),
    "random-undirected": lambda: networks.RandomUndirected(20),
    "random-undirected, one probability": lambda: networks.RandomUndirected(7, 0.3),
    "random-directed": lambda: networks.RandomDirected(20, (0.1, 0.9), seed=3),
    "random-directed, one probability": lambda: networks.RandomDirected(5, 0.5),
    "ring": lambda: networks.Ring(2),
    "ring, sparse": lambda: networks.Ring(30),
    "directed-ring": lambda: networks.DirectedRing(4),
    "torus": lambda: networks.Torus(9),
    "torus, sparse": lambda: networks.Torus(40),
    "star": lambda: networks.Star(8),
    "exponential": lambda: networks.Exponential(10),
    "one-peer-exponential": lambda: networks.OnePeerExponential(9),
    "k-out": lambda: networks.KOut(20, 2),
    "k-out, dense": lambda: networks.KOut(8, 5),
    "k-out, fixed": lambda: networks.KOut(50, 5, varying=False),
    "graph": lambda: networks.FromGraph(nx.barbell_graph(5, 1)),
    "graph, directed": lambda: networks.FromGraph(nx.cycle_graph(5, create_using=nx.DiGraph)),
    "trace": lambda: networks.Trace(6, recorded(6, 0, both_ways=False)),
    "trace, both ways": lambda: networks.Trace(6, recorded(6, 1, both_ways=True)),
}


@functools.cache
def compiled(name: str):
    """A network and its links with all weights, of everyone and of a block; compiled once for all tests."""
    network = NETWORKS[name]()
    kinds = ["push", "ones"] if network.directed else ["push", "gossip", "ones"]

    @jax.jit
    def links(key, step, block):
        everyone = jnp.arange(network.clients)
        return {
            weights: (network.links(key, step, everyone, weights), network.links(key, step, block, weights))
            for weights in kinds
        }

    # NumPy arrays, because jax.numpy would compile the indexing in the tests for every new shape.
    return network, lambda *at: jax.device_get(links(*at))


def sent(links: networks.Links, n: int) -> tuple[np.ndarray, np.ndarray]:
    """How many live slots lead from j to i, and with which weight in all, at [i, j]."""
    senders, slots = np.nonzero(links.alive)
    targets = np.arange(n)[slots] if links.targets is None else np.asarray(links.targets)[senders, slots]
    count, weight = np.zeros((n, n), int), np.zeros((n, n))
    np.add.at(count, (targets, senders), 1)
    np.add.at(weight, (targets, senders), np.asarray(links.weights)[senders, slots])
    return count, weight


def fields(links: networks.Links) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in vars(links).items() if value is not None}


everywhere = pytest.mark.parametrize("name", NETWORKS)
some_steps = given(draw=st.integers(0, 2**31 - 1), step=st.integers(0, 2**31 - 1))
often = settings(max_examples=10, deadline=None, derandomize=True)


@everywhere
@often
@some_steps
def test_links_are_sound(name, draw, step):
    network, links_at = compiled(name)
    n = network.clients
    itself = np.eye(n, dtype=bool)
    possible = network.possible().toarray()
    for weights, (links, _) in links_at(jax.random.key(draw), step, jnp.arange(4)).items():
        up, weight = sent(links, n)
        matrix = weight + np.diag(np.asarray(links.own, np.float64))
        assert up.max(initial=0) <= 1, "a receiver has one slot only"
        assert not up.diagonal().any()
        assert possible.T[up > 0].all()
        assert not np.asarray(links.weights)[~np.asarray(links.alive)].any()
        assert links.weights.dtype == links.own.dtype == np.float32
        if not network.directed:
            np.testing.assert_array_equal(up, up.T)

        if weights == "ones":
            np.testing.assert_array_equal(matrix, up + itself)
        elif weights == "push":
            # Shares are rounded down, the sender keeps the rest: nothing is made or lost.
            np.testing.assert_allclose(matrix, (up + itself) / (1 + up.sum(axis=0)), rtol=1e-6, atol=n * 2.0**-24)
            np.testing.assert_array_equal(matrix.sum(axis=0), 1)
        else:
            assert (matrix >= 0).all()
            assert not matrix[(up == 0) & ~itself].any()
            np.testing.assert_array_equal(matrix, matrix.T)
            np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-6)


@everywhere
@often
@some_steps
def test_a_block_has_the_numbers_of_the_whole(name, draw, step):
    network, links_at = compiled(name)
    n = network.clients
    inside = [draw % n, 0]
    for whole, part in links_at(jax.random.key(draw), step, jnp.array([*inside, n, n + 5])).values():
        for field, numbers in fields(whole).items():
            np.testing.assert_array_equal(fields(part)[field][:2], numbers[inside])
        assert not part.alive[2:].any()
        assert not part.weights[2:].any()
        np.testing.assert_array_equal(part.own[2:], 1)


@everywhere
def test_varying_says_whether_steps_differ(name):
    network, links_at = compiled(name)
    steps = [sent(links_at(jax.random.key(0), step, jnp.arange(4))["ones"][0], network.clients)[0] for step in range(8)]
    assert network.varying == any((step != steps[0]).any() for step in steps[1:])


@pytest.mark.parametrize("name", ["random-undirected", "random-directed", "k-out, dense", "static-undirected, sparse"])
def test_every_client_can_compute_its_own_links(name):
    network, links_at = compiled(name)
    whole = links_at(jax.random.key(6), 8, jnp.arange(4))
    weights = "push" if network.directed else "gossip"

    @jax.jit
    def alone(client, step):
        return network.links(jax.random.key(6), step, client[None], weights)

    for client in range(network.clients):
        for field, numbers in fields(alone(jnp.int32(client), 8)).items():
            np.testing.assert_array_equal(numbers[0], fields(whole[weights][0])[field][client])


@pytest.mark.parametrize("name", ["random-undirected", "trace", "k-out", "torus, sparse"])
def test_a_network_passes_through_compiled_scans_as_an_argument(name):
    network, links_at = compiled(name)

    @jax.jit
    def chunk(network, key, steps):
        return jax.lax.scan(lambda _, step: (None, networks.matrix(network, key, step)), None, steps)[1]

    for step, matrix in zip((7, 2), chunk(network, jax.random.key(1), jnp.array([7, 2])), strict=True):
        links, _ = links_at(jax.random.key(1), step, jnp.arange(4))["push"]
        np.testing.assert_array_equal(matrix, sent(links, network.clients)[1] + np.diag(np.asarray(links.own)))


@pytest.mark.parametrize("name", ["random-undirected", "random-directed", "k-out"])
def test_the_key_decides_the_realisation_and_nothing_else_does(name):
    network, links_at = compiled(name)
    drawn = [sent(links_at(jax.random.key(key), 5, jnp.arange(4))["push"][0], network.clients)[0] for key in range(3)]
    again = jax.device_get(NETWORKS[name]().links(jax.random.key(0), 5, jnp.arange(network.clients)))
    np.testing.assert_array_equal(drawn[0], sent(again, network.clients)[0])
    assert (drawn[0] != drawn[1]).any()
    assert (drawn[1] != drawn[2]).any()


def test_metropolis_on_random_links_is_exactly_doubly_stochastic():
    network = networks.RandomUndirected(97, 0.5)
    matrix = np.asarray(networks.matrix(network, jax.random.key(0), 11, "gossip"), np.float64)
    np.testing.assert_array_equal(matrix.sum(axis=0), 1)
    up = (matrix > 0) & ~np.eye(97, dtype=bool)
    degrees = up.sum(axis=0)
    expected = up / (1 + np.maximum(degrees[:, None], degrees))
    np.testing.assert_allclose(np.where(up, matrix, 0), expected, atol=2**-24)


def test_densify_moves_numbers_and_changes_none():
    network = networks.KOut(50, 3)
    links = network.links(jax.random.key(0), 4, jnp.arange(50))
    dense = jax.device_get(densify(links, 50))
    assert links.targets is not None
    assert dense.targets is None
    rows = np.arange(50)[:, None]
    np.testing.assert_array_equal(np.asarray(dense.weights)[rows, links.targets], links.weights)
    assert dense.alive.sum() == 150


def test_random_words_are_uniform_and_unrelated():
    """Neighbouring indices, steps and keys give words whose bits are fair coins, alone and in pairs."""
    index = jnp.arange(4096, dtype=jnp.uint32)
    drawn = jax.vmap(
        lambda seed: jax.vmap(lambda step: words(jax.random.key(seed), step, index))(jnp.arange(32, dtype=jnp.int32))
    )(jnp.arange(8))
    drawn = np.asarray(drawn)  # [keys, steps, indices]
    bits = np.unpackbits(drawn.view(np.uint8), axis=-1).reshape(*drawn.shape, 32).astype(np.float64) * 2 - 1
    coins = {"bits": bits, "neighbouring bits": bits[..., 1:] * bits[..., :-1]}
    for axis, name in enumerate(("keys", "steps", "indices")):
        first, second = (np.delete(bits, end, axis=axis) for end in (-1, 0))
        coins[name] = first * second
    for name, coin in coins.items():
        means = coin.reshape(-1, coin.shape[-1]).mean(axis=0)
        bound = 5 / np.sqrt(coin.size / coin.shape[-1])  # five standard errors of a mean of fair coins
        assert np.abs(means).max() < bound, name
    counts = np.bincount((drawn >> 24).ravel(), minlength=256)
    chi_square = ((counts - drawn.size / 256) ** 2 / (drawn.size / 256)).sum()
    assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def test_weights_follow_the_precision_switch():
    with jax.enable_x64(True):
        network = networks.StaticUndirected(10)
        links = network.links(jax.random.key(0), 0, jnp.arange(10), "gossip")
        assert links.weights.dtype == jnp.float64
        total = np.asarray(links.weights).sum(axis=1) + np.asarray(links.own)
        np.testing.assert_allclose(total, 1, atol=1e-15)
        alive = networks.RandomDirected(10).links(jax.random.key(0), 3, jnp.arange(10)).alive
    np.testing.assert_array_equal(alive, networks.RandomDirected(10).links(jax.random.key(0), 3, jnp.arange(10)).alive)


@pytest.mark.parametrize("network", [networks.RandomDirected(4), networks.KOut(4, 1), networks.DirectedRing(4)])
def test_gossip_is_refused_on_directed_networks(network):
    with pytest.raises(InvalidInput, match=network.name) as refused:
        network.links(jax.random.key(0), 0, jnp.arange(4), "gossip")
    assert refused.value.field == "weights"


def test_large_k_out_is_sparse():
    network = networks.KOut(100_000, 5)
    links = jax.jit(lambda step: network.links(jax.random.key(0), step, jnp.arange(100_000)))(2)
    assert links.targets is not None
    assert links.targets.shape == links.weights.shape == (100_000, 5)
    received = networks.combine(links, jnp.ones(100_000), 100_000) + links.own
    assert float(received.sum()) == pytest.approx(100_000, rel=1e-5)
