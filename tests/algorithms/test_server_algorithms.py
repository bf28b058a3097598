"""Algorithms with a server or on one machine, on heterogeneous quadratics: equations and fixed points."""

import math
from functools import partial

import jax
import numpy as np
import pytest
import scipy.stats
from sampled import PROBLEM, distance, recorded, sampled, series
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.algorithms.pooled import PooledState, pooled_hypergradient
from hyperpush.base.schedules import Power
from hyperpush.methods.registry import registered

pytestmark = pytest.mark.usefixtures("float64")

N = 5
NETWORK = hp.networks.DirectedRing(N)  # averages are exact with a server, whatever the links
FEW = hp.algorithms.Neumann(6, 0.3)
ALL = hp.algorithms.Neumann(6, 0.3, random=False)


@pytest.fixture(scope="module")
def made():
    with jax.enable_x64(True):
        return sampled(N, 3)


def spread(values):
    """Return the mean of the values, repeated for every client."""
    return np.broadcast_to(values.mean(0), values.shape)


# ------------------------------------------------------------- all examples


def bsa(o, x, y, T):
    x, y = spread(x), spread(y)
    first = y
    for k in range(T):
        y = first
        for t in range(math.ceil(3 * (k + 1) ** 0.5)):
            y = y - 0.3 / (t + 1) ** 0.05 * spread(o.inner(x, y))
        x = x - 0.2 * spread(o.common(x, y))
        yield x, y


def ttsa(o, x, y, T):
    x, y, inverse = spread(x), spread(y), series(o.H.mean(0), ALL.terms, ALL.step_size)
    for k in range(T):
        y = y - 0.3 * spread(o.inner(x, y))
        x = x - 0.25 / (k + 1) ** 0.1 * spread(o.common(x, y, inverse))
        yield x, y


def fednest(o, x, y, T):
    x, y = spread(x), spread(y)
    for _ in range(T):
        for _ in range(2):
            pull, z = spread(o.inner(x, y)), y
            for _ in range(3):
                z = z - 0.1 * (o.inner(x, z) - o.inner(x, y) + pull)
            y = spread(z)
        pull, z = spread(o.common(x, y)), x
        for _ in range(2):
            z = z - 0.1 * (o.outer(z, y)[1] - o.outer(x, y)[1] + pull)
        x = spread(z)
        yield x, y


def fedbio(o, x, y, T):
    x = spread(x)
    for _ in range(T):
        x, y = spread(x - 0.2 * o.own(x, y)), y - 0.2 * o.inner(x, y)
        yield x, y


def fedbio_acc(o, x, y, T, local=2, forget=0.3):
    x = spread(x)
    above, below = spread(o.own(x, y)), o.inner(x, y)
    for t in range(local * T):
        old = o.own(x, y), o.inner(x, y)
        last = t % local == local - 1
        x, y = x - 0.1 * above, y - 0.2 * below
        x = spread(x) if last else x
        above = o.own(x, y) + (1 - forget / (t + 1)) * (above - old[0])
        below = o.inner(x, y) + (1 - forget / (t + 1)) * (below - old[1])
        above = spread(above) if last else above
        if last:
            yield x, y


METHODS = {
    "BSA": (hp.algorithms.BSA(70, 0.2, Power(0.3, 0.05), inner_steps=3, restart=True), bsa),
    "TTSA": (hp.algorithms.TTSA(250, Power(0.25, 0.1), 0.3, inverse=ALL), ttsa),
    "FedNest": (hp.algorithms.FedNest(150, 0.1, 0.1, inner_rounds=2, inner_steps=3, outer_steps=2), fednest),
    "FedBiO": (hp.algorithms.FedBiO(400, 0.2, 0.2), fedbio),
    "FedBiOAcc": (hp.algorithms.FedBiOAcc(400, 0.1, 0.2, 2, forget=Power(0.3, 1)), fedbio_acc),
}


@pytest.mark.parametrize("name", METHODS)
def test_follows_its_equations_to_its_own_end(made, name):
    algorithm, oracle = METHODS[name]
    found = recorded(made, algorithm, NETWORK)
    params, hypers = (np.asarray(part) for part in made.start[:2])
    expected = zip(*oracle(made.slopes, hypers, params, 30), strict=True)
    for seen, steps in zip(found.history, expected, strict=True):
        np.testing.assert_allclose(seen[:30], steps, rtol=1e-7, atol=1e-9)
    aim = registered("algorithms")[name].info.fixed_point
    end = made.ends[aim]
    if name == "TTSA":  # TTSA truncates its series after few terms
        inverse = series(made.slopes.H.mean(0), ALL.terms, ALL.step_size)
        end = made.slopes.end(partial(made.slopes.common, inverse=inverse), True)
        assert distance(end[None], made.ends["x_G"], hypers) < 0.1
    # BSA starts its inner iteration anew in each step
    assert distance(found.hypers, end, hypers) < (1e-4 if name == "BSA" else 1e-6)
    assert (distance(found.hypers, made.ends["x_G"], hypers) > 0.05) == (
        registered("algorithms")[name].info.fixed_point != "x_G"
    )


