"""Algorithms over a network that use local hypergradients, on heterogeneous quadratics: equations and fixed points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import PROBLEM, distance, recorded, sampled, series, task_of
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.base.schedules import Power
from hyperpush.methods.registry import registered
from hyperpush.networks import matrix

pytestmark = pytest.mark.usefixtures("float64")

N = 5
RING = hp.networks.Ring(N)
W = sum(np.roll(np.eye(N), shift, 1) for shift in (-1, 0, 1)) / 3  # Metropolis weights on this graph
FEW = hp.algorithms.Neumann(5, 0.15)


@pytest.fixture(scope="module")
def made():
    with jax.enable_x64(True):
        return sampled(N, 3)


# ------------------------------------------------------------- all examples


def interact(o, x, y, W, T):
    h, u = o.own(x, y), o.own(x, y)
    for _ in range(T):
        x, y, u = W @ x - 0.05 * u, y - 0.15 * o.inner(x, y), W @ u
        new = o.own(x, y)
        u, h = u + new - h, new
        yield x, y


def spdb(o, x, y, W, T):
    d = np.zeros_like(x)
    for t in range(T):
        y = y - 0.2 * o.inner(x, y)
        x = x - 0.2 / (t + 1) ** 0.1 * (o.own(x, y) + d + 0.8 * (x - W @ x))
        d = d + 0.8 * (x - W @ x)
        yield x, y


def mdbo(o, x, y, W, T, recursive=False):
    a, b = o.own(x, y), o.inner(x, y)
    s, r = a, b
    for _ in range(T):
        eta, before = 0.7, (o.own(x, y), o.inner(x, y))
        x, y = x + eta * (W @ x - 0.05 * s - x), y + eta * (W @ y - 0.1 * r - y)
        now = o.own(x, y), o.inner(x, y)
        if recursive:
            c, d = now[0] + (1 - 0.9 * eta**2) * (a - before[0]), now[1] + (1 - 0.8 * eta**2) * (b - before[1])
        else:
            c, d = (1 - 0.9 * eta) * a + 0.9 * eta * now[0], (1 - 0.8 * eta) * b + 0.8 * eta * now[1]
        s, r = W @ s + c - a, W @ r + d - b
        a, b = c, d
        yield x, y


def vrdbo(o, x, y, W, T):
    return mdbo(o, x, y, W, T, recursive=True)


RANDOM = hp.networks.StaticUndirected(N, probability=0.5, seed=2)
METHODS = {
    "INTERACT": (hp.algorithms.INTERACT(450, 0.05, 0.15), interact, RING, 6),
    "SVRINTERACT": (hp.algorithms.SVRINTERACT(450, 0.05, 0.15, period=7), interact, RING, 6),
    "SPDB": (hp.algorithms.SPDB(800, Power(0.2, 0.1), 0.2, penalty=0.8), spdb, RING, 3),
    "MDBO": (hp.algorithms.MDBO(500, 0.05, 0.1, 0.7, 0.9, 0.8), mdbo, RANDOM, 14),
    "VRDBO": (hp.algorithms.VRDBO(500, 0.05, 0.1, 0.7, 0.9, 0.8), vrdbo, RANDOM, 14),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.long
def test_follows_its_equations_to_its_own_end(made, name):
    algorithm, oracle, network, floats = METHODS[name]
    found = recorded(made, algorithm, network)
    weights = np.asarray(matrix(network, jax.random.key(0), jnp.zeros((), int), "gossip"))
    if network is RING:
        np.testing.assert_allclose(weights, W, atol=1e-12)
    params, hypers = (np.asarray(part) for part in made.start[:2])
    expected = zip(*oracle(made.slopes, hypers, params, weights, 40), strict=True)
    for seen, steps in zip(found.history, expected, strict=True):
        np.testing.assert_allclose(seen[:40], steps, rtol=1e-7, atol=1e-9)
    end = registered("algorithms")[name].info.fixed_point
    assert distance(found.hypers, made.ends[end], hypers) < 1e-6
    assert distance(found.hypers, made.ends["x_G"], hypers) > 0.05
    assert (found.rounds, found.floats) == (algorithm.steps, algorithm.steps * floats)


def test_the_ends_are_zeros_of_the_mean_gradient(made):
    o = made.slopes
    for name, gradient, common in (("x_L", o.own, False), ("x_M", o.own, True), ("x_G", o.common, True)):
        np.testing.assert_allclose(o.end(gradient, common), made.ends[name], atol=1e-12)


# -------------------------------------------------------------- mini-batches


def test_own_hypergradient_is_unbiased(made):
    sampling = hp.algorithms.SPDB(1, 0.1, 0.1, inverse=FEW, batch_size=2)
    params, hypers, first, second = made.start
    params = params + 1
    at, hyper, data = jax.tree.map(lambda leaf: leaf[1], (params, hypers, hp.extend.Data.pair(first, second)))

    @jax.jit
    def estimates(keys):
        def estimate(key):
            ctx = hp.programs.Context(jnp.int32(1), N, jnp.int32(0), key, data)
            return sampling.own_hypergradient(PROBLEM, at, hyper, ctx)

        return jax.vmap(estimate)(keys)

    drawn = np.asarray(estimates(jax.random.split(jax.random.key(3), 10_000)))
    o = made.slopes
    truth = o.through(np.asarray(hypers), np.asarray(params), series(o.H, FEW.terms, FEW.step_size))[1]
    error = drawn.std(0) / np.sqrt(len(drawn))
    assert np.all(np.abs(drawn.mean(0) - truth) < 4.5 * error)
    assert error.max() < 0.04 * np.abs(truth).max()


def over_seeds(algorithm, made, network=RING):
    """Return the hypers at the end of four runs with different seeds."""
    program, states = algorithm.program(PROBLEM), hp.algorithms.BilevelState(*made.start[:2])

    @jax.jit
    def run(keys):
        return jax.vmap(
            lambda key: hp.extend.evaluate(program, network, states, hp.extend.Data.pair(*made.start[2:]), key)[0].hyper
        )(keys)

    return np.asarray(run(jax.random.split(jax.random.key(4), 4)))


def test_corrections_on_batches_leave_no_noise(made):
    """With constant steps, SVR-INTERACT's corrections vanish with its steps, so every run ends at the same point."""
    o = made.slopes
    inverses = series(o.H, FEW.terms, FEW.step_size)
    end = o.end(lambda x, y: o.through(x, y, inverses), common_solution=False)
    ended = over_seeds(hp.algorithms.SVRINTERACT(300, 0.05, 0.15, 6, inverse=FEW, batch_size=2), made)
    assert distance(ended, end, np.asarray(made.start[1])) < 1e-6


