"""Private SGP, HGP and TrackedHGP compared with NumPy: releases, sensitivity to one example, and noise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush import networks
from hyperpush.data.batches import Data, Numbered
from hyperpush.engines.simulate import evaluate
from hyperpush.inner.base import InnerState
from hyperpush.privacy import Gaussian, Laplace
from hyperpush.privacy.epsilon_audit import audit_epsilon
from hyperpush.privacy.noise_at_releases import Noising
from hyperpush.programs import Context, program_of
from hyperpush.task.private_problem import Noise, PrivateProblem
from hyperpush.task.problem import Problem

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, SIZE = 3, 2
NETWORK = networks.FullyConnected(CLIENTS)
STEP = 0.3
CLIP, CURVATURE, COUPLING = 0.9, 1.1, 0.7  # all three bounds clip some of the data below


def inner(x, h, rows):
    """Return the cost ½(aᵀx − b)² + ½s Σ h x² of every row."""
    return 0.5 * (rows["a"] @ x - rows["b"]) ** 2 + 0.5 * rows["s"] * jnp.sum(h * x**2)


def outer(x, h, rows):
    """Return the cost ½(aᵀx − b)² + s Σ h of every row."""
    return 0.5 * (rows["a"] @ x - rows["b"]) ** 2 + rows["s"] * jnp.sum(h)


COUNTS = (5, 4, 3)


def rows_of(seed):
    generator = np.random.default_rng(seed)
    return [
        {"a": generator.normal(size=(m, SIZE)), "b": generator.normal(size=m), "s": generator.uniform(0.1, 2, m)}
        for m in COUNTS
    ]


FIRST, SECOND = rows_of(0), rows_of(1)
HYPERS = np.random.default_rng(2).uniform(0.2, 1, (CLIENTS, SIZE))
START = np.random.default_rng(3).normal(size=(CLIENTS, SIZE))


def clip(values, bound):
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    return values * np.minimum(1, bound / np.maximum(norms, 1e-300))


def slopes(rows, x, h):
    return rows["a"] * (rows["a"] @ x - rows["b"])[:, None] + rows["s"][:, None] * h * x


def bends(rows, h, v):
    return rows["a"] * (rows["a"] @ v)[:, None] + rows["s"][:, None] * h * v


def pulls(rows, x):
    """Return (∂_x F, ∂_λ F) of every row as one vector."""
    return np.hstack([rows["a"] * (rows["a"] @ x - rows["b"])[:, None], rows["s"][:, None] * np.ones(SIZE)])


def mean(values, bound=np.inf):
    return clip(values, bound).mean(0)


def stacked(function, *by_client):
    return np.stack([function(*own) for own in zip(*by_client, strict=True)])


def task(mechanism, bounds: Any = None) -> hp.Task:
    made = hp.Task(
        inner=inner,
        outer=outer,
        params=hp.per_client(START),
        hypers=hp.per_client(HYPERS),
        train=FIRST,
        validation=SECOND,
    )
    clips: Any = bounds or {"clip": CLIP, "curvature": CURVATURE, "coupling": COUPLING}
    return made.private(noise=mechanism, **clips)


def estimated(on, estimator, record=None):
    loops = None if record is None else {type(estimator).__name__: record}
    return hp.hypergradient(on, estimator, NETWORK, key=0, record=loops)


# Replay a client's releases from public information alone: no other input is allowed, and the remainder is noise.

COUNT = np.array(COUNTS)[:, None]


def test_sgp_goes_on_from_noisy_steps_along_clipped_examples():
    on, solver = task(Laplace(hp.schedule("power", 0.2, 0.1))), hp.SGP(200, STEP, variant="gradient-after")
    program, states = program_of(solver, on.problem), InnerState(on.params, on.hypers)
    run = hp.Simulate().run(
        program, NETWORK, states, on.data, jax.random.key(0), record={"SGP": lambda state, ctx: state.z}
    )
    seen = np.asarray(run.history["SGP"])
    before = np.concatenate([START[None], seen[:-1]])
    means = np.stack([stacked(lambda rows, x, h: mean(slopes(rows, x, h), CLIP), FIRST, x, HYPERS) for x in before])
    scales = 0.2 / (np.arange(200) + 1) ** 0.1
    noise = (before.mean(1, keepdims=True) - seen) / STEP - means
    alike = noise / (scales[:, None, None] * 2 * CLIP / COUNT * np.sqrt(SIZE))
    for client in range(CLIENTS):
        assert stats.kstest(alike[:, client].ravel(), stats.laplace.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(alike[1:].ravel(), alike[:-1].ravel())[0, 1]) < 0.1
    norms = np.linalg.norm(slopes(FIRST[0], before[-1, 0], HYPERS[0]), axis=1)
    assert norms.max() > CLIP > norms.min()


SIGMA = 0.01


def released(q, value):
    """Return the difference between an estimate and its clipped parts, in standard deviations of the noise in both."""
    direct = stacked(lambda rows, x: mean(pulls(rows, x), CLIP), SECOND, START)[:, SIZE:] / CLIENTS
    sizes = COUPLING * np.linalg.norm(q, axis=1)
    products = stacked(lambda rows, x, q, size: mean(rows["s"][:, None] * x * q, size), FIRST, START, q, sizes)
    deviations = SIGMA * 2 / COUNT * np.hypot(CLIP / CLIENTS, sizes[:, None])
    return (value - direct + products) / deviations


def products_noise(moves, products):
    """Return the noise in released products with these vectors, [rounds, clients, size], in standard deviations."""
    alike = []
    for move, product in zip(moves, products, strict=True):
        sizes = CURVATURE * np.linalg.norm(move, axis=1)
        means = stacked(lambda rows, h, v, size: mean(bends(rows, h, v), size), FIRST, HYPERS, move, sizes)
        alike.append((product - means) / (SIGMA * 2 * sizes[:, None] / COUNT))
    return np.array(alike)


def test_hgp_goes_on_from_noisy_products_of_clipped_examples():
    found = estimated(task(Gaussian(SIGMA)), hp.HGP(40, 1, STEP), lambda state, ctx: (state.u, state.q))
    u, q = map(np.asarray, found.history["HGP"])
    averages = np.diff(np.concatenate([np.zeros_like(q[:1]), q]), axis=0) / STEP
    np.testing.assert_allclose(averages[1:], np.tile(u[:-1].mean(1, keepdims=True), (1, CLIENTS, 1)), rtol=1e-6)
    alike = products_noise(averages, (averages - u) / STEP)
    assert stats.kstest(alike.ravel(), stats.norm.cdf).pvalue > 1e-3
    first = stacked(lambda rows, x: mean(pulls(rows, x), CLIP), SECOND, START)[:, :SIZE].mean(0) / CLIENTS
    deviation = SIGMA * 2 * CLIP * np.linalg.norm(1 / COUNT) / CLIENTS**2
    assert np.abs((averages[0, 0] - first) / deviation).max() < 4
    last = q[-1] + STEP * u[-1].mean(0)  # the last average is taken after the loop and needs no product
    assert np.abs(released(last, np.asarray(found.value))).max() < 4
    assert len(u) == 39
    assert found.privacy.releases == {"train": 39 + 1, "validation": 1}
    assert np.linalg.norm(bends(FIRST[0], HYPERS[0], averages[0, 0]), axis=1).max() > CURVATURE * np.linalg.norm(
        averages[0, 0]
    )


def test_tracked_hgp_goes_on_from_noisy_changes_of_clipped_examples():
    estimator = hp.TrackedHGP(20, STEP, pushes=1, tolerance=None, acceleration=0)
    found = estimated(
        task(Gaussian(SIGMA)), estimator, lambda state, ctx: (state.aim, state.gradient, state.tracker, state.q)
    )
    aims, products, trackers, q = map(np.asarray, found.history["TrackedHGP"])
    assert len(aims) == 19  # the first step is outside of the loop
    assert found.privacy.releases == {"train": 19 + 1, "validation": 1}
    # In the first step all clients are at 0 and track the same mean, along which they all move.
    np.testing.assert_allclose(aims[0], np.tile(aims[0, :1], (CLIENTS, 1)), rtol=1e-9)
    np.testing.assert_allclose(trackers[0] + aims[0] / STEP, np.tile(products[0].mean(0), (CLIENTS, 1)), atol=1e-9)
    np.testing.assert_allclose(aims[1:], q[:-1] - STEP * trackers[:-1], rtol=1e-9)
    np.testing.assert_allclose(q[1:], np.tile(aims[1:].mean(1, keepdims=True), (1, CLIENTS, 1)), rtol=1e-9)
    pushed = trackers[:-1] + np.diff(products, axis=0)
    np.testing.assert_allclose(trackers[1:], np.tile(pushed.mean(1, keepdims=True), (1, CLIENTS, 1)), atol=1e-12)
    from_zero = (np.diff(np.concatenate([np.zeros_like(each[:1]), each]), axis=0) for each in (aims, products))
    alike = products_noise(*from_zero)
    assert stats.kstest(alike.ravel(), stats.norm.cdf).pvalue > 1e-3
    # After one round every client tracks the mean of H_i·0 − c_i; each c_i was released with separate noise.
    pull = stacked(lambda rows, x: mean(pulls(rows, x), CLIP), SECOND, START)[:, :SIZE].mean(0) / CLIENTS
    deviation = SIGMA * 2 * CLIP * np.linalg.norm(1 / COUNT) / CLIENTS**2
    assert np.abs((pull + trackers[0] - products[0].mean(0)) / deviation).max() < 4
    assert np.abs((pull + trackers[0] - products[0].mean(0)) / deviation).max() > 0.1
    assert np.abs(released(q[-1], np.asarray(found.value))).max() < 4


FREE = dict.fromkeys(("clip", "curvature", "coupling"), 1e3)  # clips nothing
QUIET = Gaussian(1e-12)  # almost no noise


def test_without_noise_and_clipping_what_tracked_hgp_finds_by_itself_is_the_solution():
    """The run uses acceleration, probing and votes."""
    found = estimated(task(QUIET, FREE), hp.TrackedHGP(200, STEP, tolerance=1e-9))
    hessians = stacked(lambda rows, h: np.stack([mean(bends(rows, h, e)) for e in np.eye(SIZE)]), FIRST, HYPERS)
    both = stacked(lambda rows, x: mean(pulls(rows, x)), SECOND, START) / CLIENTS
    q = np.linalg.solve(hessians.sum(0), both[:, :SIZE].sum(0))
    truth = both[:, SIZE:] - stacked(lambda rows, x: rows["s"].mean() * x * q, FIRST, START)
    np.testing.assert_allclose(found.value, truth, atol=1e-7)
    assert found.costs.rounds < 100


def test_without_noise_and_clipping_a_private_solve_is_the_plain_one():
    method = hp.PDBO(
        inner=hp.SGP(3, STEP),
        hypergradient=hp.HGP(4, 1, STEP),
        outer=hp.optimizer("sgd", learning_rate=0.1),
        steps=2,
    )
    found = hp.solve(task(QUIET, FREE), method, NETWORK, key=0)

    def train(h):
        x = START
        for _ in range(3):
            moved = x - STEP * stacked(lambda rows, x, h: mean(slopes(rows, x, h)), FIRST, x, h)
            x = np.tile(moved.mean(0), (CLIENTS, 1))
        return x

    h = HYPERS
    for _ in range(2):
        x = train(h)
        both = stacked(lambda rows, x: mean(pulls(rows, x)), SECOND, x) / CLIENTS
        u, q = both[:, :SIZE], 0.0
        for _ in range(4):
            average = u.mean(0)
            q = q + STEP * average
            u = average - STEP * stacked(lambda rows, h, v=average: mean(bends(rows, h, v)), FIRST, h)
        h = h - 0.1 * (both[:, SIZE:] - stacked(lambda rows, x, q=q: rows["s"].mean() * x * q, FIRST, x))
    np.testing.assert_allclose(found.hypers, h, atol=1e-6)
    np.testing.assert_allclose(found.params, train(h), atol=1e-6)


# How far one example can change a release if all public information stays the same.


def far(value):
    return {"a": np.full(SIZE, value), "b": -np.abs(value), "s": 50.0 * (value > 0)}


@pytest.fixture(scope="module")
def changes():
    """Return the ℓ2 norms of changes in client 0's releases when its first row changes, at random points."""
    hidden = PrivateProblem.of(Problem(inner, outer), Noise(Gaussian(1.0), CLIP, CURVATURE, COUPLING))

    @Noising(hidden.noise.mechanism, hidden.noise.hypers == "per example").add
    def leaf(x, h, v, ctx):
        at = x, h, hp.Batch(ctx.data, jnp.ones(COUNTS[0]))
        return {
            "gradient": hidden.inner_gradient(*at),
            "outer": jnp.concatenate(hidden.outer_gradients(*at)),
            "curvature": hidden.hessian_product(*at, v) / jnp.linalg.norm(v),
            "coupling": hidden.jacobian_product(*at, v) / jnp.linalg.norm(v),
        }

    def every(rows, x, h, v):
        # The noise is the same for the same key.
        return leaf(x, h, v, Context(jnp.int32(0), CLIENTS, jnp.int32(0), jax.random.key(0), rows))

    generator = np.random.default_rng(4)
    others = generator.normal(size=(2, 40, SIZE))
    hypers = generator.uniform(0.2, 1, (40, SIZE))
    with jax.enable_x64(True):
        run = jax.jit(jax.vmap(every, (None, 0, 0, 0)))
        outcomes = []
        for sign in (40.0, -40.0, 0.01, -0.01):
            rows = {name: np.concatenate([[far(sign)[name]], FIRST[0][name][1:]]) for name in FIRST[0]}
            outcomes.append(jax.tree.map(np.asarray, run(rows, others[0], hypers, others[1])))
    pairs = [(a, b) for a in outcomes for b in outcomes]
    return {name: max(np.linalg.norm(a[name] - b[name], axis=1).max() for a, b in pairs) for name in outcomes[0]}


