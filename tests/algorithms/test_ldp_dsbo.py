"""LDP-DSBO: its equations in NumPy, the places of its noise, clipping, use of data, and budgets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush import networks
from hyperpush.algorithms.base import LOOP, BilevelState
from hyperpush.base.schedules import Power
from hyperpush.data.batches import Data
from hyperpush.privacy.mechanisms import Gaussian, Laplace
from hyperpush.privacy.sensitivity import Constants, LoopSensitivity
from hyperpush.task.problem import Problem
from hyperpush.tasks.quadratic import outer_fixed_points, quadratic

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, ROUNDS, SIZE = 5, 6, 2
W = sum(np.roll(np.eye(CLIENTS), shift, 1) for shift in (-1, 0, 1)) / 3  # a ring of five with Metropolis weights
STEPS = {"y": Power(0.3, 0.7), "z": Power(0.2, 0.6), "x": Power(0.1, 0.8)}
# These bounds are so tight that every kind of clipping occurs in the runs below.
BOUNDS = Constants(C_y=0.8, C_b=0.7, C_x=0.9, R=0.05, C_H=1.0, C_J=1.0, C_Hz=0.06, C_Jz=0.04)


def inner(y, x, rows):
    """Return the mean over rows of ½c‖y‖² − bᵀy + x·y."""
    return jnp.mean(jax.vmap(lambda c, b: 0.5 * c * y @ y - b @ y + x @ y)(rows["curvature"], rows["linear"]))


def outer(y, x, rows):
    """Return the mean over rows of ½‖y − e‖² + ½‖x − e‖²."""
    return jnp.mean(jax.vmap(lambda e: 0.5 * jnp.sum((y - e) ** 2) + 0.5 * jnp.sum((x - e) ** 2))(rows["target"]))


def solve(algorithm, network, train, validation, start=0.0, cost=inner):
    task = hp.Task(
        inner=cost,
        outer=outer,
        params=jnp.full(SIZE, start),
        hypers=jnp.full(SIZE, start),
        train=train,
        validation=validation,
        common=True,
    )
    return hp.solve(task, algorithm, network, key=0, certify=False)


@pytest.fixture(scope="module")
def streams():
    generator = np.random.default_rng(0)
    first = {
        "curvature": generator.uniform(0.5, 2, (CLIENTS, ROUNDS)),
        "linear": generator.normal(0, 1, (CLIENTS, ROUNDS, SIZE)),
    }
    return first, {"target": generator.normal(0, 1, (CLIENTS, ROUNDS, SIZE))}


def clip(values, bound):
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    return values * np.minimum(1, bound / np.where(norms > 0, norms, 1))


def by_hand(first, second, use, bounds):
    """Return the hypers after every round of LDP-DSBO without noise, by NumPy."""
    x = y = z = np.zeros((CLIENTS, SIZE))
    seen = []
    for t in range(ROUNDS):
        rows = {"running averages": slice(t + 1), "once": slice(t, t + 1), "reused": slice(None)}[use]
        c, b, e = first["curvature"][:, rows, None], first["linear"][:, rows], second["target"][:, rows]

        def mean(values, bound):
            return (values if bounds is None else clip(values, bound)).mean(1)

        like = np.zeros_like(b)
        limits = (None,) * 5 if bounds is None else (bounds.C_y, bounds.C_Hz, bounds.C_Jz, bounds.C_b, bounds.C_x)
        slope = mean(c * y[:, None] - b + x[:, None], limits[0])
        product_y, product_x = mean(c * z[:, None] + like, limits[1]), mean(z[:, None] + like, limits[2])
        pull, along = mean(y[:, None] - e, limits[3]), mean(x[:, None] - e, limits[4])
        steps = {name: power.scale / (t + 1) ** power.exponent for name, power in STEPS.items()}
        y, z, x = (
            W @ y - steps["y"] * slope,
            W @ z - steps["z"] * (product_y - pull),
            W @ x - steps["x"] * (along - product_x),
        )
        z = z if bounds is None else clip(z, bounds.R)
        seen.append(x)
    return np.stack(seen)


@pytest.mark.parametrize(
    ("use", "bounds"),
    [("running averages", BOUNDS), ("once", BOUNDS), ("reused", BOUNDS), ("once", None)],
    ids=["running averages", "once", "reused", "not clipped"],
)
def test_rounds_follow_the_equations(use, bounds, streams):
    first, second = streams
    algorithm = hp.algorithms.LDPDSBO(ROUNDS, STEPS, None, bounds, use)
    found = solve(algorithm, networks.Ring(CLIENTS), first, second)
    np.testing.assert_allclose(found.history.hypers[1:], by_hand(first, second, use, bounds), rtol=1e-9, atol=1e-12)
    assert found.costs.floats == ROUNDS * 3 * SIZE
    assert found.costs.rounds == ROUNDS


@pytest.mark.parametrize("use", ["once", "running averages"])
def test_without_clipping_nothing_that_is_not_finite_is_hidden(use, streams):
    """The cost of row 2 is finite, but its gradient is not. Rounds 0 and 1 do not use it; round 2 must report it."""
    first, second = streams
    curvature = np.abs(first["curvature"])
    curvature[:, 2] = 0.0

    def bad(y, x, rows):
        return jnp.mean(jnp.sqrt(rows["curvature"] * jnp.sum(y * x) ** 2))

    algorithm = hp.algorithms.LDPDSBO(ROUNDS, STEPS, use=use)
    data = {"curvature": curvature}, {"target": second["target"]}
    with pytest.raises(hp.Diverged) as caught:
        solve(algorithm, networks.Ring(CLIENTS), *data, start=1.0, cost=bad)
    assert caught.value.round == 3  # rounds are counted from 1


def test_clipping_changes_the_runs_above(streams):
    first, second = streams
    for use in ("running averages", "once", "reused"):
        plain, clipped = (by_hand(first, second, use, bounds) for bounds in (None, BOUNDS))
        assert np.abs(plain - clipped)[1:].max(axis=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("mechanism", [Laplace, Gaussian])
def test_own_values_are_clean_and_neighbors_carry_noise_of_the_given_size(mechanism):
    """With zero start and slopes, one round leaves Σ_j w_ij ζ_j of the neighbors, of scale ν_0 per variable."""
    scales = {"y": 0.5, "z": 0.25, "x": 2.0}
    noise = {name: mechanism(Power(scale, 0.6)) for name, scale in scales.items()}
    flat = Problem(lambda y, x, rows: 0.0 * jnp.sum(y * x), lambda y, x, rows: 0.0 * jnp.sum(y * x))
    wide = Constants(1.0, 1.0, 1.0, 1e3, 1.0, 1.0)
    program = hp.algorithms.LDPDSBO(1, Power(0.1, 0.8), noise, wide, "once").program(flat)
    start, rows = jnp.zeros((CLIENTS, SIZE)), jnp.zeros((CLIENTS, 1))

    def one(key):
        states, data = BilevelState(start, start), Data.pair(rows, rows)
        record = {LOOP: lambda state, ctx: (state.params, state.solution, state.hyper)}
        return hp.extend.evaluate(program, networks.Ring(CLIENTS), states, data, key, record=record)[1][LOOP]

    seen = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 4000))
    spread = np.sqrt(2) if mechanism is Laplace else 1.0
    others = W - np.diag(np.diag(W))
    for name, values in zip("yzx", seen, strict=True):
        values = np.asarray(values)[:, 0]
        covariance = np.einsum("kic,kjc->ij", values, values) / values.size * CLIENTS
        np.testing.assert_allclose(
            covariance, (spread * scales[name]) ** 2 * others @ others.T, atol=0.02 * scales[name] ** 2
        )
        assert abs(np.corrcoef(values[..., 0].ravel(), values[..., 1].ravel())[0, 1]) < 0.03
    y, z, _ = (np.asarray(values).ravel() for values in seen)
    assert abs(np.corrcoef(y, z)[0, 1]) < 0.03


def test_falling_steps_reach_the_minimizer_of_unlike_quadratics():
    task = quadratic(CLIENTS, 0, common=True)
    point = outer_fixed_points(task.train, task.validation)["x_G"]
    algorithm = hp.algorithms.LDPDSBO(100_000, Power(0.5, 0.8), use="reused")
    found = hp.solve(
        task.at(hypers=jnp.zeros_like(task.hypers)), algorithm, networks.Ring(CLIENTS), key=0, certify=False
    )
    assert np.linalg.norm(found.hypers - point, axis=1).max() < 1e-3 * np.linalg.norm(point)


def test_the_accountant_gets_what_the_algorithm_does():
    params, hypers = np.zeros((CLIENTS, SIZE)), np.zeros((CLIENTS, 3))
    noise = Laplace(Power(1.0, 0.55))
    algorithm = hp.algorithms.LDPDSBO(ROUNDS, STEPS, noise, BOUNDS, "once", examples=2, checked=False)
    sender = algorithm.accountant(networks.Ring(CLIENTS), params, hypers).sender
    assert isinstance(sender, LoopSensitivity)
    # In the round after the changed one, the step differs by 2C, shared by two examples.
    first = {name: sender.sensitivities(2)[name][1] for name in "yzx"}
    # z never leaves its ball, so it is not clipped
    clips = {"y": 0.8, "z": 2 * 0.05 / STEPS["z"].scale, "x": 0.9 + 0.04}
    for name, bound in clips.items():
        np.testing.assert_allclose(first[name], np.full(CLIENTS, STEPS[name].scale * bound))
    np.testing.assert_allclose(sender.others, 1 - np.diag(W), atol=1e-12)
    assert sender.dims == {"y": SIZE, "z": SIZE, "x": 3}
    varying = algorithm.accountant(networks.RandomUndirected(CLIENTS, probability=0.5), params, hypers).sender
    assert isinstance(varying, LoopSensitivity)
    assert np.all(varying.others == 0)
    reused = hp.algorithms.LDPDSBO(ROUNDS, STEPS, noise, BOUNDS, "reused", checked=False)
    with pytest.raises(hp.InvalidInput, match="rows"):
        reused.accountant(networks.Ring(CLIENTS), params, hypers)
    fifty = reused.accountant(networks.Ring(CLIENTS), params, hypers, rows=50).sender.sensitivities(2)["x"]
    np.testing.assert_allclose(fifty[1], np.full(CLIENTS, STEPS["x"].scale * 2 * 0.94 / 50))
    with pytest.raises(hp.InvalidInput, match="noise"):
        hp.algorithms.LDPDSBO(ROUNDS, STEPS).accountant(networks.Ring(CLIENTS), params, hypers)


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"step_sizes": {"x": Power(0.1)}}, "LDPDSBO.step_sizes", "each of"),
        ({"noise": Laplace(Power(1.0, 0.6))}, "LDPDSBO.constants", "clipped"),
        ({"noise": Laplace(Power(1.0, 0.3)), "constants": BOUNDS}, "noise['y'].scale.exponent", "above 0.4"),
        ({"noise": Laplace(Power(1.0, 0.9)), "constants": BOUNDS}, "noise['y'].scale.exponent", "below 0.8"),
        ({"noise": Laplace(Power(1.0, 0.6)), "constants": BOUNDS, "use": "reused"}, "use", "once"),
    ],
)
def test_bad_options_are_named(options, field, said):
    with pytest.raises(hp.InvalidInput) as caught:
        hp.algorithms.LDPDSBO(**{"steps": 10, "step_sizes": Power(0.1, 0.8)} | options)
    assert caught.value.field == field
    assert said in caught.value.allowed


def test_streams_that_are_too_short_are_refused(streams):
    first, second = streams
    with pytest.raises(hp.InvalidInput, match="12 rows"):
        solve(hp.algorithms.LDPDSBO(ROUNDS, STEPS, examples=2), networks.Ring(CLIENTS), first, second)


def test_noise_of_its_own_on_a_private_task_is_refused():
    """Noise would be added twice; the algorithm's noise alone runs, and so does the task's noise alone."""
    rows = jnp.zeros((CLIENTS, ROUNDS))
    task = hp.Task(
        inner=lambda y, x, row: jnp.sum(y * x) * row,
        outer=lambda y, x, row: jnp.sum(y * x) * row,
        params=jnp.zeros(SIZE),
        hypers=jnp.zeros(SIZE),
        train=rows,
        validation=rows,
        common=True,
    )
    private = task.private(noise=Gaussian(1.0), clip=1.0, curvature=1.0, coupling=1.0)
    noisy = hp.algorithms.LDPDSBO(1, Power(0.1, 0.8), Gaussian(Power(1.0, 0.6)), BOUNDS, "once")
    with pytest.raises(hp.InvalidInput, match=r"noise=None on a task of task\.private") as refused:
        hp.solve(private, noisy, networks.Ring(CLIENTS), key=0)
    assert refused.value.field == "LDPDSBO.noise"
    with pytest.raises(hp.InvalidInput, match="noise=None"):
        hp.budget(private, noisy)
    noisy.check(task)
    noisy.with_options(noise=None).check(private)
