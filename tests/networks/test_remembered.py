"""Cached functions of a network run once per network."""

import gc

import jax
import jax.numpy as jnp
import pytest
from jax.core import Tracer

import hyperpush as hp
from hyperpush.base.arrays import filled
from hyperpush.networks.remembered import remembered


@pytest.fixture
def counted():
    calls = []

    @remembered
    def count(network, more=0):
        calls.append((network.clients, more))
        return network.clients + more

    return count, calls


def test_a_network_is_examined_once_for_each_argument(counted):
    count, calls = counted
    network = hp.networks.RandomDirected(4)
    assert [count(network), count(network), count(network, 2), count(network, 2)] == [4, 4, 6, 6]
    assert calls == [(4, 0), (4, 2)]
    assert count(hp.networks.RandomDirected(5)) == 5


def test_results_end_with_their_network(counted):
    count, calls = counted
    for clients in (4, 5, 6):  # a new network may get the memory address of a deleted one
        network = hp.networks.RandomDirected(clients)
        assert count(network) == clients
        del network
        gc.collect()
    assert len(calls) == 3
    assert not count.__closure__ or all(
        not cell.cell_contents for cell in count.__closure__ if isinstance(cell.cell_contents, dict)
    )


def test_traced_networks_are_not_kept(counted):
    count, calls = counted
    network = hp.networks.RandomDirected(4)
    jax.eval_shape(lambda network: jnp.zeros(count(network)), network)
    jax.eval_shape(lambda network: jnp.zeros(count(network)), network)
    assert len(calls) == 2


def test_arrays_of_one_value_are_made_once_and_never_traced():
    assert filled((3,), 0) is filled((3,), 0)
    assert filled((3,), 0, jnp.int32).dtype == jnp.int32
    assert filled((3,), False, bool).dtype == bool
    jax.jit(lambda x: x + filled((5, 7), 1))(jnp.zeros(()))
    assert not isinstance(filled((5, 7), 1), Tracer)
