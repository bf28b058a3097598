"""Disconnected networks are refused by name, and floods end when promised."""

import itertools

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from hyperpush import networks
from hyperpush.errors import InvalidInput
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


@jax.jit
def up(network, step):
    return networks.matrix(network, jax.random.key(0), step, "ones") > 0


def flooded_after(network, start: int) -> int:
    """Rounds until everybody knows what each client knew at a step, by matrix products."""
    knows = np.eye(network.clients, dtype=bool)
    for rounds in itertools.count():
        if knows.all():
            return rounds
        knows = np.asarray(up(network, start + rounds)) @ knows
    raise AssertionError


@pytest.mark.parametrize(
    "network",
    [
        networks.FullyConnected(5),
        networks.StaticUndirected(30, 0.15),
        networks.Ring(11),
        networks.DirectedRing(12),
        networks.Torus(30),
        networks.Star(9),
        networks.Exponential(20),
        networks.OnePeerExponential(8),
        networks.OnePeerExponential(11),
        networks.KOut(40, 4, varying=False),
        networks.FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (1, 0)])),
        networks.Trace(4, [[(0, 1)], [(2, 3), (1, 2)], [], [(3, 0)]]),
        networks.Trace(4, np.random.default_rng(5).random((6, 4, 4)) < 0.3),
    ],
    ids=lambda network: f"{network.name}-{network.clients}",
)
def test_floods_take_exactly_as_long_as_said(network):
    assert network.flood_rounds() == max(flooded_after(network, start) for start in range(12))


def test_large_networks_get_a_bound():
    n = 3000
    rounds = networks.Ring(n).flood_rounds()
    assert n // 2 <= rounds <= n
    # Odd steps go round the ring, even ones jump: no flood ends before the jumps alone could reach the farthest.
    frames = [networks.Exponential(n).possible(), networks.DirectedRing(n).possible()]
    jumps = max(distance.bit_count() for distance in range(n))
    assert jumps <= periodic_flood(frames) <= 2 * 2 * (jumps + 1)


def failure(probabilities: np.ndarray, rounds: int, source: int) -> float:
    """The exact probability that a flood has not ended, by following the distribution over sets of those who know."""
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
    # Not absurdly generous: half of the rounds would not do.
    assert max(failure(network.probabilities(), rounds // 2, source) for source in range(network.clients)) > 1e-7


@pytest.mark.parametrize(
    "network",
    [networks.RandomDirected(20), networks.RandomUndirected(10, 0.1), networks.KOut(60, 2), networks.KOut(5, 4)],
    ids=lambda network: f"{network.name}-{network.clients}",
)
def test_random_floods_end_in_time(network):
    promised = network.flood_rounds()
    assert promised == network.flood_rounds()

    def knows(key):
        def spread(knows, step):
            links = network.links(key, step, jnp.arange(network.clients), "ones")
            return knows | (networks.combine(links, knows.astype(jnp.float32), network.clients) > 0), None

        return jax.lax.scan(spread, jnp.eye(network.clients, dtype=bool), jnp.arange(promised))[0].all()

    assert jax.jit(jax.vmap(knows))(jax.random.split(jax.random.key(99), 200)).all()


def test_floods_that_hardly_spread_are_refused():
    with pytest.raises(InvalidInput, match="probability"):
        networks.RandomDirected(2, 1e-6).flood_rounds()
