"""`hp.run` checks and counts programs that belong to no method, as verbs do."""

import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.programs import Average, Repeat

CLIENTS = 3
NETWORK = hp.networks.Ring(CLIENTS)
STEPS = 4


def mean_of(rounds):
    return Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean + ctx.data, rounds, "exact")


def run(program=None, **options):
    call = {"data": np.ones(CLIENTS), "key": 0, "states": jnp.array([1.0, 2.0, 6.0]), "network": NETWORK, **options}
    return hp.extend.run(Repeat(mean_of(1), STEPS) if program is None else program, **call)


def test_states_and_costs_are_those_of_the_program():
    found = run()
    np.testing.assert_allclose(found.states, 3.0 + STEPS)  # the mean, plus a datum of 1 in each step
    assert (found.costs.rounds, found.costs.floats) == (STEPS, STEPS)  # one float to the server in each step


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"program": lambda x: x}, "program"),
        ({"network": 3}, "network"),
        ({"engine": "fast"}, "engine"),
        ({"key": -1}, "key"),
        ({"states": jnp.ones(2)}, "states"),
        ({"data": {"x": np.ones(2)}}, "data"),
    ],
)
def test_bad_arguments_are_refused(options, field):
    with pytest.raises(hp.InvalidInput) as caught:
        run(**options)
    assert caught.value.field.startswith(field)


def test_a_branch_on_a_traced_state_is_refused_in_one_line():
    branching = hp.programs.Local(lambda state, ctx: state if state > 0 else -state)
    with pytest.raises(hp.InvalidInput, match=r"program: got 'a branch in Python.*jnp.where"):
        hp.extend.run(branching, {}, NETWORK, key=0, states=jnp.ones(3))
