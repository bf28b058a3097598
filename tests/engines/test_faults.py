from functools import cache

import jax
import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.engines.faults import Faults

FAULTS = Faults(loss=0.3, duplicate=0.1, delay=5)
CLIENTS = 20
STEPS = 200


@cache
def many():
    """Return the fates of all messages over many steps: arrays of shape (steps, sender, receiver, copy)."""
    key = jax.random.key(1)
    all_pairs = jax.jit(jax.vmap(lambda step, sender: FAULTS.fates(key, step, sender, CLIENTS)))
    both = all_pairs(*map(np.ravel, np.indices((STEPS, CLIENTS))))
    return tuple(np.asarray(part).reshape(STEPS, CLIENTS, CLIENTS, 2) for part in both)


def test_rates():
    arrives, delays = many()
    count = arrives[..., 0].size
    first, second = arrives[..., 0].mean(), arrives[..., 1].mean()
    assert abs(first - 0.7) < 5 * np.sqrt(0.7 * 0.3 / count)
    assert abs(second - 0.07) < 5 * np.sqrt(0.07 * 0.93 / count)
    assert abs((arrives[..., 0] & arrives[..., 1]).mean() - 0.7 * 0.07) < 5 * np.sqrt(0.05 / count)
    assert (delays.min(), delays.max()) == (0, 5)
    shares = np.bincount(delays.ravel()) / delays.size
    assert np.abs(shares - 1 / 6).max() < 5 * np.sqrt(1 / 6 * 5 / 6 / delays.size)


def test_fates_are_independent_between_steps_senders_receivers_and_copies():
    _, delays = many()
    for axis in range(4):
        shifted = np.roll(delays, 1, axis)
        correlation = np.corrcoef(delays.ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(delays.size / 2)


def test_same_numbers_alone_jitted_mapped_and_with_64_bits():
    key = jax.random.key(1)
    arrives, delays = many()
    jitted = jax.jit(lambda step, sender: FAULTS.fates(key, step, sender, CLIENTS))
    for step, sender in ((0, 0), (3, 17), (9, 4)):
        with jax.enable_x64(True):
            wide = jitted(step, sender)
        for one in (FAULTS.fates(key, step, sender, CLIENTS), jitted(step, sender), wide):
            np.testing.assert_array_equal(one[0], arrives[step, sender])
            np.testing.assert_array_equal(one[1], delays[step, sender])


def test_a_perfect_network_and_a_repeating_one():
    for step in range(20):
        arrives, delays = map(np.asarray, Faults().fates(jax.random.key(1), step, 3, CLIENTS))
        assert arrives[:, 0].all()
        assert not arrives[:, 1].any()
        assert not delays.any()
        assert np.asarray(Faults(duplicate=1).fates(jax.random.key(1), step, 3, CLIENTS)[0]).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss", -0.1), ("loss", 1.0), ("loss", np.nan), ("duplicate", -0.1), ("duplicate", 1.1), ("delay", -1)],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(InvalidInput, match=f"faults.{field}"):
        Faults(**{field: value})
