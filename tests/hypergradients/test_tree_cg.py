"""TreeCG estimates its error, reports unsolvable problems, and never gives an unmarked wrong result."""

import jax.numpy as jnp
import numpy as np
import pytest
from systems import System, system
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.solving.ritz import Tridiagonal

NETWORK = hp.networks.RandomDirected(6)
REGULAR = ["like", "unlike", "indefinite clients", "zero clients", "ill-conditioned"]


def estimate(found: System, method=None, **options):
    return hp.hypergradient(found.task, method or hp.TreeCG(), NETWORK, **{"key": 0, **options})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", REGULAR)
def test_the_error_is_below_its_estimate_and_that_below_the_tolerance(kind):
    for seed in range(5):
        problem = system(kind, seed)
        found = estimate(problem)
        assert (found.status.converged, found.status.reason) == (True, "tolerance")
        assert found.status.error is not None
        assert problem.error(found.value) <= found.status.error <= 2e-5


@pytest.mark.parametrize("kind", REGULAR[:-1])
def test_in_float32_too(kind):
    for seed in range(5):
        problem = system(kind, seed)
        found = estimate(problem)
        assert found.status.converged
        assert found.status.error is not None
        assert problem.error(found.value) <= found.status.error <= 2e-3


@pytest.mark.parametrize(("share", "good"), [(0.1, True), (1e-3, None), (1e-4, False)])
def test_in_float32_a_claim_holds_where_terms_cancel(share, good):
    """This share of the terms is left. Rounding them is an error of about 1e-7 of their size, whatever is solved."""
    for seed in range(3):
        problem = system("like", seed)
        through = problem._replace(direct=np.zeros_like(problem.direct)).hypergradients()
        left = share * problem.direct * np.abs(through).mean()
        rounded = problem._replace(direct=len(through) * (left - through))
        rounded = System(
            *(part.astype(np.float32).astype(float) for part in rounded)
        )  # the truth for what is computed with
        found = estimate(rounded)
        assert found.status.error is not None
        assert rounded.error(found.value) <= found.status.error
        assert found.status.converged is False or rounded.error(found.value) <= 1e-3
        assert good in (None, found.status.converged)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["singular", "indefinite", "nearly singular"])
def test_hessians_without_an_inverse_are_called_so(kind):
    for seed in range(5):
        found = estimate(system(kind, seed))
        assert found.status.converged is False
        assert found.status.reason in ("ill-posed", "inaccurate")
    with pytest.raises(hp.NotConverged, match="ill-posed: the Hessian is singular or indefinite"):
        estimate(system("indefinite"), throw=True)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_an_outer_gradient_that_misses_a_weak_direction_does_not_hide_it():
    """Without a second right-hand side, conjugate gradients would miss the eigenvalue 1e-9."""
    problem = system("like", d=8)
    values, vectors = np.linalg.eigh(problem.hessians.mean(0))
    weak = vectors[:, 0]
    hessians = problem.hessians - (values[0] - 1e-9) * np.outer(weak, weak)
    along = problem.sources.mean(0) @ weak
    hidden = problem._replace(hessians=hessians, sources=problem.sources - (along - 1e-7) * weak)
    found = estimate(hidden)
    assert found.status.converged is False or hidden.error(found.value) < 1e-3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("least", [0.0, -0.3])
def test_an_outer_gradient_of_one_eigenvector_hides_no_other(least):
    """Conjugate gradients would solve this before they see any other direction, so they must wait for the probe."""
    problem = system("like", d=12)
    values, vectors = np.linalg.eigh(problem.hessians.mean(0))
    lowered = problem.hessians - (values[0] - least) * np.outer(vectors[:, 0], vectors[:, 0])
    hidden = problem._replace(hessians=lowered, sources=problem.sources - problem.sources.mean(0) + vectors[:, 5])
    statuses = [estimate(hidden, key=key).status for key in range(40)]
    # the probe misses an eigenvalue about once in 1,000 runs
    assert sum(status.converged is not False for status in statuses) <= 1


@pytest.mark.usefixtures("float64")
@pytest.mark.long
def test_too_few_steps_are_a_limit_and_more_start_from_where_the_last_outer_step_ended():
    problem = system("ill-conditioned")
    short = estimate(problem, hp.TreeCG(steps=4))
    assert (short.status.converged, short.status.reason) == (False, "limit")
    inner, outer = hp.SGP(steps=1, step_size=1e-9), hp.optimizer("sgd", learning_rate=1e-12)

    def products(**options):
        method = hp.PDBO(inner, hp.TreeCG(), outer, steps=6, **options)
        return hp.solve(problem.task, method, NETWORK, key=0).costs.hessian_products

    # The first and the last step wait for the probe; all others take few products.
    assert products() < 0.5 * products(remember=False)


@pytest.mark.usefixtures("float64")
@pytest.mark.long
def test_the_last_outer_step_sees_a_direction_that_lost_its_curvature():
    """The first direction's curvature is the hyper, which falls below 0; the outer cost ignores it."""

    def inner(x, hyper, batch):
        return 0.5 * hyper * x[0] ** 2 + 0.5 * jnp.sum(jnp.linspace(0.5, 2, 11) * x[1:] ** 2) - x[3]

    def outer(x, hyper, batch):
        return (x[3] - 1) ** 2 + hyper

    data = jnp.zeros((6, 1))
    task = hp.Task(inner=inner, outer=outer, params=jnp.zeros(12), hypers=1.0, train=data, validation=data)
    method = hp.PDBO(hp.SGP(60, 0.5), hp.TreeCG(), hp.optimizer("sgd", learning_rate=2.0), steps=5)
    statuses = [hp.solve(task, method, NETWORK, key=key).status for key in range(3)]
    assert {(status.converged, status.reason) for status in statuses} == {(False, "ill-posed")}


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_outer_gradients_of_any_size_are_solved(scale):
    """The squares of these outer gradients are 0 or infinite in float32."""
    problem = system("like")
    scaled = problem._replace(sources=scale * problem.sources, direct=scale * problem.direct)
    found = estimate(scaled)
    assert found.status.converged
    assert scaled.error(np.asarray(found.value, float)) < 1e-3


