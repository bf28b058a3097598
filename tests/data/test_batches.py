"""Mini-batches are uniform sets of distinct examples, and drawing one does not read all rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush.data.batches import MOST_DRAWN, Batch, Ragged, minibatch


def draws(data, size, times):
    keys = jax.random.split(jax.random.key(0), times)
    return jax.jit(jax.vmap(lambda key: minibatch(data, size, key)))(keys)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("count", "size"), [(5, 3), (6, 5), (4, 1)])
def test_every_set_of_examples_is_equally_likely(count, size, padding):
    numbers, times = jnp.arange(count + padding), 20_000
    drawn = draws(Ragged(numbers, jnp.asarray(count)) if padding else numbers, size, times)
    if isinstance(drawn, Batch):
        assert np.all(np.asarray(drawn.mask) == 1)
        drawn = drawn.examples
    every = list(itertools.combinations(range(count), size))
    seen = [tuple(row) for row in np.sort(np.asarray(drawn), axis=1).tolist()]
    share = 1 / len(every)
    found = np.array([seen.count(each) for each in every])
    assert found.sum() == times  # all draws are sets of distinct examples
    assert np.all(np.abs(found / times - share) < 5 * np.sqrt(share * (1 - share) / times))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_client_with_at_most_as_many_examples_gives_all_of_them(count):
    batch = draws(Ragged(jnp.arange(8), jnp.asarray(count)), 4, 3)
    assert np.asarray(batch.mask).tolist() == 3 * [[1.0] * count + [0.0] * (4 - count)]
    np.testing.assert_array_equal(np.asarray(batch.examples)[:, :count], np.tile(np.arange(count), (3, 1)))


def test_a_draw_does_not_depend_on_padding():
    first, second = (draws(Ragged(jnp.arange(7 + more), jnp.asarray(7)), 3, 50).examples for more in (0, 9))
    np.testing.assert_array_equal(first, second)


def test_only_the_drawn_rows_are_worked_on():
    rows = 5000
    trace = jax.make_jaxpr(lambda data, key: minibatch(data, 4, key))(jnp.zeros((rows, 2)), jax.random.key(0))
    assert all(rows not in var.aval.shape for eqn in trace.eqns for var in eqn.outvars)


def test_large_batches_are_distinct_too():
    drawn = np.asarray(minibatch(jnp.arange(2 * MOST_DRAWN), MOST_DRAWN + 1, jax.random.key(0)))
    assert len(set(drawn.tolist())) == MOST_DRAWN + 1
