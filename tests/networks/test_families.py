"""Each family has its documented links, and refuses sizes and options that it cannot build."""

from functools import partial

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

import hyperpush as hp
from hyperpush import networks
from hyperpush.base.checks import check_integer, check_probability_range
from hyperpush.base.errors import InvalidInput

KEY = jax.random.key(0)


@partial(jax.jit, static_argnames="weights")
def matrix(network, step, weights):
    return networks.matrix(network, KEY, step, weights)


def sends(network, step: int = 0) -> np.ndarray:
    """Return a matrix that is True at [j, i] if j sends to i."""
    received = np.asarray(matrix(network, step, "ones")) > 0
    return received.T & ~np.eye(network.clients, dtype=bool)


def of_graph(graph: nx.Graph) -> np.ndarray:
    return nx.to_numpy_array(graph, nodelist=sorted(graph)) > 0


@pytest.mark.parametrize(
    ("network", "graph"),
    [
        (networks.FullyConnected(6), nx.complete_graph(6)),
        (networks.Ring(7), nx.cycle_graph(7)),
        (networks.Ring(30), nx.cycle_graph(30)),
        (networks.DirectedRing(7), nx.cycle_graph(7, create_using=nx.DiGraph)),
        (networks.Torus(12), nx.grid_2d_graph(3, 4, periodic=True)),
        (networks.Torus(80, rows=4), nx.grid_2d_graph(4, 20, periodic=True)),
        (networks.Star(6), nx.star_graph(5)),
        (networks.Exponential(6), nx.DiGraph([(i, (i + d) % 6) for i in range(6) for d in (1, 2, 4)])),
        (networks.Exponential(32), nx.DiGraph([(i, (i + 2**k) % 32) for i in range(32) for k in range(5)])),
    ],
    ids=lambda value: f"{value.name}-{value.clients}" if isinstance(value, networks.Network) else "",
)
def test_fixed_graphs(network, graph):
    np.testing.assert_array_equal(sends(network), of_graph(graph))
    np.testing.assert_array_equal(network.possible().toarray(), of_graph(graph))


@pytest.mark.parametrize("n", [2, 5, 8])
def test_one_peer_takes_the_powers_in_turn(n):
    network = networks.OnePeerExponential(n)
    turns = (n - 1).bit_length()
    for step in range(2 * turns):
        expected = np.roll(np.eye(n, dtype=bool), 2 ** (step % turns), axis=1)
        np.testing.assert_array_equal(sends(network, step), expected)


def test_one_peer_averages_exactly_when_n_is_a_power_of_two():
    product = np.eye(8)
    for step in range(5, 8):
        product = np.asarray(matrix(networks.OnePeerExponential(8), step, "push")) @ product
    np.testing.assert_array_equal(product, np.full((8, 8), 1 / 8))


def test_erdos_renyi_is_connected_repeatable_and_as_dense_as_asked():
    graphs = [sends(networks.StaticUndirected(40, 0.3, seed=seed)) for seed in range(5)]
    np.testing.assert_array_equal(graphs[0], sends(networks.StaticUndirected(40, 0.3, seed=0)))
    assert (graphs[0] != graphs[1]).any()
    assert all(nx.is_connected(nx.from_numpy_array(graph)) for graph in graphs)
    assert np.mean(graphs) == pytest.approx(0.3 * 39 / 40, abs=0.04)


@pytest.mark.parametrize("family", [networks.RandomDirected, networks.RandomUndirected])
def test_links_are_up_as_often_as_their_probability_says(family):
    network = family(8, probability=(0.1, 0.9), seed=4)
    steps = 4000
    links = jax.jit(jax.vmap(lambda step: network.links(KEY, step, jnp.arange(8)).alive))(jnp.arange(steps))
    probabilities = network.probabilities()
    off = ~np.eye(8, dtype=bool)
    assert probabilities[off].min() >= 0.1
    assert probabilities[off].max() <= 0.9
    assert probabilities[off].std() > 0.1
    # The tolerance is six standard deviations of a frequency.
    np.testing.assert_allclose(np.asarray(links).mean(axis=0), probabilities, atol=6 * 0.5 / np.sqrt(steps))
    both = np.mean(np.asarray(links) & np.asarray(links).transpose(0, 2, 1), axis=0)
    expected = probabilities * probabilities.T if network.directed else probabilities
    np.testing.assert_allclose(both, expected, atol=6 * 0.5 / np.sqrt(steps))


def test_certain_links_are_always_up():
    np.testing.assert_array_equal(sends(networks.RandomDirected(5, 1), 3), ~np.eye(5, dtype=bool))


@pytest.mark.parametrize(("n", "k"), [(7, 3), (5, 4), (9, 1)])
def test_k_out_picks_sets_uniformly(n, k):
    network = networks.KOut(n, k)
    steps = 6000
    alive = jax.jit(jax.vmap(lambda step: networks.matrix(network, KEY, step, "ones") > 0))(jnp.arange(steps))
    sent = np.asarray(alive).transpose(0, 2, 1) & ~np.eye(n, dtype=bool)
    assert (sent.sum(axis=2) == k).all()
    frequency = sent.mean(axis=0)
    np.testing.assert_allclose(frequency[~np.eye(n, dtype=bool)], k / (n - 1), atol=6 * 0.5 / np.sqrt(steps))
    pairs = np.mean(sent[:, 0, 1] & sent[:, 0, 2])
    assert pairs == pytest.approx(k * (k - 1) / ((n - 1) * (n - 2)), abs=6 * 0.5 / np.sqrt(steps))


