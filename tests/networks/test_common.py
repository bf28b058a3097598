"""Properties of every registered network. A new one is tested as soon as it is registered."""

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import some

import hyperpush as hp
from hyperpush import networks
from hyperpush.methods.registry import build, registered, table

FAMILIES = registered("networks")
CLIENTS = 6  # the number of clients in each family's `example`


def recorded(seed: int, both_ways: bool) -> np.ndarray:
    steps = np.random.default_rng(seed).random((3, CLIENTS, CLIENTS)) < 0.4
    steps[0] |= np.roll(np.eye(CLIENTS, dtype=bool), 1, axis=1)
    return steps | steps.transpose(0, 2, 1) if both_ways else steps


# Each family with its example options, and further layouts that options or sizes lead to.
NETWORKS = {name: lambda family=family: family(CLIENTS, **family.example) for name, family in FAMILIES.items()} | {
    "fully-connected, one client": lambda: networks.FullyConnected(1),
    "static-undirected, fastest": lambda: networks.StaticUndirected(9, 0.5, seed=1, mixing="fastest-mixing"),
    "static-undirected, sparse": lambda: networks.StaticUndirected(60, 0.1, seed=2),
    "random-undirected, one probability": lambda: networks.RandomUndirected(7, 0.3),
    "random-directed, wide": lambda: networks.RandomDirected(20, (0.1, 0.9), seed=3),
    "ring, two clients": lambda: networks.Ring(2),
    "ring, sparse": lambda: networks.Ring(30),
    "torus, sparse": lambda: networks.Torus(40),
    "k-out, sparse": lambda: networks.KOut(20, 2),
    "k-out, fixed": lambda: networks.KOut(50, 5, varying=False),
    "one-peer-exponential, power of two": lambda: networks.OnePeerExponential(8),
    "graph": lambda: networks.FromGraph(nx.barbell_graph(5, 1)),
    "graph, directed": lambda: networks.FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (1, 0)])),
    "trace, array": lambda: networks.Trace(CLIENTS, recorded(0, both_ways=False)),
    "trace, both ways": lambda: networks.Trace(CLIENTS, recorded(1, both_ways=True)),
}

every_family = pytest.mark.parametrize("name", FAMILIES)
every_network = pytest.mark.parametrize("name", NETWORKS)
# Long tests use all families and one layout of each kind.
LAYOUTS = {"fully-connected, one client", "ring, sparse", "graph, directed", "trace, both ways"}
some_networks = pytest.mark.parametrize("name", some({name: name for name in NETWORKS}, LAYOUTS | FAMILIES.keys()))
some_steps = given(draw=st.integers(0, 2**31 - 1), step=st.integers(0, 2**31 - 1))
often = settings(max_examples=10, deadline=None, derandomize=True)


@cache
def compiled(name: str):
    """Return a network and its links with all weights, for all clients and a block; compiled only once."""
    network = NETWORKS[name]()
    kinds = ["push", "ones"] if network.directed else ["push", "gossip", "ones"]

    @jax.jit
    def links(network, key, step, block):
        everyone = jnp.arange(network.clients)
        return {
            weights: (network.links(key, step, everyone, weights), network.links(key, step, block, weights))
            for weights in kinds
        }

    # Use NumPy arrays, because jax.numpy would compile the indexing of the tests for every new shape.
    return network, lambda *at, of=network: jax.device_get(links(of, *at))


