"""The error study at a small size shows what Terashita and Hara's theorems predict."""

from itertools import pairwise

import numpy as np
import pytest

from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush.verbs import saved

pytestmark = pytest.mark.long

SMALL = (
    "runs=4",
    "inner_steps=3000",
    "order=300",
    "pushes=[1, 20]",
    "trend_pushes=20",
    "trend_batches=[5, 20]",
    "trend_inner_steps=[20, 200]",
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    experiment, config = load_config("error-study", SMALL, experiments())
    folder = tmp_path_factory.mktemp("study") / "run"
    execute(experiment, config, folder)
    return saved.load(folder)


def error(study, pushes, batch, order):
    rows = study.result["errors"]
    (row,) = [r for r in rows if (r["pushes"], r["batch"], r["order"]) == (pushes, batch, order)]
    return row["error_mean"]


def test_full_batch_errors_fall_with_order_and_pushes(study):
    norm = study.result["true_norm"]
    assert 0.5 < norm < 2
    assert error(study, 20, 100, 200) < 0.01 * norm
    assert error(study, 20, 100, 300) < 1e-4 * norm
    assert error(study, 1, 100, 300) > 100 * error(study, 20, 100, 300)
    falling = [error(study, 20, 100, order) for order in (10, 50, 100, 200)]
    assert all(b < a / 2 for a, b in pairwise(falling))


def test_mini_batches_level_off_above_zero(study):
    late, later = error(study, 20, 20, 200), error(study, 20, 20, 300)
    assert late == pytest.approx(later, rel=0.2)
    assert later > 30 * error(study, 20, 100, 300)


def test_trends(study):
    small, large = (row["error_mean"] for row in study.result["by_batch"])
    assert small > 1.5 * large
    early, late = study.result["by_inner_steps"]
    assert early["distance"] > 5 * late["distance"]
    assert early["error_mean"] > 5 * late["error_mean"]


def test_the_run_folder_has_everything(study):
    assert len(study.metrics) == 4
    assert len(study.metrics[0]["error_mean"]) == 300
    assert study.params["inner-solution"].shape == (3, 6)
    assert np.allclose(study.params["inner-solution"][0], study.params["inner-solution"][2], atol=1e-3)
    for name in ("errors.png", "trends.png"):
        assert (study.path / "figures" / name).stat().st_size > 10_000
