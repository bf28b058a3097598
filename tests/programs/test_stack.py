"""Several runs in one program equal the single runs, for the messages of one run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import hyperpush as hp
from hyperpush.programs import Average, Exchange, Local, Repeat, Runs, Scope, Sequence, stack
from hyperpush.programs.nodes import has_ended

NETWORK, KEY = hp.networks.Ring(3), jax.random.key(0)
ENGINES = [hp.Simulate(), hp.Threads()]


class State(eqx.Module):
    x: Array
    ended: Array


def halving():
    """Return a program: x ← mean(x)/2 until x ≤ 1, then double x `times` times: once if x was above ¾."""
    mean = Average(
        lambda state, ctx: (state.x, jnp.ones(())),
        lambda state, mean, mass, ctx: State(mean / 2, state.ended),
        rounds=1,
        by="tree",
        ends=lambda state, ctx: state.x <= 1,
    )
    down = Repeat(mean, 20, until=has_ended, common=True, name="down")
    double = Local(lambda state, ctx: State(2 * state.x, state.ended))
    up = Repeat(double, 3, times=lambda state, ctx: 1 + (state.x > 0.75).astype(jnp.int32), name="up")
    inside = Sequence(down, up)
    return Scope(inside, lambda x, ctx: State(x, jnp.zeros((), bool)), lambda x, state, ctx: state.x)


def alone(start):
    """Compute the same in plain Python."""
    x = start / 2
    while x > 1:
        x /= 2
    return x * (4 if x > 0.75 else 2)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_every_run_ends_by_itself(engine):
    starts = np.array([1.0, 100.0, 7.0])
    states = jnp.asarray(np.stack([starts] * 3), jnp.float32)
    found = engine.run(stack(halving()), NETWORK, Runs.start(states, axis=1), jnp.zeros((3, 1)), KEY)
    np.testing.assert_allclose(found.states.state, [[alone(each) for each in starts]] * 3)
    slowest = engine.run(halving(), NETWORK, states[:, 1], jnp.zeros((3, 1)), KEY)
    assert found.rounds == slowest.rounds
    assert found.floats == 3 * slowest.floats
    assert not found.states.ended.any()


def test_a_run_that_has_ended_stays_through_loops_inside():
    inner = Repeat(Local(lambda x, ctx: x + 1), 2, name="inner")
    outer = Repeat(inner, 5, until=lambda x, ctx: x >= 6, common=True, name="outer")
    starts = jnp.asarray([[0.0, 5.0]] * 3)
    found = hp.Simulate().run(stack(outer), NETWORK, Runs.start(starts, axis=1), jnp.zeros((3, 1)), KEY)
    np.testing.assert_array_equal(found.states.state[0], [6.0, 7.0])


@pytest.mark.parametrize(
    "node",
    [
        Exchange(lambda x, ctx: x, lambda x, inbox, ctx: inbox.mix(x)),
        Repeat(Local(lambda x, ctx: x), 3, until=lambda x, ctx: x > 0),
    ],
)
def test_what_runs_cannot_share_is_refused(node):
    with pytest.raises(hp.InvalidInput, match="averages by 'tree'"):
        stack(node)
