"""A hyper-gradient and a whole bilevel run give the same numbers on every engine."""

import jax
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.algorithms.base import LOOP, BilevelState
from hyperpush.programs import program_of
from hyperpush.tasks.logistic import logistic

ENGINES = {
    "shard-2": hp.Shard(2),
    "shard-4": hp.Shard(4),
    "threads": hp.Threads(),
    "batched": hp.Simulate(clients_per_batch=2),
}
NETWORK = hp.networks.RandomDirected(5)


def value(state, ctx):
    return state.value


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_hgp(engine):
    made = logistic(5, 2, examples=12)
    made = made.at(params=made.params + np.linspace(-0.5, 0.5, 6, dtype=np.float32))
    estimator = hp.HGP(12, 3, 1.0, batch_size=5, keep_mass=True)
    truth, found = (
        hp.hypergradient(made, estimator, NETWORK, key=4, record={"HGP": value}, engine=each)
        for each in (hp.Simulate(), engine)
    )
    assert np.linalg.norm(truth.value) > 0.1
    np.testing.assert_allclose(found.value, truth.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.history["HGP"], truth.history["HGP"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.history["HGP"][-1], found.value, rtol=1e-6)
    assert found.costs == truth.costs
    assert found.task.point is not None
    assert truth.task.point is not None
    assert found.task.point.step == truth.task.point.step


def test_solve_on_peers():
    made = logistic(5, 2, examples=12, log_rates=True)
    method = hp.PDBO(
        inner=hp.SGP(3, 0.5, batch_size=5),
        hypergradient=hp.HGP(2, 2, 1.0),
        outer=hp.optimizer("adam", learning_rate=0.1),
        steps=2,
    )

    def solve(engine):
        found = hp.solve(made, method, NETWORK, key=4, engine=engine)
        states = BilevelState(made.params, made.hypers)
        program = program_of(method, made.problem)
        record = {LOOP: lambda state, ctx: state.hypergradient}
        run = engine.run(program, NETWORK, states, made.data, jax.random.key(4), record=record)
        numbers = {
            "params": found.params,
            "hypers": found.hypers,
            "costs": found.history.cost,
            "norms": found.history.hypergradient_norm,
            "hypergradients": run.history[LOOP],
        }
        return numbers, found

    (truth, one), (found, other) = solve(hp.Simulate()), solve(hp.Threads())
    assert np.abs(truth["hypers"] - made.hypers).max() > 0.05
    for name, values in truth.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert other.costs == one.costs
