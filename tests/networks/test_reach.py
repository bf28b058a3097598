"""Disconnected networks are refused with a named client, and floods end in the promised round."""

import itertools

import networkx as nx
import numpy as np
import pytest

from hyperpush import networks
from hyperpush.base.errors import InvalidInput
from hyperpush.networks.reach import periodic_flood


@pytest.mark.parametrize(
    ("build", "field", "named"),
    [
        (lambda: networks.FromGraph(nx.Graph([(0, 1), (2, 3)])), "graph", "clients 2, 3 cannot be reached"),
        (lambda: networks.FromGraph(nx.DiGraph([(0, 1), (1, 0), (2, 0)])), "graph", "clients 2 cannot be reached"),
        (lambda: networks.FromGraph(nx.DiGraph([(0, 1), (1, 0), (1, 2)])), "graph", "clients 2 cannot reach client 0"),
        (lambda: networks.FromGraph(nx.empty_graph(30)), "graph", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 19 more"),
        (lambda: networks.RandomDirected(3, 0), "probability", "clients 1, 2 cannot be reached"),
        (lambda: networks.Trace(3, [[(0, 1)], [(1, 0)]]), "steps", "clients 2 cannot be reached"),
    ],
)
def test_a_network_that_never_joins_all_clients_is_refused(build, field, named):
    with pytest.raises(InvalidInput, match=named) as refused:
        build()
    assert refused.value.field == field


def test_large_networks_get_a_bound():
    n = 3000
    rounds = networks.Ring(n).flood_rounds()
    assert n // 2 <= rounds <= n
    # Odd steps use the ring, even ones the jumps: no flood ends before the jumps alone could reach the farthest
    # client.
    frames = [networks.Exponential(n).possible(), networks.DirectedRing(n).possible()]
    jumps = max(distance.bit_count() for distance in range(n))
    assert jumps <= periodic_flood(frames) <= 2 * 2 * (jumps + 1)


def failure(probabilities: np.ndarray, rounds: int, source: int) -> float:
    """Return the exact probability that a flood has not ended, from the distribution over sets of reached clients."""
    n = len(probabilities)
    mass = {frozenset([source]): 1.0}
    for _ in range(rounds):
        spread: dict[frozenset[int], float] = {}
        for knows, weight in mass.items():
            rest = [i for i in range(n) if i not in knows]
            hears = [1 - np.prod([1 - probabilities[j, i] for j in knows]) for i in rest]
            for outcome in itertools.product([False, True], repeat=len(rest)):
                chance = np.prod([h if heard else 1 - h for h, heard in zip(hears, outcome, strict=True)])
                now = knows | {i for i, heard in zip(rest, outcome, strict=True) if heard}
                spread[now] = spread.get(now, 0.0) + weight * float(chance)
        mass = spread
    return 1 - mass.get(frozenset(range(n)), 0.0)


@pytest.mark.parametrize("network", [networks.RandomDirected(3), networks.RandomDirected(4, (0.05, 0.5), seed=3)])
def test_random_floods_fail_hardly_ever(network):
    rounds = network.flood_rounds()
    worst = max(failure(network.probabilities(), rounds, source) for source in range(network.clients))
    assert worst < 1e-7
    # The promise is not too generous: half of the rounds would not suffice.
    assert max(failure(network.probabilities(), rounds // 2, source) for source in range(network.clients)) > 1e-7


def test_floods_that_hardly_spread_are_refused():
    with pytest.raises(InvalidInput, match="probability"):
        networks.RandomDirected(2, 1e-6).flood_rounds()