def test_local_steps_leave_an_error_of_their_size(made):
    steps = 0.02 / 2.0 ** np.arange(3)

    @jax.jit
    @jax.vmap
    def run(step):
        algorithm = hp.algorithms.FedBiO(1500, lambda t: step, 0.2, local_steps=3)
        states = hp.algorithms.BilevelState(*made.start[:2])
        found, _ = hp.extend.evaluate(
            algorithm.program(PROBLEM), NETWORK, states, hp.extend.Data.pair(*made.start[2:]), jax.random.key(0)
        )
        return found.hyper

    errors = np.linalg.norm(np.asarray(run(steps))[:, 0] - made.ends["x_L"], axis=-1)
    np.testing.assert_allclose(errors[:-1] / errors[1:], 2, rtol=0.15)


# -------------------------------------------------------------- mini-batches


def test_all_take_one_random_term_of_the_series():
    """The server draws one term of the series uniformly; peers draw the same term."""
    made = sampled(2, 3)
    params, hypers, first, second = made.start
    program, network = pooled_hypergradient(PROBLEM, FEW, None), hp.networks.Ring(2)
    states, data = PooledState(params + 1, hypers, hypers), hp.extend.Data.pair(first, second)
    keys = jax.random.split(jax.random.key(5), 300)

    @jax.jit
    @jax.vmap
    def run(key):
        return hp.extend.evaluate(program, network, states, data, key)[0].value

    o, eye = made.slopes, np.eye(params.shape[1])
    terms = [np.linalg.matrix_power(eye - FEW.step_size * o.H.mean(0), p) for p in range(FEW.terms)]
    x, y = np.asarray(hypers), np.asarray(states.params)
    possible = np.stack([o.common(x, y, FEW.terms * FEW.step_size * term) for term in terms])
    drawn = np.asarray(run(keys))
    apart = np.abs(drawn[:, None] - possible).max((-1, -2))
    assert apart.min(1).max() < 1e-9
    counts = np.bincount(apart.argmin(1), minlength=FEW.terms)
    assert np.sum((counts - 50) ** 2 / 50) < scipy.stats.chi2(FEW.terms - 1).ppf(1 - 1e-5)
    np.testing.assert_allclose(
        hp.Threads().run(program, network, states, data, keys[0]).states.value, drawn[0], rtol=1e-5
    )


def test_falling_steps_wear_noise_away(made):
    o, algorithm = made.slopes, hp.algorithms.FedNest(400, Power(0.3, 0.6), 0.1, 1, 3, 2, inverse=FEW, batch_size=2)
    end = o.end(partial(o.common, inverse=series(o.H.mean(0), FEW.terms, FEW.step_size)), True)
    program, states = algorithm.program(PROBLEM), hp.algorithms.BilevelState(*made.start[:2])

    @jax.jit
    @jax.vmap
    def run(key):
        return hp.extend.evaluate(program, NETWORK, states, hp.extend.Data.pair(*made.start[2:]), key)[0].hyper

    ended = np.asarray(run(jax.random.split(jax.random.key(4), 4)))
    start = np.linalg.norm(np.asarray(made.start[1]) - end, axis=-1).max()
    assert np.sqrt(np.mean(np.sum((ended - end) ** 2, axis=-1))) < 0.025 * start
    assert np.ptp(ended, axis=0).min() > 1e-6  # the runs differ by their noise


# -------------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("make", "field", "allowed"),
    [
        (lambda: hp.algorithms.BSA(1, 0.1, 0.1, growth=2), "BSA.growth", "0 to 1"),
        (lambda: hp.algorithms.FedBiOAcc(1, 0.1, 0.1, forget=1.5), "FedBiOAcc.forget", "at most 1"),
        (lambda: hp.algorithms.FedBiOAcc(1, 0.1, 0.1, forget=0.0), "FedBiOAcc.forget", "above 0"),
    ],
)
def test_refuses_options(make, field, allowed):
    with pytest.raises(hp.InvalidInput) as error:
        make()
    assert error.value.field == field
    assert allowed in error.value.allowed