@pytest.mark.parametrize(
    ("name", "bound", "sharp"),
    # Rows have positive semidefinite Hessians, so two products differ by at most one clip instead of two.
    [("gradient", CLIP, 0.9), ("outer", CLIP, 0.5), ("curvature", CURVATURE, 0.45), ("coupling", COUPLING, 0.45)],
)
def test_no_example_moves_a_release_by_more_than_its_noise_is_made_for(changes, name, bound, sharp):
    most = 2 * bound / COUNTS[0]
    assert sharp * most < changes[name] <= most * (1 + 1e-9)


def test_hypers_of_examples_betray_nothing_of_the_others():
    """λ[row] weighs one row; another row changes gradients by its share, and changes no other weight."""

    def weighted(x, h, rows):
        return jax.nn.sigmoid(h) * 0.5 * (rows["a"] @ x - rows["b"]) ** 2

    def error(x, h, rows):
        return 0.5 * (rows["a"] @ x - rows["b"]) ** 2

    problem = Problem(weighted, error, by_example=(True,))
    hidden = PrivateProblem.of(problem, Noise(Gaussian(1.0), CLIP, CURVATURE, hypers="per example"))
    rows = {"a": FIRST[0]["a"], "b": FIRST[0]["b"]}

    @Noising(hidden.noise.mechanism, hidden.noise.hypers == "per example").add
    def leaf(h, ctx):
        at = START[0], h, Numbered(jnp.arange(COUNTS[0]), ctx.data.train)
        return hidden.inner_gradient(*at), hidden.jacobian_product(*at, START[1]), hidden.outer_gradients(*at)[1]

    @jax.jit
    def both(rows, h):
        return leaf(h, Context(jnp.int32(0), 1, jnp.int32(0), jax.random.key(0), Data.pair(rows, rows)))

    h = np.linspace(-1, 1, COUNTS[0])
    changed = rows | {name: np.concatenate([[far(40.0)[name]], rows[name][1:]]) for name in "ab"}
    (slope, own, direct), (other_slope, other, _) = both(rows, h), both(changed, np.concatenate([[9.0], h[1:]]))
    assert np.linalg.norm(slope - other_slope) <= 2 * CLIP / COUNTS[0]
    np.testing.assert_array_equal(own[1:], other[1:])
    assert np.all(direct == 0)
    # ∂²_λx of one weighted row, without noise, is σ'(λ)·(aᵀx − b)·aᵀv / N.
    sigmoid = 1 / (1 + np.exp(-h))
    misfit = (rows["a"] @ START[0] - rows["b"]) * (rows["a"] @ START[1])
    np.testing.assert_allclose(own, sigmoid * (1 - sigmoid) * misfit / COUNTS[0], rtol=1e-9)


