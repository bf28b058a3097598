"""DSBO-JHIP, MA-DSBO and GBDSBO on heterogeneous quadratics: their equations and fixed points in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import Slopes, sampled, task_of
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush import networks
from hyperpush.base.schedules import StepSize
from hyperpush.tasks.quadratic import outer_fixed_points, quadratic

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, ROUNDS = 5, 2
PLATEAUS = ((0.1, 300), (0.03, 1000), (0.01, 2500))
# A ring of five with Metropolis weights.
W = sum(np.roll(np.eye(CLIENTS), shift, 1) for shift in (-1, 0, 1)) / 3


def plateaus(t):
    """Return the step size at iteration t: each step of PLATEAUS for its number of iterations."""
    ends = np.cumsum([count for _, count in PLATEAUS])[:-1]
    return jnp.select([t < end for end in ends], [step for step, _ in PLATEAUS[:-1]], PLATEAUS[-1][0])


@pytest.fixture(scope="module")
def made():
    with jax.enable_x64(True):
        task = quadratic(CLIENTS, 0, common=True)
        task = task.at(hypers=jnp.zeros_like(task.hypers))
        return task, outer_fixed_points(task.train, task.validation)


def run(algorithm, task, every=1):
    """Return the hypers after every `every`-th iteration, and the result of the run."""
    found = hp.solve(task, algorithm, networks.Ring(CLIENTS), key=0, every=every, certify=False)
    np.testing.assert_array_equal(found.history.hypers[0], task.hypers)
    np.testing.assert_array_equal(found.history.hypers[-1], found.hypers)
    return np.asarray(found.history.hypers[1:]), found


def oracle_of(task):
    """Return the derivatives as an oracle in NumPy, and the hypers and params at the start."""
    return Slopes(*jax.tree.map(np.asarray, (task.train, task.validation))), *map(
        np.asarray, (task.hypers, task.params)
    )


def distance(hypers, points, to="x_G"):
    """Return the distance of the farthest client from a point, relative to the norm of x_G."""
    return np.linalg.norm(hypers - points[to], axis=-1).max(-1) / np.linalg.norm(points["x_G"])


def mix(values):
    return np.tensordot(W, values, 1)


def nested(o, x, y, iterations, steps, tracked, theta, solution, residual, hypergradient):
    """Return the hypers after every iteration of a nested algorithm."""
    alpha, beta, gamma = steps
    rounds = 1 if tracked else ROUNDS
    seen, s, r = [], solution, hypergradient(x, y, solution)
    S, p = residual(x, y, s), o.inner(x, y)
    D, d, u, q = S, p, r, r
    for _ in range(iterations):
        for _ in range(rounds):
            if tracked:
                y = mix(y - beta * d)
                new = o.inner(x, y)
                d, p = mix(d) + new - p, new
            else:
                y = mix(y) - beta * o.inner(x, y)
        if not tracked:
            D = S = residual(x, y, s)
        for _ in range(rounds):
            s = mix(s - gamma * D) if tracked else mix(s) - gamma * D
            new = residual(x, y, s)
            D, S = mix(D) + new - S, new
        r = (1 - theta) * r + theta * hypergradient(x, y, s)
        if tracked:
            x = mix(x - alpha * u)
            u, q = mix(u) + r - q, r
        else:
            x = mix(x) - alpha * r
        seen.append(x)
    return np.stack(seen)


def jhip(o, x, y, iterations, steps, tracked):
    def hypergradient(x, y, Z):
        along_y, along_x = o.outer(x, y)
        return along_x - np.einsum("nhd,nd->nh", Z, along_y)

    def residual(x, y, Z):
        return Z @ o.H - o.J

    return nested(o, x, y, iterations, steps, tracked, 1, np.zeros_like(o.J), residual, hypergradient)


def ma_dsbo(o, x, y, iterations, steps, tracked):
    def residual(x, y, z):
        return np.einsum("nij,nj->ni", o.H, z) - o.outer(x, y)[0]

    def hypergradient(x, y, z):
        return o.outer(x, y)[1] - np.einsum("nhd,nd->nh", o.J, z)

    return nested(o, x, y, iterations, steps, tracked, THETA, np.zeros_like(o.b), residual, hypergradient)


def gbdsbo(o, x, y, iterations, steps, tracked):
    alpha, gamma, theta = steps

    def own(x, y):
        along_y, along_x = o.outer(x, y)
        return [along_x, along_y, o.J, o.H, o.inner(x, y)]

    means, seen = own(x, y), []
    old = means
    for _ in range(iterations):
        s, h, U, V, d = means
        along = s - np.einsum("nhd,nd->nh", U, np.linalg.solve(V, h[..., None])[..., 0])
        if tracked:
            x, y = mix(x - alpha * along), mix(y - gamma * d)
        else:
            x, y = mix(x) - alpha * along, mix(y) - gamma * old[4]
        new = own(x, y)
        if tracked:
            means = [mix(m) + a - b for m, a, b in zip(means, new, old, strict=True)]
        else:
            means = [(1 - theta) * mix(m) + theta * a for m, a in zip(means, new, strict=True)]
        old = new
        seen.append(x)
    return np.stack(seen)


STEPS: tuple[StepSize, StepSize, StepSize] = (plateaus, plateaus, plateaus)
ITERATIONS = sum(count for _, count in PLATEAUS)
THETA = 0.4
PUBLISHED = {
    "JHIP": (hp.algorithms.DSBOJHIP(ITERATIONS, *STEPS, ROUNDS, ROUNDS), jhip),
    "MA": (hp.algorithms.MADSBO(ITERATIONS, *STEPS, ROUNDS, ROUNDS, averaging=THETA), ma_dsbo),
    "GB": (hp.algorithms.GBDSBO(ITERATIONS, *STEPS), gbdsbo),
}
TRACKED = {
    "JHIP": (hp.algorithms.DSBOJHIP(500, 0.1, 0.15, 0.2, tracked=True), jhip, (0.1, 0.15, 0.2)),
    "MA": (
        hp.algorithms.MADSBO(500, 0.1, 0.15, 0.2, averaging=THETA, tracked=True),
        ma_dsbo,
        (0.1, 0.15, 0.2),
    ),
    "GB": (hp.algorithms.GBDSBO(500, 0.1, 0.15, tracked=True), gbdsbo, (0.1, 0.15, 0.0)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_follow_their_equations_and_their_error_falls_with_the_step(name, made):
    algorithm, oracle = PUBLISHED[name]
    task, points = made
    seen, _ = run(algorithm, task)
    by_hand = oracle(*oracle_of(task), 4, [PLATEAUS[0][0]] * 3, False)
    np.testing.assert_allclose(seen[:4], by_hand, rtol=1e-9, atol=1e-12)
    ends = np.cumsum([count for _, count in PLATEAUS]) - 1
    errors = distance(seen[ends], points)
    steps = np.array([step for step, _ in PLATEAUS])
    falls = (errors[1:] / errors[:-1]) / (steps[1:] / steps[:-1])
    assert np.all((falls > 0.6) & (falls < 1.4)), errors
    assert errors[-1] < 0.1
    assert distance(seen[-1], points, "x_L") > 1


@pytest.mark.parametrize("name", TRACKED)
def test_tracked_forms_end_at_the_minimizer(name, made):
    algorithm, oracle, steps = TRACKED[name]
    task, points = made
    seen, found = run(algorithm, task)
    by_hand = oracle(*oracle_of(task), 4, steps, True)
    np.testing.assert_allclose(seen[:4], by_hand, rtol=1e-9, atol=1e-12)
    assert distance(found.hypers, points) < 1e-6
    assert distance(found.hypers, points, "x_L") > 1
    # The params are the solution for these hypers.
    o = oracle_of(task)[0]
    common = np.linalg.solve(o.H.mean(0), o.b.mean(0) - o.J.mean(0).T @ points["x_G"])
    np.testing.assert_allclose(found.params, np.broadcast_to(common, found.params.shape), atol=1e-6)


def test_what_is_sent_is_counted(made):
    """Messages hold y, (z, d) and x, with 4 params and 3 hypers, and some hold matrices of 12 and 16 numbers."""
    sent = {"JHIP": (4 + 4) + 2 * 12 + (3 + 3), "MA": (4 + 4) + 2 * 4 + (3 + 3), "GB": 3 + 4 + 3 + 4 + 12 + 16 + 4}
    for name, floats in sent.items():
        assert run(TRACKED[name][0], made[0])[1].costs.floats == 500 * floats


def falling(t):
    return 0.4 / (1 + t) ** 0.7


FALLING: tuple[StepSize, StepSize, StepSize] = (falling, falling, falling)


@pytest.mark.parametrize(
    "algorithm",
    [
        hp.algorithms.MADSBO(2000, *FALLING, tracked=True, batch_size=1),
        hp.algorithms.GBDSBO(2000, *FALLING, estimates=12, curvature=4.0, batch_size=1),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_single_examples_and_falling_steps_reach_the_minimizer(algorithm):
    made = sampled(CLIENTS, 0)
    params, hypers, first, second = made.start
    seen, _ = run(algorithm, task_of(params, jnp.zeros_like(hypers), first, second), every=50)
    assert distance(seen[-20:].mean(0), made.ends) < 0.06


def test_the_series_needs_both_its_options():
    with pytest.raises(hp.InvalidInput) as caught:
        hp.algorithms.GBDSBO(1, 0.1, 0.1, estimates=2)
    assert caught.value.field == "GBDSBO.estimates and curvature"
