"""The robustness study at a small size: its counts, and that an unmarked wrong result is counted as such."""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.status import Reason
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.programs import Local
from hyperpush.programs.report import Report
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush.verbs import saved
from hyperpush_papers.robustness.config import FAMILIES, Robustness
from hyperpush_papers.robustness.families import UNSOLVABLE, draw
from hyperpush_papers.robustness.study import COUNTS, run_family

FIELDS = ["estimator", "dtype", "family", "network", "runs", *COUNTS, "median_rounds", "p90_rounds", "median_floats"]
SMALL = ('families=["mild", "singular"]', 'networks=["fully-connected"]', "seeds=2", "clients=3", "params=4")
CONFIG = Robustness(seeds=2, clients=3, params=4, hypers=2)


@pytest.mark.long
def test_a_small_study(tmp_path):
    experiment, config = load_config("robustness", [*SMALL, 'estimators=["TreeCG", "TrackedHGP"]'], experiments())
    execute(experiment, config, tmp_path / "run")
    result = saved.load(tmp_path / "run").result
    rows, status = result["families"], result["status"]
    assert [list(row) for row in rows] == [FIELDS] * 8
    for row in rows:
        assert row["runs"] == 2 == sum(row[name] for name in COUNTS)
    flagged = sum(row["wrong_flagged"] + row["right_flagged"] for row in rows)
    assert (status["converged"], status["runs"], status["failed"]) == (False, 16, flagged)
    found = {(row["estimator"], row["dtype"], row["family"]): row for row in rows}
    for dtype in ("float64", "float32"):
        assert found["TreeCG", dtype, "mild"]["right"] == 2
        assert found["TreeCG", dtype, "singular"]["wrong_flagged"] == 2
        assert found["TreeCG", dtype, "mild"]["median_floats"] > 4


class Stub(HypergradientEstimator):
    """Return a value that is right only by chance, and report `reason`."""

    info: ClassVar = hp.TreeCG.info
    reason: int = 0

    def program(self, problem):
        def answer(state, ctx):
            return replace(state, value=jnp.full_like(state.value, 7.0), report=Report.of(self.reason))

        return Local(answer)


@pytest.mark.parametrize(
    ("family", "reason", "count"),
    [
        ("mild", Reason.TOLERANCE, "wrong_flagged"),  # a claim of convergence is compared with TreeCG
        ("mild", Reason.FIXED_LENGTH, "wrong_silent"),
        ("mild", Reason.LIMIT, "wrong_flagged"),
        ("singular", Reason.TOLERANCE, "wrong_flagged"),  # the certificate of params sees the Hessian itself
    ],
)
def test_a_wrong_result_without_a_mark_is_counted(family, reason, count):
    network = hp.networks.FullyConnected(3)
    outcomes = run_family(CONFIG, Stub(reason=int(reason)), family, network, "float32")
    assert [outcome.kind for outcome in outcomes] == [count] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_what_they_are_called(family):
    case = draw(family, "ring", 3, 6, 20, 5)
    values = np.linalg.eigvalsh(case.hessians.mean(0))
    condition = values[-1] / values[0]
    local = np.linalg.eigvalsh(case.hessians)
    assert {
        "singular": abs(condition) > 1e14,
        "indefinite": values[0] < -0.01 * values[-1] and values[1] > 0,
        "indefinite-local": np.all(local[:, 0] < 0) and values[0] > 0,
        "scales": local[:, -1].max() == pytest.approx(1e4 * local[:, -1].min()),
        "disjoint": np.all(np.sum(case.hessians.sum(2) != 0, axis=0) == 1),
        "lossy-singular": abs(condition) > 1e14,
        "hidden": abs(condition) > 1e14
        and np.allclose(case.slopes @ np.linalg.eigh(case.hessians.mean(0))[1][:, 0], 0),
        "cancelling-1e2": left_over(case) == pytest.approx(1e-2, rel=0.5),
        "cancelling-1e4": left_over(case) == pytest.approx(1e-4, rel=0.5),
        "zero-third": np.sum(~np.any(case.hessians, axis=(1, 2))) == 2,
    }.get(family, 0.5 < condition / float(family.rpartition("-")[2] if "1e" in family else 3) < 2), condition
    # compare the closed form with a difference of the mean outer cost at the inner solution
    if family not in UNSOLVABLE:
        gradient, (n, hypers) = case.hypergradient(), case.direct.shape
        direction = np.random.default_rng(0).normal(size=(n, hypers))
        x = -np.linalg.solve(case.hessians.sum(0), np.einsum("nmd,nm->d", case.couplings, direction))
        cost = np.mean(case.slopes @ x + np.sum(case.direct * direction, axis=1))
        assert np.sum(gradient * direction) == pytest.approx(cost, rel=1e-9)


def left_over(case):
    """Return the size of the hypergradient relative to its direct term."""
    return np.linalg.norm(case.hypergradient()) / np.linalg.norm(case.direct / len(case.direct))


def test_the_trained_truth_is_a_difference_of_the_mean_outer_cost():
    case, step = draw("trained", "ring", 3, 6, 20, 5), 1e-5

    def cost(hypers):
        x = -np.linalg.solve(case.hessians.sum(0), np.einsum("nmd,nm->d", case.couplings, hypers))
        return np.mean(case.slopes @ x + 0.5 * x @ x + np.sum(case.direct * hypers, axis=1))

    direction = np.random.default_rng(0).normal(size=case.direct.shape)
    slope = (cost(case.direct + step * direction) - cost(case.direct - step * direction)) / (2 * step)
    assert np.sum(case.trained() * direction) == pytest.approx(slope, rel=1e-8)


@pytest.mark.long
def test_training_and_losses_change_the_verdict():
    network = hp.networks.Ring(3)
    with jax.enable_x64(True):
        kinds = {family: [each.kind for each in run_family(CONFIG, hp.TreeCG(), family, network, "float64")]
                 for family in ("trained", "lossy", "lossy-singular")}  # fmt: skip
    assert kinds["lossy"] == ["right"] * 2
    assert kinds["lossy-singular"] == ["wrong_flagged"] * 2
    assert "wrong_silent" not in kinds["trained"]
