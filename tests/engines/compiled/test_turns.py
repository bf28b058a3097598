"""Clients with large arrays run one after the other by default: the same numbers with less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled import compile as compiling
from hyperpush.engines.compiled import effort
from hyperpush.engines.compiled.effort import HEAVY

CLIENTS, EXAMPLES, INPUTS = 6, 8, 3
NETWORK = hp.networks.Ring(CLIENTS)


def loss(x, hyper, batch):
    inputs, targets = batch
    return jnp.sum(jnp.tanh(inputs @ x["first"]) * x["last"], axis=-1) - targets + jnp.exp(hyper)


def squared(x, hyper, batch):
    return loss(x, hyper, batch) ** 2


def make_task(units, examples=EXAMPLES):
    keys = jax.random.split(jax.random.key(0), 4)
    data = (jax.random.normal(keys[0], (CLIENTS, examples, INPUTS)), jax.random.normal(keys[1], (CLIENTS, examples)))
    x = {"first": jax.random.normal(keys[2], (INPUTS, units)), "last": jax.random.normal(keys[3], (units,)) / units}
    return hp.Task(inner=squared, outer=squared, params=x, hypers=0.0, train=data, validation=data)


def train(task, clients_per_batch=None):
    compiling.clear()
    with compiling.counting() as counts:
        engine = hp.Simulate(clients_per_batch=clients_per_batch, compile_fully=True)
        trained = hp.train(task, hp.SGP(3, 0.01), NETWORK, key=0, engine=engine, certify=False)
    return trained.params, counts


def test_large_activations_exist_once_by_default(monkeypatch):
    task = make_task(HEAVY // (4 * EXAMPLES) + 1)
    chosen, counts = train(task)
    assert counts == train(task, 1)[1]
    monkeypatch.setattr(effort, "HEAVY", 1 << 40)
    together, others = train(task)
    assert counts.peak < 0.7 * others.peak
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7), chosen, together)


@pytest.mark.parametrize(
    ("units", "examples"), [(8, EXAMPLES), (2, HEAVY // 8)], ids=["small", "more data than anything computed"]
)
def test_other_clients_are_computed_all_at_once(monkeypatch, units, examples):
    task = make_task(units, examples)
    counts, in_turn = train(task)[1], train(task, 1)[1]
    monkeypatch.setattr(effort, "HEAVY", 1 << 40)
    assert counts == train(task)[1] != in_turn
