"""A function applied row by row equals the same function applied to all rows at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled.map_clients import map_clients

ROWS = 5


def rows(*shape):
    return jnp.arange(ROWS * int(np.prod(shape)), dtype=jnp.float32).reshape(ROWS, *shape)


STATES = {"a": rows(3), "b": 10 * rows(3), "count": jnp.arange(ROWS), "none": jnp.zeros((ROWS, 0))}
OTHERS = (rows(2), jax.random.split(jax.random.key(0), ROWS))


def update(state, other):
    return {**state, "a": state["a"] * 2 + other[0].sum(), "count": state["count"] + 1}


def swap(state, other):  # unchanged inputs move to other outputs, and overwritten inputs are still needed
    return {**state, "a": state["b"], "b": state["a"] + 1}


def retype(state, other):
    return {**state, "count": state["count"] / 2, "b": jnp.ones(())}


def message(state, other):
    return state["a"], jax.random.normal(other[1], (2,)), other[1], jnp.float32(3)


@pytest.mark.parametrize("batch", [1, 2, 5, 7])
@pytest.mark.parametrize("f", [update, swap, retype, message, lambda state, other: state])
def test_equals_all_at_once(f, batch):
    expected, found = jax.vmap(f)(STATES, OTHERS), jax.jit(lambda s, o: map_clients(f, s, o, batch))(STATES, OTHERS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (mine.shape, mine.dtype) == (right.shape, right.dtype)
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, right = jax.random.key_data(mine), jax.random.key_data(right)
        np.testing.assert_array_equal(mine, right)


def test_a_loop_over_rounds_holds_a_state_once():
    size = 1 << 16

    def turn(state, other):  # each row needs the other's row before the update
        return {"a": jnp.sin(state["a"]) + state["b"] * other, "b": state["a"] - state["b"], "x": state["x"]}

    def run(a, b, x):
        held = {"a": a, "b": b, "x": x}
        held = jax.lax.fori_loop(0, 3, lambda _, states: map_clients(turn, states, x[:, 0], 1), held)
        return held["a"], held["b"]

    arrays = [jnp.ones((16, size)) for _ in range(3)]
    used = jax.jit(run, donate_argnums=(0, 1)).lower(*arrays).compile().memory_analysis()
    assert used is not None
    assert used.temp_size_in_bytes < 16 * size * 4 // 2


@pytest.mark.long
def test_the_inner_residual_is_that_of_all_clients_at_once():
    task, network, method = hp.tasks.quadratic(3, 0), hp.networks.Ring(3), hp.HGP(2, 1, 0.1)
    one, all_at_once = (
        hp.hypergradient(task, method, network, key=0, engine=hp.Simulate(clients_per_batch=batch)).status.residual
        for batch in (1, None)
    )
    assert one is not None
    assert all_at_once is not None
    assert all_at_once > 0.01
    assert one == pytest.approx(all_at_once, rel=1e-5)
