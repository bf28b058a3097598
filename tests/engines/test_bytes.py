"""Bytes that each client sends: the size of a message for every live link that it uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines import keys
from hyperpush.networks import matrix
from hyperpush.programs import Average, Exchange, Local, Repeat, Sequence, Server

ENGINES = [hp.Simulate(), hp.Shard(2), hp.Threads()]
IDS = ["simulate", "shard", "threads"]
N, KEY = 5, jax.random.key(2)
START, NOTHING = (jnp.arange(float(N)), jnp.zeros(N, jnp.int32)), jnp.zeros((N, 1))
NETWORKS = [hp.networks.Star(N), hp.networks.Ring(N), hp.networks.RandomDirected(N)]


def links(network, steps):
    """Count the links over which each client sends in these steps."""
    total = np.zeros(N, int)
    for step in steps:
        alive = np.array(matrix(network, keys.network_key(KEY), step, "ones") > 0)
        np.fill_diagonal(alive, False)
        total += alive.sum(axis=0)  # sum by sender
    return total


def keep(state, *_):
    return state


TALK = Exchange(lambda s, ctx: (jnp.full(3, s[0]), s[1]), keep)  # 16 bytes per message
MEAN = Average(lambda s, ctx: (s[0], jnp.ones(())), lambda s, mean, mass, ctx: s, 4)  # 8 bytes
SERVED = Server(lambda s, ctx: s[0], lambda messages, key: messages, keep)  # 4 bytes, once
VOTE = Repeat(
    Local(lambda s, ctx: (s[0], s[1] + 1)), 9, until=lambda s, ctx: s[1] >= 2
)  # 4 bytes for each round of each vote


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_bytes_are_counted_by_link(network, engine):
    program = Sequence(Repeat(TALK, 3), MEAN, SERVED, VOTE)
    result = engine.run(program, network, START, NOTHING, KEY)
    votes = 2 * network.flood_rounds()
    expected = (
        16 * links(network, range(3)) + 8 * links(network, range(3, 7)) + 4 + 4 * links(network, range(8, 8 + votes))
    )
    np.testing.assert_array_equal(result.bytes, expected)
    assert result.rounds == 8 + votes
    assert result.floats == 3 * 4 + 4 * 2 + 1 + votes  # independent of the number of links


@pytest.mark.parametrize("floats", [1, 200], ids=["narrow", "wide"])
@pytest.mark.parametrize("network", [hp.networks.RandomDirected(12), hp.networks.Ring(12)], ids=lambda n: n.name)
def test_averages_count_the_same_composed_or_not(network, floats):
    mean = Average(lambda s, ctx: (s, jnp.ones(())), lambda s, mean, mass, ctx: mean, 5)
    start = jnp.ones((12, floats))
    found = [engine.run(mean, network, start, jnp.zeros(12), KEY).bytes for engine in ENGINES]
    assert found[0].min() > 0
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


@pytest.mark.parametrize("engine", [hp.Simulate, hp.Threads])
def test_what_gets_lost_was_sent(engine):
    push = Repeat(Exchange(lambda s, ctx: s[0], keep, conserved=True), 3)
    network = hp.networks.RandomDirected(N)
    result = engine(faults=hp.Faults(loss=0.5)).run(push, network, START, NOTHING, KEY)
    np.testing.assert_array_equal(result.bytes, 4 * links(network, range(3)))
