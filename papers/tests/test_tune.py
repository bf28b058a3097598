"""The tuning study: its calculations, then small runs with and without privacy."""

import signal

import jax.numpy as jnp
import numpy as np
import pytest
from linear import example_gradients
from sklearn.metrics import roc_auc_score
from wide import float64  # noqa: F401  (a fixture)

from hyperpush.base.errors import InvalidInput
from hyperpush.cli import app as cli
from hyperpush.privacy import ASSUMPTION
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush.tasks.cleaning import Labeled, cleaning, unit_rows
from hyperpush_papers.common.data.sources import available
from hyperpush_papers.tune.study import area, own_weights, refit

pytestmark = pytest.mark.long

D, C, M, L2 = 3, 4, 6, 0.05


def test_area_under_the_curve_with_ties():
    generator = np.random.default_rng(0)
    scores, clean = generator.integers(0, 8, 60).astype(np.float32), generator.random(60) < 0.6
    assert area(scores, clean) == pytest.approx(roc_auc_score(clean, scores), abs=1e-6)


def test_own_weights_are_those_of_a_clients_own_examples():
    everybodys = np.arange(12.0).reshape(1, 12) + 100 * np.arange(3).reshape(3, 1)
    own = np.array([[0, 1, 2, 3], [104, 105, 106, 107], [208, 209, 210, 211]])
    np.testing.assert_array_equal(own_weights(jnp.asarray(everybodys), np.zeros((3, 4), bool)), own)
    np.testing.assert_array_equal(own_weights(jnp.asarray(own, float), np.zeros((3, 4), bool)), own)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("slots", [np.broadcast_to(np.arange(M), (2, M)), None])
def test_a_refit_is_the_common_minimizer(slots):
    generator = np.random.default_rng(0)
    inputs = unit_rows(generator.normal(size=(2, M, D - 1)))
    labels, hypers = generator.integers(0, C, (2, M)), generator.normal(size=(2, M))
    part = Labeled(inputs, labels)
    made = cleaning(part, part, C, slots, L2)
    found = np.asarray(refit(made, jnp.asarray(hypers)))
    weights = 1 / (1 + np.exp(-hypers))
    slopes = [
        np.einsum("m,mdc->dc", w, example_gradients(a, b, found)) / M for w, a, b in zip(weights, *part, strict=True)
    ]
    np.testing.assert_allclose(np.mean(slopes, 0) + L2 * found, 0, atol=1e-5)
    with pytest.raises(InvalidInput, match="slots"):
        cleaning(part, part, C, np.zeros((2, M + 1), int), L2)


SMALL = ("clients=3", "examples=60", "validation=60", "outer=[4.0]", "inner=[1.0]", "points=3")


def test_cleaning_separates_wrong_labels(tmp_path, monkeypatch):
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    some = (*SMALL, "methods=['TTSA', 'PDBO + HGP', 'GBDSBO']", "iterations=120", "outer_steps=15", "order=20")
    experiment, config = load_config("tune", some, experiments())
    result, run = execute(experiment, config, tmp_path / "run")
    assert (result["task"], result["data"], result["privacy"]) == ("cleaning", "digits", None)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["GBDSBO", "TTSA", "PDBO + HGP"]
    # There are 65 × 10 params and 3 × 60 weights.
    assert f"{650**2:,} numbers" in rows["GBDSBO"]["left_out"]
    for name in ("TTSA", "PDBO + HGP"):
        row = rows[name]
        assert row["auc"] > 0.9
        assert row["accuracy_refitted"] > result["references"]["everything"]
        assert len(row["auc_by_client"]) == 3
        assert np.mean(row["auc_by_client"]) > 0.85
        curve = next(curve for curve in result["curves"] if curve["method"] == name)
        assert curve["auc"][-1] == pytest.approx(row["auc"])
        assert curve["floats_per_client"][-1] == row["floats_per_client"]
        assert curve["outer_cost"][-1] < curve["outer_cost"][0]
    # SGP pushes the params and ω in every step. In every outer step HGP pushes its vector and ω order × pushes times.
    assert rows["PDBO + HGP"]["floats_per_client"] == 651 * (16 * 20 + 15 * 20 * 4)
    assert {path.name for path in run.figures} == {
        *(f"cleaning-{metric}.png" for metric in ("accuracy", "outer_cost", "auc")),
        "weights.png",
    }
    assert all(path.exists() for path in run.figures)


def test_rates_with_privacy(tmp_path, monkeypatch):
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    some = (
        *SMALL,
        "task=l2",
        "methods=['TTSA', 'LDPDSBO', 'PDBO + HGP']",
        "iterations=40",
        "outer_steps=3",
        "inner=[0.3]",
        "privacy.inner=0.3",
        "privacy.epsilon=2.0",
        "privacy.iterations=10",
    )
    experiment, config = load_config("tune", some, experiments())
    result, _ = execute(experiment, config, tmp_path / "run")
    assert result["data"] == "synthetic"
    assert set(result["references"]) == {"start", "best_single_rate"}
    private, rows = result["privacy"], {row["method"]: row for row in result["rows"]}
    assert "reason" in private["TTSA"]
    assert not {"claimed", "epsilon", "delta", "assumes"} & set(private["TTSA"])
    for name in ("LDPDSBO", "PDBO + HGP"):
        row = private[name]
        # The claimed ε is below the requested one, but so close that no noise is wasted.
        assert 1.9 < row["claimed"] <= 2.0
        assert row["assumes"] == ASSUMPTION
        assert row["accuracy_without"] == rows[name]["accuracy"]
        assert row["cost_in_accuracy"] == pytest.approx(rows[name]["accuracy"] - row["accuracy"])
        assert row["cost_of_noise"] == pytest.approx(row["accuracy_same_settings"] - row["accuracy"])
        assert row["cost_of_settings"] == pytest.approx(rows[name]["accuracy"] - row["accuracy_same_settings"])
    assert private["LDPDSBO"]["rounds"] == 10
    assert private["LDPDSBO"]["floats_per_client"] == 10 * 3 * 61


@pytest.mark.skipif(not available("mnist"), reason="needs MNIST in the folder that HYPERPUSH_DATA names")
def test_cleaning_of_mnist(tmp_path):
    some = ("methods=['TTSA']", "outer=[4.0]", "inner=[1.5]", "points=3")
    experiment, config = load_config("tune", some, experiments())
    result, _ = execute(experiment, config, tmp_path / "run")
    row = result["rows"][0]
    assert result["data"] == "mnist"
    assert row["auc"] >= 0.9
    assert row["accuracy"] > result["references"]["everything"]


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("data=a9a", "data"),
        ("corrupted=1.5", "corrupted"),
        ("privacy.epsilon=0", "privacy.epsilon"),
        ("privacy.delta=1.0", "privacy.delta"),
        ("examples=2000", "clients"),
        ("methods=['TSTA']", "methods"),
        ("network=random-directed", "network"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, option, field):
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "tune", "-s", "methods=['SPDB']", "-s", option, "--out", str(tmp_path / "run"), "--json"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert field in said.err
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []
