"""The benchmark of several processes: what it runs is what it says, on the devices of this process."""

import jax
import pytest

from hyperpush.bench.scale import Scale, prepare
from hyperpush.errors import InvalidInput
from hyperpush.models import cnn
from hyperpush.planning import Planner

ASKED = {"method": "sgp", "clients": 4, "examples": 2, "rounds": 2, "model": "influence", "seed": 0}


def test_a_round_moves_the_models_of_the_others():
    parameters = sum(leaf.size for leaf in jax.tree.leaves(cnn.INFLUENCE.init(jax.random.key(0))))
    # Two rounds; each of four devices sends the sums for the three clients elsewhere: params and a weight, float32.
    with Planner(4).active():  # which counts and does not compute
        assert prepare(ASKED)() == 2 * 4 * 3 * (parameters + 1) * 4


def test_clients_that_cannot_be_spread_evenly_are_refused():
    with pytest.raises(InvalidInput, match=r"clients: got 5; allowed: a multiple of the 4 devices"):
        prepare({**ASKED, "clients": 5})


def test_the_defaults_are_valid():
    assert Scale().processes == (1, 2)