def test_falling_steps_wear_noise_away(made):
    o = made.slopes
    inverses = series(o.H, FEW.terms, FEW.step_size)
    end = o.end(lambda x, y: o.through(x, y, inverses), common_solution=True)
    ended = over_seeds(hp.algorithms.VRDBO(800, 0.08, 0.1, Power(0.7, 0.4), 0.9, 0.9, inverse=FEW, batch_size=2), made)
    start = np.linalg.norm(np.asarray(made.start[1]) - end, axis=-1).max()
    assert np.sqrt(np.mean(np.sum((ended - end) ** 2, axis=-1))) < 0.01 * start
    assert np.ptp(ended, axis=0).min() > 1e-6  # the runs differ by their noise


# -------------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("make", "field", "allowed"),
    [
        (lambda: hp.algorithms.SPDB(1, 0.1, 0.1, batch_size=2), "SPDB.batch_size", "Neumann"),
        (lambda: hp.algorithms.MDBO(1, 0.1, 0.1, 0.5, outer_momentum=3), "MDBO.outer_momentum", "at most 1"),
        (
            lambda: hp.algorithms.VRDBO(1, 0.1, 0.1, Power(0.5, 0.5), inner_momentum=5),
            "VRDBO.inner_momentum",
            "at most 1",
        ),
        (lambda: hp.algorithms.Neumann(0, 0.1), "Neumann.terms", "from 1"),
        (lambda: hp.algorithms.Neumann(3, -0.1), "Neumann.step_size", "above 0"),
        (lambda: hp.algorithms.ConjugateGradients(0), "ConjugateGradients.steps", "from 1"),
    ],
)
def test_refuses_options(make, field, allowed):
    with pytest.raises(hp.InvalidInput) as error:
        make()
    assert error.value.field == field
    assert allowed in error.value.allowed


@pytest.mark.parametrize(
    "algorithm",
    [
        hp.algorithms.SPDB(1, 0.1, 0.1, inverse=FEW, batch_size=2),
        hp.algorithms.SVRINTERACT(1, 0.1, 0.1, 2, inverse=FEW, batch_size=2),
        hp.algorithms.MDBO(1, 0.1, 0.1, inverse=FEW, batch_size=2),
        hp.algorithms.FedBiO(1, 0.1, 0.1, inverse=FEW, batch_size=2),
        hp.algorithms.TTSA(1, 0.1, 0.1, inverse=FEW, batch_size=2),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_refuses_batches_of_data_without_examples(made, algorithm):
    params, hypers, first, second = made.start
    uneven = {**first, "linear": first["linear"][:, :3]}
    with pytest.raises(hp.InvalidInput, match="batch"):
        hp.solve(task_of(params, hypers, uneven, second), algorithm, RING, key=0)
