"""Reasons for ending that no other test covers, and the combination of several statuses."""

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from systems import system
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.base.status import Reason
from hyperpush.programs.report import Report

NETWORK = hp.networks.RandomDirected(6)


def quiet(estimator, **options):
    """Return an algorithm whose hypers stay at the solution."""
    inner, outer = hp.SGP(steps=1, step_size=1e-9), hp.optimizer("sgd", learning_rate=1e-60)  # rounds to 0 in float32
    return hp.PDBO(inner, estimator, outer, steps=2, **options)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", [hp.TrackedHGP(tolerance=1e-10), hp.TreeCG(tolerance=1e-10)], ids=type)
def test_terms_that_cancel_are_inaccurate(method):
    """By construction v_i = g_i/n − B_i q is 0, so rounding leaves no correct digit of it."""
    problem = system("like")
    q = np.linalg.solve(problem.hessians.sum(0), problem.sources.sum(0)) / 6
    found = hp.hypergradient(problem._replace(direct=6 * problem.couplings @ q).task, method, NETWORK, key=0)
    assert (found.status.converged, found.status.reason) == (False, "inaccurate")


@pytest.mark.usefixtures("float64")
def test_without_a_common_solution_tracked_steps_stall():
    found = hp.hypergradient(system("singular").task, hp.TrackedHGP(), NETWORK, key=0)
    assert (found.status.converged, found.status.reason) == (False, "stalled")


@pytest.mark.filterwarnings("ignore:PDBO.stop.on")  # the metric of early stopping does not matter here
@pytest.mark.long
def test_early_stopping_is_told_apart_from_convergence():
    task, stop = system("like").task, hp.EarlyStopping(lambda x, hyper, batch: jnp.sum(x**2), "validation", patience=1)
    for estimator, converged, says in (
        (hp.TreeCG(), True, "stopped by its metric, estimates converged"),
        (hp.HGP(2, 1, 0.1), None, "early stopping"),
        (hp.TreeCG(steps=2), False, "! not converged (limit"),
    ):
        status = hp.solve(task, quiet(estimator, stop=stop), NETWORK, key=0).status
        assert status.converged is converged
        assert str(status).startswith(says)
        assert status.reason == ("limit" if converged is False else "early-stopping")


def test_divergence_carries_a_status():
    with pytest.raises(hp.Diverged) as caught:
        hp.hypergradient(system("like").task, hp.HGP(2000, 1, 1e3), NETWORK, key=0)
    assert (caught.value.status.converged, caught.value.status.reason) == (False, "diverged")


def test_reports_of_several_estimates_are_the_worst_of_them():
    good, fixed = Report.of(Reason.TOLERANCE, 1e-6).judged(0.01, 0.002, -1), Report.of(Reason.FIXED_LENGTH)
    unsolved = Report.of(Reason.UNSOLVED, 1e-6).judged(0.5, 0.001, 0.2)
    status = Report.none().worst(good).worst(unsolved).worst(good).status()
    assert (status.converged, status.reason, status.runs, status.failed) == (False, "unsolved", 3, 1)
    # no error is reported, because the params are no solution
    assert (status.residual, status.error) == (pytest.approx(0.5), None)
    assert (status.disagreement, status.moved) == (pytest.approx(0.002), pytest.approx(0.2))
    both = good.worst(fixed).status()
    assert (both.converged, both.reason, both.error, both.runs) == (None, "fixed-length", None, 2)
    assert (both.residual, both.moved) == (pytest.approx(0.01), None)


def test_a_status_is_the_worse_of_its_own_and_that_of_the_params():
    unsolved, unknown, good = (
        hp.Status(False, "unsolved", residual=0.5),
        hp.Status(None, "not certified"),
        hp.Status(True, "tolerance", residual=0.001, disagreement=0.0),
    )
    # Of five converged estimates, only the final params were certified.
    one, five = (hp.Status(True, "tolerance", error=0.0, runs=runs).judged(unsolved) for runs in (1, 5))
    assert one == hp.Status(False, "unsolved", residual=0.5, failed=1)
    assert (five.error, five.failed) == (None, 0)
    assert str(five).endswith("a Newton step moves params by 0.5, at the end of 5 solves)")
    own = [hp.Status(True, "tolerance"), hp.Status(), hp.Status(False, "limit")]
    assert [(each.judged(good).converged, each.judged(good).residual) for each in own] == [
        (True, 0.001),
        (None, 0.001),
        (False, 0.001),
    ]
    assert [(each.judged(unknown).converged, each.judged(unknown).reason) for each in own] == [
        (None, "not certified"),
        (None, "not certified"),
        (False, "limit"),
    ]
    assert own[2].judged(unsolved).reason == "limit"
    assert Report.of(Reason.LIMIT, 1e30).status().error is None  # an error this large counts as unknown


def test_divergence_names_the_method_and_not_its_loops():
    problem = system("like")
    huge = problem._replace(hessians=1e38 * problem.hessians).task  # the curvature overflows
    for made, engine, method in (
        (problem.task, hp.Threads(), hp.TrackedHGP(step_size=1e30)),
        (huge, hp.Simulate(), hp.TrackedHGP()),
    ):
        with pytest.raises(hp.Diverged, match=r"^TrackedHGP diverged"):
            hp.hypergradient(made, method, NETWORK, key=0, engine=engine)


def test_several_results_say_the_first_that_failed_and_the_numbers_of_all():
    good = hp.Status(True, "tolerance", residual=0.01, error=1e-6, runs=3)
    bad, worse = (hp.Status(False, reason, error=0.1, runs=3, failed=2) for reason in ("limit", "ill-posed"))
    assert hp.Status.of_all([good, bad, worse]) == hp.Status(False, "limit", 0.01, error=0.1, runs=9, failed=4)
    unsolved = hp.Status(False, "unsolved", residual=0.3, runs=4)  # found at the end of the run
    assert "2 of 8 solves" in str(hp.Status.of_all([unsolved, unsolved]))
    assert "at the end of 4 solves" in str(hp.Status.of_all([unsolved]))
    assert hp.Status.of_all([good, hp.Status()]) == hp.Status(None, "fixed-length", 0.01, runs=4)


@pytest.mark.filterwarnings("ignore:on. 'validation'")
@pytest.mark.long
def test_tuning_marks_settings_whose_estimates_failed():
    task, network = system("like").task, NETWORK
    over = {"hypergradient.steps": [2, 100]}
    found = hp.tune(task, quiet(hp.TreeCG()), network, key=0, over=over, on="validation", seeds=2)
    assert [(row.status.converged, row.status.failed, row.status.runs) for row in found.rows] == [
        (False, 2, 2),
        (True, 0, 2),
    ]
    short = hp.tune(task, quiet(hp.TreeCG()), network, key=0, over={"hypergradient.steps": [2]}, on="validation")
    assert "! not converged (limit" in repr(short)


def test_infinity_is_none_in_json():
    """Params at zero with a nonzero solution have an infinite residual, which JSON cannot hold."""
    status = hp.Status(converged=False, reason="unsolved", residual=math.inf, moved=0.5)
    assert hp.Status(**json.loads(json.dumps(status.as_json(), allow_nan=False))) == replace(status, residual=None)
