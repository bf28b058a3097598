"""The forecast of speeds: windows of examples by hand, condensed examples by NumPy, and a run on generated speeds."""

import os

import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.cli.app import main
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush_papers.common.data.traffic import DAY, synthetic, traffic
from hyperpush_papers.traffic.study import condense, examples, scores


def test_examples_look_back_an_hour_and_ahead_an_hour():
    speeds = np.arange(60.0)[:, None] + np.array([0.0, 100.0])
    found = examples(speeds, 10, 40, 1, np.array([1.0, 2.0]), np.array([2.0, 4.0]), 24)
    assert found.inputs.shape == (2, 7, 12 + 3)
    np.testing.assert_allclose(found.inputs[1, 3, :12], (np.arange(13, 25) + 98) / 4)
    np.testing.assert_allclose(found.targets[0, 3], (13 + 23 - 1) / 2)
    np.testing.assert_array_equal(found.times, np.arange(33, 40))
    np.testing.assert_allclose(found.last[1], np.arange(21, 28) + 100)
    angle = 2 * np.pi * 36 / 24
    np.testing.assert_allclose(found.inputs[:, 3, 12:], [[1, np.sin(angle), np.cos(angle)]] * 2, atol=1e-12)


def test_condensed_examples_have_the_same_errors():
    made = synthetic(3, 3, 0)
    given = examples(made.speeds, 0, DAY, 2, made.speeds.mean(0), made.speeds.std(0), DAY)
    inputs, targets = condense(given)
    assert inputs.shape == (3, 18, 17)
    any_forecast = np.random.default_rng(0).normal(size=(3, 17))
    errors = [
        ((np.einsum("nmf,nf->nm", x, any_forecast) - y) ** 2).mean(1)
        for x, y in ((given.inputs, given.targets), (inputs, targets))
    ]
    np.testing.assert_allclose(*errors, rtol=1e-9)


def test_scores_by_hand():
    assert scores(np.array([1.0, 2, 3]), np.array([1.0, 4, 6])) == pytest.approx(
        {"mae": 5 / 3, "rmse": (13 / 3) ** 0.5}
    )


def test_in_small_on_generated_speeds(tmp_path, monkeypatch):
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    some = ("rounds=60", "seeds=1", "rates=[0.05, 0.1, 0.2]", "outer_steps=[0.01]", "width=4")
    experiment, config = load_config("traffic", some, experiments())
    result, _ = execute(experiment, config, tmp_path / "run")
    assert (result["source"], result["sensors"]) == ("synthetic", 40)
    found = {row["method"]: row for row in result["rows"]}
    assert list(found) == [
        "last value",
        "mean at the time of day",
        "own least squares",
        "BiG-Fed",
        "Local",
        "FedAvg",
    ]
    made = traffic("synthetic", seed=0)
    times = np.arange(5 * DAY + 23, 7 * DAY)
    truth = made.speeds[times]
    assert found["last value"]["mae"] == pytest.approx(np.abs(made.speeds[times - 12] - truth).mean())
    means = np.mean([made.speeds[day * DAY + times % DAY] for day in range(4)], axis=0)
    assert found["mean at the time of day"]["rmse"] == pytest.approx(((means - truth) ** 2).mean() ** 0.5)
    # Fit every sensor by summing over its examples one by one.
    known = made.speeds[: 4 * DAY]
    fit = []
    for sensor in range(40):
        own = (made.speeds[:, sensor] - known[:, sensor].mean()) / known[:, sensor].std()

        def table(when, own=own):
            waves = [f(2 * np.pi * k * when / DAY) for f in (np.sin, np.cos) for k in (1, 2)]
            return np.stack([*(own[when - 23 + lag] for lag in range(12)), np.ones(len(when)), *waves], axis=1)

        train = np.arange(23, 4 * DAY)
        weights = np.linalg.lstsq(table(train), own[train], rcond=None)[0]
        fit.append(table(times) @ weights * known[:, sensor].std() + known[:, sensor].mean())
    assert found["own least squares"]["mae"] == pytest.approx(np.abs(np.array(fit).T - truth).mean(), rel=1e-6)
    for name in ("BiG-Fed", "Local", "FedAvg"):
        assert found[name]["rmse"] < found["last value"]["rmse"]
        assert found[name]["mae"] <= found[name]["rmse"]
        ends = found[name]["steps"][0] == pytest.approx(0.05) or found[name]["steps"][0] == pytest.approx(0.2)
        assert found[name]["at_edge"] == ends
    told = {row["method"]: row["at_edge"] for row in result["summary"]}
    assert told == {name: row.get("at_edge") for name, row in found.items()}
    assert told["last value"] is None


@pytest.mark.skipif("HYPERPUSH_DATA" not in os.environ, reason="needs HYPERPUSH_DATA")
def test_the_week_of_los_angeles():
    made = traffic("los-loop")
    assert made.speeds.shape == (7 * DAY, 207)
    assert 1 <= made.speeds.min() < made.speeds.max() <= 70
    assert np.array_equal(made.nearness, made.nearness.T)
    assert not made.nearness.diagonal().any()


def write(folder, speeds, near):
    inside = folder / "traffic" / "los-loop"
    inside.mkdir(parents=True)
    (inside / "los_speed.csv").write_text(speeds)
    (inside / "los_adj.csv").write_text(near)


SPEEDS = "7,8\n" + "50,60\n" * 3 * DAY


@pytest.mark.parametrize(
    ("speeds", "near", "message"),
    [
        (SPEEDS, "1,0.5\n0.4,1\n", "los_adj.csv.*symmetric"),
        (SPEEDS, "1,0.5,0\n0.5,1,0\n", "los_adj.csv.*2×2"),
        (SPEEDS, "1,x\nx,1\n", "los_adj.csv.*numbers"),
        ("7,8\n50,60\n", "1,0\n0,1\n", "los_speed.csv.*864 rows"),
        (SPEEDS.replace("50,60\n", "nan,60\n", 1), "1,0\n0,1\n", "los_speed.csv.*finite"),
    ],
)
def test_broken_files_are_named(speeds, near, message, tmp_path, monkeypatch):
    write(tmp_path, speeds, near)
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    with pytest.raises(InvalidInput, match=message):
        traffic("auto")


def test_whole_files_are_read(tmp_path, monkeypatch):
    write(tmp_path, SPEEDS, "1,0.5\n0.5,1\n")
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    made = traffic()
    assert made.source == "los-loop"
    np.testing.assert_array_equal(made.speeds, [[50, 60]] * 3 * DAY)
    np.testing.assert_array_equal(made.nearness, [[0, 0.5], [0.5, 0]])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data=los-lop", "los-loop"),
        ("data=los-loop", "HYPERPUSH_DATA"),
        ("train_days=6", "a sum of at most 6"),
        ("harmonics=-1", "harmonics"),
    ],
)
def test_what_cannot_be_used_ends_in_one_line(setting, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["run", "traffic", "-s", setting])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*"))
