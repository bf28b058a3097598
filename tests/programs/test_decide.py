"""Loops that end on exact averages end in the same step everywhere, despite the parties' different rounding."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

import hyperpush as hp
from hyperpush.base.errors import HyperpushError
from hyperpush.programs import Average, Repeat
from hyperpush.programs.nodes import has_ended

NETWORK, TOLERANCE, KEY = hp.networks.Ring(4), 0.125, jax.random.key(0)
ENGINES = [hp.Simulate(), hp.Threads(deadline=2.0)]


class Halved(eqx.Module):
    x: Array
    ended: Array


def is_small(state, ctx):
    """Return whether x is at most the tolerance, which it meets exactly; each client rounds differently."""
    return state.x * (1 + 1e-14 * ctx.client) <= TOLERANCE


AVERAGE = Average(
    lambda state, ctx: (state.x, jnp.ones(())),
    lambda state, mean, mass, ctx: Halved(mean / 2, state.ended),
    rounds=1,
    by="tree",
)


def run(average, until, engine):
    start = Halved(jnp.ones(4), jnp.zeros(4, bool))
    loop = Repeat(average, 10, until=until, common=True, name="halving")
    return engine.run(loop, NETWORK, start, jnp.zeros((4, 1)), KEY)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_the_root_decides_for_all(engine):
    with jax.enable_x64(True):
        found = run(replace(AVERAGE, ends=is_small), has_ended, engine)
    assert found.states.ended.all()
    assert set(found.states.x.tolist()) == {0.125}  # the third average gives 1/8 at the root
    assert found.rounds == 3 * run(AVERAGE, None, engine).rounds // 10


def test_parties_that_decide_for_themselves_part():
    with jax.enable_x64(True):
        with pytest.raises(HyperpushError, match="disagree about the end of a loop"):
            run(AVERAGE, is_small, ENGINES[0])
        with pytest.raises(HyperpushError):
            run(AVERAGE, is_small, hp.Threads(deadline=0.5))