def sent(links: networks.Links, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at [i, j] the number of live slots from j to i, and their total weight."""
    senders, slots = np.nonzero(links.alive)
    targets = np.arange(n)[slots] if links.targets is None else np.asarray(links.targets)[senders, slots]
    count, weight = np.zeros((n, n), int), np.zeros((n, n))
    np.add.at(count, (targets, senders), 1)
    np.add.at(weight, (targets, senders), np.asarray(links.weights)[senders, slots])
    return count, weight


def fields(links: networks.Links) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in vars(links).items() if value is not None}


@every_network
@often
@some_steps
def test_weights_are_stochastic_as_they_claim(name, draw, step):
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
            # Shares are rounded down and the sender keeps the remainder, so mass is conserved.
            np.testing.assert_allclose(matrix, (up + itself) / (1 + up.sum(axis=0)), rtol=1e-6, atol=n * 2.0**-24)
            np.testing.assert_array_equal(matrix.sum(axis=0), 1)
        else:
            assert (matrix >= 0).all()
            assert not matrix[(up == 0) & ~itself].any()
            np.testing.assert_array_equal(matrix, matrix.T)
            np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-6)


@every_network
@often
@some_steps
def test_links_are_a_function_of_key_step_and_sender_alone(name, draw, step):
    """A block has the values of the whole network, padding sends nothing, and an equal network gives equal links."""
    network, links_at = compiled(name)
    n = network.clients
    inside = [draw % n, 0]
    at = jax.random.key(draw), step, jnp.array([*inside, n, n + 5])
    again = links_at(*at, of=NETWORKS[name]())
    for weights, (whole, part) in links_at(*at).items():
        for field, numbers in fields(whole).items():
            np.testing.assert_array_equal(fields(part)[field][:2], numbers[inside])
            np.testing.assert_array_equal(fields(again[weights][0])[field], numbers)
        assert not part.alive[2:].any()
        assert not part.weights[2:].any()
        np.testing.assert_array_equal(part.own[2:], 1)


@some_networks
def test_varying_says_whether_steps_differ_and_the_key_decides_chance(name):
    network, links_at = compiled(name)

    def up(key, step):
        return sent(links_at(jax.random.key(key), step, jnp.arange(4))["ones"][0], network.clients)[0]

    assert network.varying == any((up(0, step) != up(0, 0)).any() for step in range(1, 8))
    random = (network.means().up % 1 > 0).any() and network.period() == 1
    assert random == any((up(key, 5) != up(0, 5)).any() for key in range(1, 6))


@some_networks
@pytest.mark.parametrize("by", ["push", "gossip"])
def test_means_equal_what_happens(name, by):
    network, steps = NETWORKS[name](), 6000
    if by == "gossip" and network.directed:
        with pytest.raises(hp.InvalidInput, match=f"weights: got 'gossip'; allowed: push on {network.name}"):
            network.means(by)
        return
    means, n = network.means(by), network.clients
    key = jax.random.key(1)

    @jax.jit
    def add(network, step):
        matrix = networks.matrix(network, key, step, by)
        return jnp.stack([matrix.T, matrix.T > 0]).astype(float)

    @jax.jit
    def average(network):
        total = jax.lax.fori_loop(0, steps, lambda step, total: total + add(network, step), jnp.zeros((2, n, n)))
        return total / steps

    push, up = np.asarray(average(network))
    np.testing.assert_allclose(means.weights, push, atol=5 * 0.5 / np.sqrt(steps))
    np.testing.assert_allclose(means.up, up, atol=5 * 0.5 / np.sqrt(steps))
    np.testing.assert_allclose(means.weights.sum(axis=1), 1, rtol=1e-6)
    weights = means.stationary()
    np.testing.assert_allclose(means.weights.T @ weights, weights, atol=1e-6)
    assert weights.sum() == pytest.approx(n)
    assert np.all(weights > 0)


@some_networks
def test_floods_end_when_promised(name):
    """A flood ends exactly in the promised round without randomness, and within it in 100 random floods."""
    network = NETWORKS[name]()
    n, promised = network.clients, network.flood_rounds()
    assert promised == network.flood_rounds()

    @jax.jit
    @jax.vmap
    def rounds(key, start):
        def spread(state):
            knows, step = state
            up = networks.matrix(network, key, start + step, "ones")
            return (up @ knows.astype(float)) > 0, step + 1

        unfinished = jax.lax.while_loop(lambda state: ~state[0].all(), spread, (jnp.eye(n, dtype=bool), 0))
        return unfinished[1]

    found = rounds(jax.random.split(jax.random.key(99), 100), jnp.arange(100))
    random = (network.means().up % 1 > 0).any() and network.period() == 1
    assert found.max() <= promised if random else found.max() == promised


@every_family
def test_toml_round_trip(name):
    network = NETWORKS[name]()
    written = table(network)
    assert written["name"] == name
    again = build("networks", written, "network")
    assert type(again) is FAMILIES[name]
    assert table(again) == written
    assert jax.tree.all(jax.tree.map(np.array_equal, again, network))


@every_family
def test_options_out_of_range_are_named(name):
    family = FAMILIES[name]
    options = {"clients": CLIENTS, **family.example}
    for parameter in inspect.signature(family).parameters.values():
        if isinstance(parameter.default, bool):
            continue  # booleans have no range
        listed = isinstance(family.example.get(parameter.name), list)
        wrong = [] if listed else "nonsense" if isinstance(parameter.default, str) else -1
        with pytest.raises(hp.InvalidInput) as refused:
            build("networks", {"name": name, **options, parameter.name: wrong}, "network")
        assert refused.value.field == f"network.{parameter.name}"
    with pytest.raises(hp.InvalidInput, match=r"network\.clints.*did you mean 'clients'"):
        build("networks", {"name": name, "clints": CLIENTS, **family.example}, "network")


@every_family
def test_by_name_gives_the_family_and_a_default_seed(name):
    network = hp.network(name, CLIENTS, 7, **FAMILIES[name].example)
    assert (type(network), network.name, network.clients) == (FAMILIES[name], name, CLIENTS)
    assert getattr(network, "seed", 7) == 7


@every_family
def test_every_method_of_reaching_agrees(name):
    """The possible links connect all clients, as networkx confirms, and a flood takes at least the diameter."""
    network = NETWORKS[name]()
    graph = nx.from_scipy_sparse_array(network.possible(), create_using=nx.DiGraph)
    assert nx.is_strongly_connected(graph)
    assert network.flood_rounds() >= nx.diameter(graph)
    assert network.two_way() == all(graph.has_edge(j, i) for i, j in graph.edges)
