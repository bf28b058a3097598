"""A hyper-gradient and a whole bilevel run give the same numbers on every engine."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

import hyperpush as hp
from hyperpush.problems.logistic import logistic

RUNS = {
    "shard-2": partial(hp.shard.run, devices=jax.devices()[:2]),
    "shard-4": partial(hp.shard.run, devices=jax.devices()[:4]),
    "peer": hp.peer.run,
    "batched": partial(hp.simulate.run, batch=2),
}
NETWORK = hp.networks.RandomDirected(5)
KEY = jax.random.key(4)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_hgp(run):
    made = logistic(5, 2, examples=12)
    params = made.params + np.linspace(-0.5, 0.5, 6, dtype=np.float32)
    estimator = hp.HGP(12, 3, 1.0, batch=5, keep_mass=True)
    arguments = (made.problem, estimator, NETWORK, params, *made[2:], KEY)
    record = {"HGP": value}
    truth, found = hp.hypergradient(*arguments, record=record), hp.hypergradient(*arguments, run=run, record=record)
    assert np.linalg.norm(truth.value) > 0.1
    np.testing.assert_allclose(found.value, truth.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.history["HGP"], truth.history["HGP"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.history["HGP"][-1], found.value, rtol=1e-6)
    assert (found.rounds, found.floats, found.step) == (truth.rounds, truth.floats, truth.step)


def value(state, ctx):
    return state.value


def test_solve_on_peers():
    made = logistic(5, 2, examples=12, log_rates=True)

    def solve(run):
        return hp.solve(
            made.problem,
            NETWORK,
            inner=hp.SGP(3, 0.5, batch=5),
            hypergradient=hp.HGP(2, 2, 1.0),
            outer=optax.adam(0.1),
            outer_steps=2,
            params=made.params,
            hypers=made.hypers,
            inner_data=made.inner_data,
            outer_data=made.outer_data,
            key=KEY,
            run=run,
        )

    truth, found = solve(hp.simulate.run), solve(hp.peer.run)
    assert np.abs(truth.hypers - made.hypers).max() > 0.05
    for name in ("params", "hypers", "outer_costs", "hypergradients"):
        np.testing.assert_allclose(getattr(found, name), getattr(truth, name), rtol=1e-4, atol=1e-5, err_msg=name)
    assert (found.rounds, found.floats) == (truth.rounds, truth.floats)