def test_an_attack_on_a_run_proves_less_than_is_claimed_unless_its_noise_is_forgotten():
    """Attack all messages of client 0 in three steps of SGP, with its first row at either of two extreme values."""
    network, steps = networks.FullyConnected(2), 3

    def cost(x, h, rows):
        return 0.5 * jnp.sum((x - rows) ** 2, axis=1)

    solver = hp.SGP(steps, 0.1, variant="gradient-after")

    def attack(sigma, trials):
        program = program_of(solver, PrivateProblem.of(Problem(cost, cost), Noise(Laplace(sigma), 1.0)))
        zeros = jnp.zeros((2, 1))

        @jax.jit
        def sent(keys, first):
            rows = jnp.zeros((2, 2, 1)).at[0, 0].set(first)

            def one(key):
                states, data = InnerState(zeros, zeros), Data.pair(rows, rows)
                record = {"SGP": lambda state, ctx: state.z}
                return evaluate(program, network, states, data, key, record=record)[1]["SGP"][:, 0, 0]

            return jax.vmap(one)(keys)

        return audit_epsilon(lambda keys: sent(keys, 100.0), lambda keys: sent(keys, -100.0), trials, chunk=20_000)

    zeros = jnp.zeros((2, 2, 1))
    used = hp.Task(inner=cost, outer=cost, params=jnp.zeros(1), hypers=jnp.zeros(1), train=zeros, validation=zeros)
    claim = hp.budget(used.private(noise=Laplace(2.0), clip=1.0), solver).epsilon()
    assert claim == pytest.approx(1.5)
    assert 0.3 < attack(2.0, 40_000).lower <= claim
    assert attack(1e-6, 4000).refutes(claim)


