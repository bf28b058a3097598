"""Counts of compiled runs compared with Python's integers, far beyond 32 bits."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled.interpreter import Clock
from hyperpush.engines.compiled.tally import Tally, from_words
from hyperpush.networks.trees import Trip
from hyperpush.programs import Average, Repeat
from hyperpush.programs.profile import profile

PLACE = (0,)
MEAN = Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean, rounds=1, by="tree")


def test_tallies_add_like_integers():
    numbers = np.random.default_rng(0).integers(0, 1 << 31, (40, 3))
    found = Tally.start(3, value=(1 << 32) - 5)
    for each in numbers:
        found = found.plus(jnp.asarray(each, jnp.int32))
    np.testing.assert_array_equal(found.numbers(), (1 << 32) - 5 + numbers.sum(0))
    assert int(Tally.start(value=7 << 30).plus_sum(jnp.full(40, (1 << 31) - 1)).numbers()) == (7 << 30) + 40 * (
        2**31 - 1
    )
    assert Tally.start(2, value=1 << 32).positive().tolist() == [True, True]
    assert not Tally.start().positive()


def test_a_clock_counts_long_trips_and_rows_keep_them():
    unused: Any = None
    trip = Trip(jnp.int32(1 << 30), unused, unused, jnp.full(5, 1 << 30, jnp.int32), unused, jnp.ones((), bool))
    clock = Clock.start([PLACE], [PLACE], 3)
    for _ in range(6):
        clock = clock.after_trip(PLACE, trip).add_passes(PLACE, 1 << 30)
    words = np.asarray(clock.row())
    assert from_words(words[::2], words[1::2]).tolist() == [3 + (6 << 30), 30 << 30]
    assert (clock.now(), int(clock.passes[PLACE].numbers())) == (3 + (6 << 30), 6 << 30)
    # Networks see only the lowest 32 bits of the time.
    assert int(clock.step) == -(1 << 31) + 3


@pytest.mark.long
def test_a_million_averages_of_a_thousand_clients():
    """On a directed ring, n − 1 partial sums reach the root one after the other, then n − 1 means reach the others."""
    n, times = 1024, 1_100_000
    start, nothing, record = jnp.ones(n), jnp.zeros((n, 1)), {"means": lambda x, ctx: x[None][:0]}
    program, network = Repeat(MEAN, times, name="means"), hp.networks.DirectedRing(n)
    found = hp.Simulate().run(program, network, start, nothing, jax.random.key(0), record=record, every=times)
    messages = 2 * (n - 1) * times
    assert (found.rounds, found.step, found.floats) == (messages, messages, round(messages / n))
    assert found.bytes.sum() == 4 * messages
    clock = found.clocks["means"]
    assert (clock.rounds.tolist(), clock.floats.tolist()) == ([messages], [round(messages / n)])


def test_floats_along_trees_are_means_rounded_to_even():
    n, found = 4, profile(MEAN, jnp.zeros(()), jnp.zeros(1), 4)
    messages = np.array([0, 1, 2, 3, 5, 6, 7, 9, 10, 14, (1 << 60) + 2, (1 << 60) + 6])
    floats = found.floats({found.sendings[0].path: messages}, n)
    np.testing.assert_array_equal(floats, [round(Fraction(int(each), n)) for each in messages])
