"""Which clients can receive a negative sample, checked by running the exchanges and observing whom negatives move."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.big_fed.algorithm import message_passing
from hyperpush.big_fed.bilinear import loss, model, represent
from hyperpush.big_fed.strangers import without_negatives
from hyperpush.programs import Sequence

pytestmark = pytest.mark.usefixtures("float64")

N = 7
PATH = nx.to_numpy_array(nx.path_graph(N))
LINKS = PATH.copy()
LINKS[1, 4] = LINKS[4, 0] = LINKS[6, 2] = 1  # 4 hears 1, 0 hears 4, and 2 hears 6, but not the reverse


class Shown(eqx.Module):
    shown: jax.Array
    scale: jax.Array


def moved(network, graph, loops):
    """Return the clients whose slope changes with negatives, by simulation; all representations are positive."""
    states = Shown(jnp.asarray(np.random.default_rng(0).uniform(1, 2, (N, 3))), jnp.zeros(N))
    slopes = []
    for negatives in (20.0, 0.0):  # with 20 every client draws every stranger
        program = Sequence(
            *message_passing(hp.big_fed.Cosine(graph, negatives, self_loops=loops, represent=represent))[:2]
        )
        slopes.append(hp.Simulate().run(program, network, states, jnp.zeros(N), jax.random.key(0)).states.shown)
    return np.flatnonzero(np.abs(slopes[0] - slopes[1]).max(axis=1) > 1e-9)


@pytest.mark.parametrize("loops", [False, True])
def test_those_without_negatives_are_those_that_negatives_do_not_move(loops):
    """Client 6 hears no neighbor, so it has no representation unless it counts as its own neighbor."""
    links = LINKS > 0
    links[5, 6], links[3, 6] = False, True
    graph, network = hp.networks.Graph(PATH), hp.networks.Trace(N, links[None])
    silent, wanted = without_negatives(
        hp.big_fed.Cosine(graph, 20.0, self_loops=loops, represent=represent), network, 1, 4
    )
    assert wanted == N
    np.testing.assert_array_equal(np.setdiff1d(np.arange(N), silent), moved(network, graph, loops))
    assert silent.tolist() == ([1, 3, 5] if loops else [1, 2, 3, 5, 6])


class Stopped(hp.Simulate):
    def run(self, *arguments, **options):
        raise AssertionError("it has run")


def checked(network, graph=None, **options):
    graph = hp.networks.Graph(PATH) if graph is None else graph
    cosine = hp.big_fed.Cosine(graph, options.pop("negatives", 2.0), represent=represent)
    algorithm = hp.big_fed.BiGFed(5, 0.1, 0.1, "peers", **options)
    layers, data = np.ones((2, 2)), (np.ones((N, 3, 1)), np.ones((N, 3)))
    task = hp.Task(inner=(model, loss), outer=cosine, params=layers, hypers=layers, train=data, common=True)
    hp.solve(task, algorithm, network, key=0, engine=Stopped())


def test_a_network_without_negatives_is_refused_before_anything_runs():
    """Refuse the graph itself as network, and one whose strangers are never linked when pairs meet.

    In the second network, strangers are linked at even steps only, and pairs meet at odd steps.
    """
    alike = hp.networks.FromGraph(nx.path_graph(N))
    turns = hp.networks.Trace(N, np.stack([~np.eye(N, dtype=bool), PATH > 0]))
    for network in (alike, turns):
        with pytest.raises(hp.InvalidInput, match="no client ever hears") as refused:
            checked(network)
        assert refused.value.field == "network"
        assert network.name in str(refused.value.given)
        assert "Cosine.negatives = 0" in refused.value.allowed
        with pytest.raises(AssertionError, match="it has run"):
            checked(network, negatives=0.0)
    with pytest.raises(AssertionError, match="it has run"):
        # with five exchanges in a round instead of four, every other comparison is at an even step
        checked(turns, pushes=2)
    with pytest.raises(hp.InvalidInput, match=f"graph: got '3 clients'; allowed: {N}"):
        checked(alike, hp.networks.Graph(np.ones((3, 3)) - np.eye(3)))


def test_clients_without_negatives_are_named():
    one_way = hp.networks.Trace(N, LINKS[None] > 0)
    with (
        pytest.warns(UserWarning, match=r"clients 1, 3, 5, 6 of 7 never hear") as said,
        pytest.raises(AssertionError, match="it has run"),
    ):
        checked(one_way)
    assert len(said) == 1


def test_nobody_is_named_where_there_is_nothing_to_hear():
    """No client is named if all are neighbors, or if a client without links has no representation to send."""
    alone = PATH.copy()
    alone[-1] = alone[:, -1] = 0
    rest = hp.networks.Trace(N, np.array([[[u, v] != [0, 6] and u != v for v in range(N)] for u in range(N)])[None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for graph, network in (
            (np.ones((N, N)) - np.eye(N), hp.networks.FullyConnected(N)),
            (alone, rest),
            (PATH, hp.networks.RandomDirected(N, 0.2)),
        ):
            with pytest.raises(AssertionError, match="it has run"):
                checked(network, hp.networks.Graph(graph))
