"""The peers of one process compute one after the other, because XLA's thread pool can starve otherwise."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import hyperpush as hp
from hyperpush.programs import Local, Repeat, Sequence

CLIENTS = 6


def test_one_peer_computes_at_a_time_and_stacked_linear_algebra_ends():
    lock, inside, most = threading.Lock(), 0, 0

    def count(value):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.003)  # long enough for other peers to enter if they may
        with lock:
            inside -= 1
        return value

    def step(state, ctx):
        values, vectors = jnp.linalg.eigh(state)
        whole = jnp.einsum("kij,kj,klj->kil", vectors, values, vectors)
        return jax.pure_callback(count, jax.ShapeDtypeStruct(state.shape, state.dtype), whole)

    half = np.random.default_rng(0).normal(size=(CLIENTS, 16, 8, 8)).astype(np.float32)
    start = half + np.swapaxes(half, -1, -2)
    program = Sequence(Repeat(Local(step), 5, name="loop"))
    data, network = np.zeros((CLIENTS, 1), np.float32), hp.networks.Ring(CLIENTS)
    found = hp.Threads().run(program, network, jnp.asarray(start), jnp.asarray(data), jax.random.key(0))
    np.testing.assert_allclose(found.states, start, atol=1e-4)
    assert most == 1