@pytest.mark.parametrize(
    ("build", "field", "said"),
    [
        (lambda: Noise(Laplace(1), 0), "task.private.clip", "above 0"),
        (lambda: Noise(Laplace(1), 1, np.inf), "task.private.curvature", "finite"),
        (lambda: Noise(Laplace(1), 1, 1, -1), "task.private.coupling", "above 0"),
        (lambda: estimated(task(QUIET, HALF), hp.HGP(2, 1, 0.1)), "task.private.coupling", "clipped"),
        (lambda: estimated(task(QUIET, {"clip": 1.0}), hp.HGP(2, 1, 0.1)), "task.private.curvature", "clipped"),
        (lambda: estimated(personal(), hp.HGP(1, 1, 0.1)), "task.private.hypers", "outer cost uses the hypers"),
    ],
)
def test_what_cannot_be_private_is_refused(build, field, said):
    with pytest.raises(hp.InvalidInput) as caught:
        build()
    assert caught.value.field == field
    assert said in caught.value.allowed


HALF = {"clip": 1.0, "curvature": 1.0}


def personal():
    rows = jnp.ones((CLIENTS, 4, SIZE))

    def cost(x, weight, rows):
        return weight * jnp.sum((x - rows) ** 2, axis=1)

    hypers = hp.per_example(rows)
    made = hp.Task(inner=cost, outer=cost, params=jnp.zeros(SIZE), hypers=hypers, train=rows, outer_on="train")
    return made.private(noise=Gaussian(1.0), clip=1.0, curvature=1.0, hypers="per example")
