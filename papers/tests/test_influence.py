"""The influence study at a small size, and the parts of it that can be computed by hand."""

import csv

import jax
import numpy as np
import pytest

from hyperpush.base.config import as_table
from hyperpush.base.errors import InvalidInput
from hyperpush.cli.app import main
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush.verbs import saved
from hyperpush_papers.influence import wrong_labels
from hyperpush_papers.influence.config import InfluenceStudy

pytestmark = pytest.mark.long

SMALL = (
    "examples=30",
    "steps=1500",
    "removals=8",
    "order=200",
    "pushes=20",
    "dampings=[0.5]",
    "unrolled=false",
    "groups=[6]",
    "hunt.seeds=1",
    "hunt.steps=200",
    "hunt.kinds=['systematic']",
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    experiment, config = load_config("influence", SMALL, experiments())
    folder = tmp_path_factory.mktemp("influence") / "run"
    execute(experiment, config, folder)
    return saved.load(folder)


def test_predictions_hold(study):
    result = study.result
    predicted, actual = np.array(result["pairs"]).T
    assert len(predicted) == 8
    assert result["model"] == "logistic"
    residual = np.sum((actual - predicted) ** 2) / np.sum((actual - actual.mean()) ** 2)
    assert result["r2"] == pytest.approx(1 - residual)
    assert result["r2"] > 0.95
    assert result["f1"] == 1
    assert np.all(np.diff(np.abs(predicted)) <= 0)
    assert result["timing"]["removals"] == 8
    (case,) = result["cases"]
    assert case["curvature"]["smallest"] > 0.01  # at least the L2 rate
    assert case["warnings"] == []
    damped, hgp = case["methods"]
    assert damped["r2"] < 0.7  # the damping is far too strong: all predictions shrink
    assert damped["slope"] > 2
    assert hgp["r2"] == pytest.approx(result["r2"], abs=1e-3)


def test_groups_and_clients(study):
    (case,) = study.result["cases"]
    rows = [*case["groups"], *case["leaving"]]
    assert [row["kind"] for row in rows] == ["random", "most harmful", "client", "client", "client"]
    newton, added, actual = (np.array([row[name] for row in rows]) for name in ("newton", "sum_of_scores", "actual"))
    assert np.all(np.abs(newton - actual) < np.abs(added - actual))
    assert rows[1]["actual"] < 0  # without the harmful records, all clients improve


def test_every_client_gets_its_own_ranking(study):
    for client in range(3):
        with (study.path / f"client-{client}" / "influence.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["instance"]) for row in rows] == list(range(30))
        scores, ranks = (np.array([float(row[name]) for row in rows]) for name in ("score", "rank"))
        np.testing.assert_array_equal(np.sort(ranks), np.arange(1, 31))
        assert np.all(np.diff(scores[np.argsort(ranks)]) >= 0)
    assert (study.path / "figures" / "removals.png").stat().st_size > 5_000


def test_the_hunt_finds_more_than_chance(study):
    found = {row["by"]: row["worst_20"] for row in study.result["label_noise"]["found"]}
    assert set(found) == {"influence", "shared loss", "local loss", "random"}
    assert found["influence"] > 0.6
    assert found["random"] < 0.5


@pytest.mark.parametrize("kind", ["random", "systematic"])
def test_wrong_labels_are_where_they_are_said_to_be(kind, monkeypatch):
    monkeypatch.setattr(wrong_labels, "SHARE", 0.2)
    with jax.enable_x64(False):
        made, flips, _ = wrong_labels.noisy_digits(kind, 3)
        monkeypatch.setattr(wrong_labels, "NOISY", 0)
        clean, _, _ = wrong_labels.noisy_digits(kind, 3)
    given, true = (np.asarray(each.train.examples[1]) for each in (made, clean))
    counts = np.asarray(made.train.counts)
    assert len(flips) == 2
    for client in range(5):
        wrong = given[client, : counts[client]] != true[client, : counts[client]]
        if client < 2:
            np.testing.assert_array_equal(wrong, flips[client])
            assert wrong.sum() == round(0.2 * counts[client])
            touched = np.unique(true[client][: counts[client]][wrong])
            assert len(touched) > 4 if kind == "random" else len(touched) <= 4
        else:
            assert not wrong.any()
    given, true = (np.asarray(each.validation.examples[1]) for each in (made, clean))
    np.testing.assert_array_equal(given, true)


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("hunt.kinds=[]", "hunt.kinds"),
        ("batches=[]", "batches"),
        ("images=3", "images"),
        ("model=tree", "model"),
        ("damping=-1", "damping"),
    ],
)
def test_options_that_cannot_be(setting, field):
    with pytest.raises(InvalidInput) as caught:
        load_config("influence", [setting], experiments())
    assert caught.value.field == field


def test_a_cnn_has_values_of_its_own_for_what_is_left_out():
    _, config = load_config("influence", ["model=cnn", "steps=7"], experiments())
    assert isinstance(config, InfluenceStudy)
    assert (config.steps, config.rate, config.batches, config.removals) == (7, 0.05, (0, 64), 20)
    assert InfluenceStudy(**as_table(config)) == config
    assert InfluenceStudy().batches == (0,)


def test_too_many_images_end_in_one_line(tmp_path, capsys):
    given = ["run", "influence", "--out", str(tmp_path / "run"), "-s", "model=cnn", "-s", "data=digits"]
    with pytest.raises(SystemExit) as ended:
        main([*given, "-s", "images=1798"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "images" in lines[0]
    assert list(tmp_path.iterdir()) == []