@pytest.mark.long
def test_solutions_tell_how_many_of_their_estimates_failed():
    def solve(steps):
        inner, outer = hp.SGP(200, 0.3), hp.optimizer("sgd", learning_rate=0.1)
        method = hp.PDBO(inner, hp.TreeCG(steps=steps), outer, steps=3)
        return hp.solve(system("like").task, method, hp.networks.FullyConnected(6), key=0).status

    good, bad = solve(100), solve(2)
    assert (good.converged, good.runs, good.failed) == (True, 3, 0)
    assert (bad.converged, bad.reason, bad.runs, bad.failed) == (False, "limit", 3, 3)
    assert "3 of 3 solves" in str(bad)


def test_noise_is_refused():
    private = hp.tasks.logistic(6, seed=0).private(
        noise=hp.privacy.Gaussian(1.0), clip=1.0, curvature=1.0, coupling=1.0
    )
    with pytest.raises(hp.InvalidInput, match="TreeCG on a private task"):
        hp.hypergradient(private, hp.TreeCG(), NETWORK, key=0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("least", [1e-2, 1e-6, 1e-12])
def test_the_smallest_ritz_value_is_that_of_the_tridiagonal_matrix(least):
    """Run conjugate gradients in NumPy, and compare with the eigenvalues of T in extended precision."""
    random, d = np.random.default_rng(0), 8
    basis, _ = np.linalg.qr(random.normal(size=(d, d)))
    matrix, found = (basis * np.geomspace(least, 1, d)) @ basis.T, Tridiagonal.start(20, jnp.zeros(()).dtype)
    residual = direction = random.normal(size=d)
    lengths, ratios = [], []
    for _ in range(5):
        image = matrix @ direction
        length = residual @ residual / (direction @ image)
        after = residual - length * image
        ratio = after @ after / (residual @ residual)
        residual, direction = after, after + ratio * direction
        lengths, ratios = [*lengths, length], [*ratios, ratio]
        found = found.append(jnp.asarray(length), jnp.asarray(ratio))
        diagonal = 1 / np.array(lengths) + np.array([0, *(b / a for a, b in zip(lengths, ratios, strict=True))][:-1])
        beside = np.sqrt(ratios[:-1]) / lengths[:-1]
        truth = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))[0]
        np.testing.assert_allclose(found.smallest(jnp.asarray(1e-15)), truth, rtol=2e-3)


def test_ritz_values_without_more_room_stay_those_of_the_known_steps():
    steps = [(0.5, 0.3), (0.4, 0.2), (0.6, 0.7), (3.0, 0.1), (0.01, 2.0)]
    found = known = Tridiagonal.start(3, jnp.zeros(()).dtype)
    for place, (length, ratio) in enumerate(steps):
        found = found.append(jnp.asarray(length), jnp.asarray(ratio))
        known = found if place <= 2 else known
    for name in ("pivots", "ratios", "count", "least", "most"):
        np.testing.assert_array_equal(getattr(found, name), getattr(known, name))


@pytest.mark.long
def test_many_outer_steps_do_not_wear_out_what_is_known_of_the_hessian():
    """The smallest eigenvalue is passed on with a safety margin, and these margins must not accumulate."""
    problem = system("like")
    inner, outer = hp.SGP(steps=1, step_size=1e-9), hp.optimizer("sgd", learning_rate=1e-9)
    found = hp.solve(problem.task, hp.PDBO(inner, hp.TreeCG(), outer, steps=80), NETWORK, key=0)
    assert found.status.reason in ("tolerance", "unsolved")  # the inner solver moves params by almost nothing
    estimates = hp.solve(problem.task, hp.PDBO(inner, hp.TreeCG(), outer, steps=2), NETWORK, key=0).costs
    assert found.costs.hessian_products < 40 * estimates.hessian_products


@pytest.mark.parametrize("scale", [1e-25, 1e12])
def test_neither_tiny_nor_huge_couplings_hide_an_error(scale):
    """The norm of B_i does not underflow, so a nonzero error is not reported as zero."""
    problem = system("ill-conditioned")
    scaled = problem._replace(couplings=scale * problem.couplings, direct=scale * problem.direct)
    found = estimate(scaled)
    assert found.status.error is not None
    assert scaled.error(found.value) <= found.status.error


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "engine", [hp.Simulate(), pytest.param(hp.Shard(devices=2), marks=pytest.mark.long), hp.Threads()], ids=type
)
@pytest.mark.long
def test_the_probe_follows_from_the_key_and_is_the_same_at_every_client_of_every_engine(engine):
    """Compare the probe's first residual, before any other operation has changed it."""

    def probe(key, engine):
        def first(state, ctx):
            return state.probe.first

        found = estimate(system("like"), engine=engine, record={"TreeCG": first}, key=key)
        return found.history["TreeCG"][0]

    one, same, other = probe(1, engine), probe(1, hp.Simulate()), probe(2, engine)
    assert np.all(one == one[0])
    np.testing.assert_allclose(one, same, rtol=1e-14)
    assert one[0] != other[0]
