"""The status at the end of bilevel algorithms: solved params, final gradient, growth and divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import sampled
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.tasks.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")
CLIENTS = 4
RING = hp.networks.Ring(CLIENTS)


@pytest.fixture(scope="module")
def made():
    with jax.enable_x64(True):
        return sampled(CLIENTS, 0)


def mean_gradient(made, hypers):
    """Return the mean hypergradient over clients at the exact common solution for these hypers, by NumPy."""
    slopes = made.slopes
    right = slopes.b - np.einsum("nhd,nh->nd", slopes.J, hypers)
    params = np.linalg.solve(slopes.H.mean(0), right.mean(0))
    return np.linalg.norm(slopes.common(hypers, np.tile(params, (CLIENTS, 1))).mean(0))


def test_single_loop_runs_know_whether_they_arrived_and_count_what_it_takes(made):
    def solve(steps, **options):
        method = hp.algorithms.MADSBO(steps, 0.1, 0.15, 0.2, tracked=True)
        return hp.solve(made.task, method, RING, key=0, every=steps, **options)

    few, many = solve(3), solve(300)
    for found, arrived in ((few, False), (many, True)):
        status, hypers = found.status, np.asarray(found.hypers)
        true = mean_gradient(made, hypers) / mean_gradient(made, np.asarray(made.task.hypers))
        assert status.gradient == pytest.approx(true, rel=1e-3, abs=1e-6)
        assert (status.converged, status.stationary) == (arrived, arrived)
    assert few.status.reason == "unsolved"
    assert "stationary (gradient" in repr(many)
    plain = solve(3, certify=False)
    assert (plain.status.converged, plain.status.reason) == (None, "not certified")
    assert (plain.status.gradient, plain.status.stationary) == (None, None)
    assert plain.costs.rounds < few.costs.rounds
    assert plain.costs.hessian_products < few.costs.hessian_products
    np.testing.assert_array_equal(plain.hypers, few.hypers)


@pytest.mark.long
def test_an_end_at_another_point_of_the_papers_is_named(made):
    for steps, arrived in ((3, False), (400, True)):
        method = hp.algorithms.INTERACT(steps, 0.05, 0.15)
        found = hp.solve(made.task, method, RING, key=0, every=steps)
        assert (found.status.converged, found.status.stationary) == (arrived, False)
        assert ("it is at x_L" in str(found.status)) == arrived


@pytest.mark.long
def test_an_end_at_x_m_is_named(made):
    method = hp.algorithms.MDBO(500, 0.05, 0.1, step_scale=0.7)
    found = hp.solve(made.task, method, RING, key=0, every=500)
    assert (found.status.converged, found.status.stationary) == (True, False)
    assert "it is at x_M" in str(found.status)


@pytest.mark.long
def test_nested_algorithms_take_the_gradient_from_their_first_and_last_step(made):
    outer = hp.optimizer("sgd", learning_rate=0.2)
    found = hp.solve(made.task, hp.CDBO(hp.TreeNewton(), hp.TreeCG(), outer, steps=4), RING, key=0)
    history = np.asarray(found.history.hypers)
    expected = mean_gradient(made, history[3]) / mean_gradient(made, history[0])
    assert found.status.gradient == pytest.approx(expected, rel=1e-4)
    assert found.status.stationary is False
    assert f"not stationary (gradient {found.status.gradient:.2g} of the start's)" in str(found.status)


@pytest.mark.filterwarnings("ignore:CDBO.stop.on")
@pytest.mark.long
def test_where_an_end_cannot_be_judged_the_status_says_why(made):
    constants = hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=5, C_Hz=1, C_Jz=1)
    noisy = hp.algorithms.LDPDSBO(3, 0.1, hp.privacy.Gaussian(0.1), constants, use="reused", checked=False)
    status = hp.solve(made.task, noisy, RING, key=0).status
    assert (status.converged, status.stationary) == (None, None)
    assert status.stationary_reason == "its messages carry noise, and judging would send clean ones"
    ended = hp.EarlyStopping("cost", "validation", patience=1)
    method = hp.CDBO(hp.SGP(5, 0.1), hp.TreeCG(), hp.optimizer("sgd", learning_rate=0.1), steps=2, stop=ended)
    stopped = hp.solve(made.task, method, RING, key=0).status
    assert (stopped.stationary, stopped.gradient) == (None, None)
    assert "early stopping" in stopped.stationary_reason


def test_a_start_that_is_stationary_up_to_rounding_says_so(made):
    at = made.task.at(hypers=jnp.tile(jnp.asarray(made.ends["x_G"]), (CLIENTS, 1)))
    status = hp.solve(at, hp.algorithms.MADSBO(300, 0.1, 0.15, 0.2, tracked=True), RING, key=0, every=300).status
    assert (status.converged, status.gradient, status.stationary) == (True, None, None)
    assert status.stationary_reason == "the start was stationary up to rounding"


def test_growth_is_noticed_and_a_divergence_keeps_its_history(made):
    def solve(steps):
        method = hp.algorithms.MDBO(steps, 0.05, 2.0)
        return hp.solve(made.task, method, RING, key=0)

    grown = solve(30)
    assert float(np.abs(grown.params).max()) > 1e8
    assert (grown.status.converged, grown.status.reason) == (False, "growing")
    assert "a million times larger than the start and the data" in str(grown.status)
    with pytest.raises(hp.Diverged) as caught:
        solve(3000)
    history = caught.value.history
    assert 10 < len(history) < 3000
    assert np.all(np.isfinite(history.cost))
    np.testing.assert_array_equal(history.steps[:2], [0, 15])
    trained = hp.train(made.task, hp.SGP(60, 5.0), RING, key=0)
    assert (trained.status.converged, trained.status.reason) == (False, "growing")


def nested(kind):
    return kind(hp.SGP(200, 0.5), hp.TrackedHGP(40), hp.optimizer("sgd", learning_rate=0.1), 2)


@pytest.mark.parametrize(
    ("verb", "method"),
    [
        (hp.train, hp.SGP(600, 0.5)),
        pytest.param(hp.solve, nested(hp.PDBO), marks=pytest.mark.long),
        pytest.param(hp.solve, nested(hp.CDBO), marks=pytest.mark.long),
    ],
    ids=["SGP", "PDBO", "CDBO"],
)
def test_growth_on_a_directed_ring_that_loses_messages_is_noticed(verb, method):
    """A client that hears nothing for long has hardly any mass, so its step along z/ω is far too long."""
    made = quadratic(10, 0, common=isinstance(method, hp.CDBO))
    engine = hp.Simulate(faults=hp.Faults(loss=0.3))
    found = verb(made, method, hp.networks.DirectedRing(10), key=0, engine=engine)
    assert 1e6 < np.abs(found.params).max() < np.inf
    assert (found.status.converged, found.status.reason) == (False, "growing")
