"""Private SGP, HGP and TrackedHGP against NumPy: what is released, how far an example moves it, and its noise."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush import networks
from hyperpush.inner.step import Trained
from hyperpush.privacy.audit import audit

pytestmark = pytest.mark.usefixtures("float64")

CLIENTS, SIZE = 3, 2
NETWORK = networks.FullyConnected(CLIENTS)
STEP = 0.3
CLIP, CURVATURE, COUPLING = 0.9, 1.1, 0.7  # all of them at work on the data below


def inner(x, h, batch):
    """Mean over rows of ½(aᵀx − b)² + ½s Σ h x²."""
    rows = batch.examples
    return batch.mean(0.5 * (rows["a"] @ x - rows["b"]) ** 2 + 0.5 * rows["s"] * jnp.sum(h * x**2))


def outer(x, h, batch):
    """Mean over rows of ½(aᵀx − b)² + s Σ h."""
    rows = batch.examples
    return batch.mean(0.5 * (rows["a"] @ x - rows["b"]) ** 2 + rows["s"] * jnp.sum(h))


PROBLEM = hp.Problem(inner, outer)
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
    """(∂_x F, ∂_λ F) of every row, as one vector."""
    return np.hstack([rows["a"] * (rows["a"] @ x - rows["b"])[:, None], rows["s"][:, None] * np.ones(SIZE)])


def mean(values, bound=np.inf):
    return clip(values, bound).mean(0)


def stacked(function, *by_client):
    return np.stack([function(*own) for own in zip(*by_client, strict=True)])


def trained(solver, key=0, record=None):
    first = hp.ragged(FIRST)
    return hp.train(PROBLEM, solver, NETWORK, START, HYPERS, first, jax.random.key(key), record={"SGP": record})


def estimated(estimator, record=None):
    data = hp.ragged(FIRST), hp.ragged(SECOND)
    loops = None if record is None else {type(estimator).__name__: record}
    return hp.hypergradient(PROBLEM, estimator, NETWORK, START, HYPERS, *data, jax.random.key(0), record=loops)


# What a client releases is replayed from what the others may know: nothing else may enter, and what is left is noise.

COUNT = np.array(COUNTS)[:, None]


def test_sgp_goes_on_from_noisy_steps_along_clipped_examples():
    solver = hp.SGP(200, STEP, order="gradient-after", privacy=hp.Noise(hp.Laplace(hp.Power(0.2, 0.1)), CLIP))
    seen = np.asarray(trained(solver, record=lambda state, ctx: state.z).history["SGP"])
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
    """How far an estimate is from its clipped parts, in deviations of the noise that gradient and product carry."""
    direct = stacked(lambda rows, x: mean(pulls(rows, x), CLIP), SECOND, START)[:, SIZE:] / CLIENTS
    sizes = COUPLING * np.linalg.norm(q, axis=1)
    products = stacked(lambda rows, x, q, size: mean(rows["s"][:, None] * x * q, size), FIRST, START, q, sizes)
    deviations = SIGMA * 2 / COUNT * np.hypot(CLIP / CLIENTS, sizes[:, None])
    return (value - direct + products) / deviations


def products_noise(moves, products):
    """The noise in released products with these vectors, [rounds, clients, size], in its deviations."""
    alike = []
    for move, product in zip(moves, products, strict=True):
        sizes = CURVATURE * np.linalg.norm(move, axis=1)
        means = stacked(lambda rows, h, v, size: mean(bends(rows, h, v), size), FIRST, HYPERS, move, sizes)
        alike.append((product - means) / (SIGMA * 2 * sizes[:, None] / COUNT))
    return np.array(alike)


def test_hgp_goes_on_from_noisy_products_of_clipped_examples():
    noise = hp.Noise(hp.Gaussian(SIGMA), CLIP, CURVATURE, COUPLING)
    found = estimated(hp.HGP(40, 1, STEP, privacy=noise), lambda state, ctx: (state.u, state.q))
    u, q = map(np.asarray, found.history["HGP"])
    averages = np.diff(np.concatenate([np.zeros_like(q[:1]), q]), axis=0) / STEP
    np.testing.assert_allclose(averages[1:], np.tile(u[:-1].mean(1, keepdims=True), (1, CLIENTS, 1)), rtol=1e-6)
    alike = products_noise(averages, (averages - u) / STEP)
    assert stats.kstest(alike.ravel(), stats.norm.cdf).pvalue > 1e-3
    first = stacked(lambda rows, x: mean(pulls(rows, x), CLIP), SECOND, START)[:, :SIZE].mean(0) / CLIENTS
    deviation = SIGMA * 2 * CLIP * np.linalg.norm(1 / COUNT) / CLIENTS**2
    assert np.abs((averages[0, 0] - first) / deviation).max() < 4
    assert np.abs(released(q[-1], np.asarray(found.value))).max() < 4
    assert np.linalg.norm(bends(FIRST[0], HYPERS[0], averages[0, 0]), axis=1).max() > CURVATURE * np.linalg.norm(
        averages[0, 0]
    )


def test_tracked_hgp_goes_on_from_noisy_changes_of_clipped_examples():
    noise = hp.Noise(hp.Gaussian(SIGMA), CLIP, CURVATURE, COUPLING)
    estimator = hp.TrackedHGP(20, STEP, pushes=1, tolerance=None, acceleration=0, privacy=noise)
    found = estimated(estimator, lambda state, ctx: (state.aim, state.product, state.tracker, state.q))
    aims, products, trackers, q = map(np.asarray, found.history["TrackedHGP"])
    assert np.all(aims[0] == 0)
    np.testing.assert_allclose(aims[1:], q[:-1] - STEP * trackers[:-1], rtol=1e-9)
    np.testing.assert_allclose(q[1:], np.tile(aims[1:].mean(1, keepdims=True), (1, CLIENTS, 1)), rtol=1e-9)
    pushed = trackers[:-1] + np.diff(products, axis=0)
    np.testing.assert_allclose(trackers[1:], np.tile(pushed.mean(1, keepdims=True), (1, CLIENTS, 1)), atol=1e-12)
    alike = products_noise(np.diff(aims, axis=0), np.diff(products, axis=0))
    assert stats.kstest(alike.ravel(), stats.norm.cdf).pvalue > 1e-3
    # After one round everybody tracks the mean of H_i·0 − c_i, and c_i was released with noise of its own.
    pull = stacked(lambda rows, x: mean(pulls(rows, x), CLIP), SECOND, START)[:, :SIZE].mean(0) / CLIENTS
    deviation = SIGMA * 2 * CLIP * np.linalg.norm(1 / COUNT) / CLIENTS**2
    assert np.abs((pull + trackers[0] - products[0].mean(0)) / deviation).max() < 4
    assert np.abs((pull + trackers[0] - products[0].mean(0)) / deviation).max() > 0.1
    assert np.abs(released(q[-1], np.asarray(found.value))).max() < 4


FREE = hp.Noise(hp.Gaussian(1e-12), 1e3, 1e3, 1e3)  # no noise to speak of, nothing to clip


def test_without_noise_and_clipping_what_tracked_hgp_finds_by_itself_is_the_solution():
    """With acceleration, probing and votes."""
    found = estimated(hp.TrackedHGP(200, STEP, tolerance=1e-9, privacy=FREE))
    hessians = stacked(lambda rows, h: np.stack([mean(bends(rows, h, e)) for e in np.eye(SIZE)]), FIRST, HYPERS)
    both = stacked(lambda rows, x: mean(pulls(rows, x)), SECOND, START) / CLIENTS
    q = np.linalg.solve(hessians.sum(0), both[:, :SIZE].sum(0))
    truth = both[:, SIZE:] - stacked(lambda rows, x: rows["s"].mean() * x * q, FIRST, START)
    np.testing.assert_allclose(found.value, truth, atol=1e-7)
    assert found.rounds < 100


def test_without_noise_and_clipping_a_private_solve_is_the_plain_one():
    data = hp.ragged(FIRST), hp.ragged(SECOND)
    found = hp.solve(
        PROBLEM,
        NETWORK,
        inner=hp.SGP(3, STEP, privacy=FREE),
        hypergradient=hp.HGP(4, 1, STEP, privacy=FREE),
        outer=optax.sgd(0.1),
        outer_steps=2,
        params=START,
        hypers=HYPERS,
        inner_data=data[0],
        outer_data=data[1],
        key=jax.random.key(0),
    )

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


# How far one example can move a release, everything that others know being the same.


def far(value):
    return {"a": np.full(SIZE, value), "b": -np.abs(value), "s": 50.0 * (value > 0)}


@pytest.fixture(scope="module")
def changes():
    """The ℓ2 norms by which releases of client 0 change when its first row does, at random points."""
    noise, key = hp.Noise(hp.Gaussian(1.0), CLIP, CURVATURE, COUPLING), jax.random.key(0)

    def every(rows, x, h, v):
        batch, at = hp.Batch(rows, jnp.ones(COUNTS[0])), (PROBLEM, x, h)
        return {
            "gradient": noise.inner_gradient(*at, batch, key, 0),
            "outer": jnp.concatenate(noise.outer_gradients(*at, batch, key, 0)),
            "curvature": noise.hessian_product(*at, batch, v, key, 0) / jnp.linalg.norm(v),
            "coupling": noise.jacobian_product(*at, batch, v, key, 0) / jnp.linalg.norm(v),
        }

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
    # Rows' Hessians are no less than 0, so that two products differ by at most one clip, not two.
    [("gradient", CLIP, 0.9), ("outer", CLIP, 0.5), ("curvature", CURVATURE, 0.45), ("coupling", COUPLING, 0.45)],
)
def test_no_example_moves_a_release_by_more_than_its_noise_is_made_for(changes, name, bound, sharp):
    most = 2 * bound / COUNTS[0]
    assert sharp * most < changes[name] <= most * (1 + 1e-9)


def test_hypers_of_examples_betray_nothing_of_the_others():
    """λ[row] weighs one row. Another row, with another weight, moves gradients by its share, and no other weight."""

    def weighted(x, h, rows):
        return jnp.mean(jax.nn.sigmoid(h[rows["number"]]) * 0.5 * (rows["a"] @ x - rows["b"]) ** 2)

    def error(x, h, rows):
        return jnp.mean(0.5 * (rows["a"] @ x - rows["b"]) ** 2)

    noise = hp.Noise(hp.Gaussian(1.0), CLIP, CURVATURE, hypers="per example")
    problem, key = hp.Problem(weighted, error), jax.random.key(0)
    rows = {"a": FIRST[0]["a"], "b": FIRST[0]["b"], "number": np.arange(COUNTS[0])}

    @jax.jit
    def both(rows, h):
        x, v = START[0], START[1]
        outer = noise.outer_gradients(problem, x, h, rows, key, 0)
        product = noise.jacobian_product(problem, x, h, rows, v, key, 0)
        return noise.inner_gradient(problem, x, h, rows, key, 0), product, outer[1]

    h = np.linspace(-1, 1, COUNTS[0])
    changed = rows | {name: np.concatenate([[far(40.0)[name]], rows[name][1:]]) for name in "ab"}
    (slope, own, direct), (other_slope, other, _) = both(rows, h), both(changed, np.concatenate([[9.0], h[1:]]))
    assert np.linalg.norm(slope - other_slope) <= 2 * CLIP / COUNTS[0]
    np.testing.assert_array_equal(own[1:], other[1:])
    assert np.all(direct == 0)
    # ∂²_λx of one weighted row, without noise: σ'(λ)·(aᵀx − b)·aᵀv / N
    sigmoid = 1 / (1 + np.exp(-h))
    misfit = (rows["a"] @ START[0] - rows["b"]) * (rows["a"] @ START[1])
    np.testing.assert_allclose(own, sigmoid * (1 - sigmoid) * misfit / COUNTS[0], rtol=1e-9)


def test_an_attack_on_a_run_proves_less_than_is_claimed_unless_its_noise_is_forgotten():
    """All that client 0 sends in three steps of SGP, its first row as far away as can be on either side."""
    network, steps = networks.FullyConnected(2), 3

    def cost(x, h, rows):
        return jnp.mean(0.5 * jnp.sum((x - rows) ** 2, axis=1))

    def attack(sigma, trials):
        noise = hp.Noise(hp.Laplace(sigma), 1.0)
        solver = hp.SGP(steps, 0.1, order="gradient-after", privacy=noise)
        program, zeros = solver.program(hp.Problem(cost, cost)), jnp.zeros((2, 1))

        @jax.jit
        def sent(keys, first):
            rows = jnp.zeros((2, 2, 1)).at[0, 0].set(first)

            def one(key):
                states, data = Trained(zeros, zeros), hp.Data(rows, rows)
                record = {"SGP": lambda state, ctx: state.z}
                return hp.simulate.evaluate(program, network, states, data, key, record=record)[1]["SGP"][:, 0, 0]

            return jax.vmap(one)(keys)

        return audit(lambda keys: sent(keys, 100.0), lambda keys: sent(keys, -100.0), trials, chunk=20_000)

    claim = hp.budget(hp.SGP(steps, 0.1, privacy=hp.Noise(hp.Laplace(2.0), 1.0))).epsilon()
    assert claim == pytest.approx(1.5)
    assert 0.3 < attack(2.0, 40_000).lower <= claim
    assert attack(1e-6, 4000).refutes(claim)


@pytest.mark.parametrize(
    ("build", "field", "said"),
    [
        (lambda: hp.Noise(hp.Laplace(1), 0), "Noise.clip", "above 0"),
        (lambda: hp.Noise(hp.Laplace(1), 1, np.inf), "Noise.curvature", "finite"),
        (lambda: hp.Noise(hp.Laplace(1), 1, 1, -1), "Noise.coupling", "above 0"),
        (lambda: hp.HGP(1, 1, 0.1, privacy=hp.Noise(hp.Laplace(1), 1)), "HGP.privacy.curvature", "clipped"),
        (lambda: hp.HGP(1, 1, 0.1, privacy=hp.Noise(hp.Laplace(1), 1, 1)), "HGP.privacy.coupling", "clipped"),
        (lambda: hp.HGP(1, 1, 0.1, two_batches=True, privacy=FREE), "HGP.two_batches", "False"),
        (lambda: hp.TrackedHGP(privacy=FREE), "TrackedHGP.step", "curvature"),
        (lambda: estimated(hp.HGP(1, 1, 0.1, privacy=PERSONAL)), "Noise.hypers", "outer cost uses the hypers"),
    ],
)
def test_what_cannot_be_private_is_refused(build, field, said):
    with pytest.raises(hp.InvalidInput) as caught:
        build()
    assert caught.value.field == field
    assert said in caught.value.allowed


@pytest.mark.parametrize("made", [hp.SGP(1, 0.1), hp.HGP(1, 1, 0.1), hp.TrackedHGP()])
def test_privacy_is_noise(made):
    # Beartype would refuse it first, but is there in tests only.
    options = SimpleNamespace(**{**vars(made), "privacy": hp.Laplace(1)})
    with pytest.raises(hp.InvalidInput) as caught:
        type(made).__check_init__(options)
    assert caught.value.field == f"{type(made).__name__}.privacy"
    assert caught.value.allowed == "Noise(…) or None"


PERSONAL = hp.Noise(hp.Gaussian(1), 1, 1, hypers="per example")