def test_fixed_k_out_is_one_strongly_connected_draw():
    network = networks.KOut(60, 6, varying=False, seed=1)
    first = sends(network, 0)
    np.testing.assert_array_equal(first, sends(network, 9))
    assert (first.sum(axis=1) == 6).all()
    assert nx.is_strongly_connected(nx.from_numpy_array(first, create_using=nx.DiGraph))
    assert (first != sends(networks.KOut(60, 6, varying=False, seed=2))).any()


def test_from_graph_numbers_nodes_in_order():
    network = networks.FromGraph(nx.DiGraph([("c", "a"), ("a", "b"), ("b", "c"), ("c", "c")]))
    assert network.directed
    # the clients in order are c, a, b
    np.testing.assert_array_equal(np.argwhere(sends(network)), [[0, 1], [1, 2], [2, 0]])
    club = nx.karate_club_graph()
    np.testing.assert_array_equal(sends(networks.FromGraph(club)), of_graph(club))
    doubled = nx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    np.testing.assert_array_equal(sends(networks.FromGraph(doubled)), of_graph(nx.path_graph(3)))


def test_trace_repeats_its_steps():
    edges = [[(0, 1), (1, 2)], [], [(2, 0), (2, 2)]]
    network = networks.Trace(3, edges)
    array = np.zeros((3, 3, 3), bool)
    array[0, 0, 1] = array[0, 1, 2] = array[2, 2, 0] = True
    for step in range(7):
        np.testing.assert_array_equal(sends(network, step), array[step % 3])
        np.testing.assert_array_equal(sends(networks.Trace(3, array), step), array[step % 3])
    assert network.directed
    assert not networks.Trace(2, [[(0, 1), (1, 0)]]).directed


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: networks.FullyConnected(0), "clients"),
        (lambda: networks.RandomDirected(1), "clients"),
        (lambda: networks.RandomDirected(70_000), "clients"),
        (lambda: networks.RandomDirected(4, -0.1), "probability"),
        (lambda: networks.RandomDirected(4, float("nan")), "probability"),
        (lambda: networks.RandomDirected(4, (0.5, 1.5)), "probability"),
        (lambda: networks.RandomDirected(4, (0.8, 0.4)), "probability"),
        (lambda: networks.RandomDirected(4, (0.8, 0.9, 1.0)), "probability"),
        (lambda: networks.RandomDirected(4, seed=-1), "seed"),
        (lambda: networks.StaticUndirected(4, 1.5), "probability"),
        (lambda: networks.StaticUndirected(200, 0.0001), "probability"),
        (lambda: networks.Ring(4, mixing="fast"), "mixing"),
        (lambda: networks.Torus(12, rows=5), "rows"),
        (lambda: networks.Torus(13), "clients"),
        (lambda: networks.Star(10_000), "clients"),
        (lambda: networks.KOut(5, 5), "k"),
        (lambda: networks.KOut(5, 0), "k"),
        (lambda: networks.KOut(200, 1, varying=False), "k"),
        (lambda: networks.FromGraph(nx.Graph()), "graph"),
        (lambda: networks.Trace(3, []), "steps"),
        (lambda: networks.Trace(3, np.zeros((2, 4, 4), bool)), "steps"),
        (lambda: networks.Trace(3, [[(0, 1)], [(1, 3)]]), "steps[1]"),
        (lambda: networks.Trace(3, [[(0, 1, 2)]]), "steps[0]"),
        (lambda: networks.Trace(3, [[(0, 0.5)]]), "steps[0]"),
        (lambda: networks.Trace(3, [[("a", "b")]]), "steps[0]"),
    ],
)
def test_bad_options_are_refused_by_name(build, field):
    with pytest.raises(InvalidInput) as refused:
        build()
    assert refused.value.field == field


@pytest.mark.parametrize("given", ["3", 2.0, True, None, -1])
def test_whole_numbers_only(given):
    with pytest.raises(InvalidInput, match="clients"):
        check_integer("clients", given, minimum=1)


@pytest.mark.parametrize("given", ["0.5", True, None, [0.2], [0.1, "x"], {}])
def test_probabilities_only(given):
    with pytest.raises(InvalidInput, match="probability"):
        check_probability_range("probability", given)


def test_wrong_names_get_a_suggestion():
    with pytest.raises(InvalidInput, match="did you mean 'random-directed'"):
        hp.network("random-direct", 4)
    with pytest.raises(InvalidInput, match="did you mean 'probability'"):
        hp.network("random-directed", 4, probabilty=0.3)
    with pytest.raises(InvalidInput) as refused:
        hp.network("k-out", 4)
    assert refused.value.field == "network.k"
