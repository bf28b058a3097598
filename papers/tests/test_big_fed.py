"""The BiG-Fed study on the karate club: its parts checked by hand, a small run, and the options that it refuses."""

import json

import networkx as nx
import numpy as np
import pytest

from hyperpush.cli.app import main
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush_papers.big_fed import study
from hyperpush_papers.big_fed.config import BigFed
from hyperpush_papers.big_fed.study import draw_club, draw_functions, methods, rewire
from hyperpush_papers.big_fed.tuning import best_of

WEIGHTS = (nx.to_numpy_array(nx.karate_club_graph()) > 0).astype(float)


def test_examples_are_of_the_functions():
    config = BigFed(examples=20)
    made = draw_club(config, WEIGHTS, 4)
    amplitude, multiplier = draw_functions(WEIGHTS, config.multipliers, np.random.default_rng(4))
    assert (multiplier.min(), multiplier.max()) == pytest.approx((0.1, 0.6))
    for inputs, outputs in (made.train, made.validation, made.test):
        assert inputs.shape == (34, 20, 1)
        assert np.abs(inputs).max() <= 5
        np.testing.assert_allclose(outputs, amplitude[:, None] * np.sin(multiplier[:, None] * inputs[..., 0]))
    assert not np.array_equal(made.train[0], made.test[0])
    assert np.ptp(made.params, axis=0).max() == 0
    assert np.ptp(draw_club(BigFed(same_start=False), WEIGHTS, 4).params, axis=0).max() > 0
    raw = draw_functions(WEIGHTS, "raw", np.random.default_rng(4))[1]
    np.testing.assert_allclose(multiplier, 0.1 + 0.5 * (raw - raw.min()) / np.ptp(raw))


def test_rewiring_keeps_everybodys_number_of_neighbors():
    other = rewire(WEIGHTS, np.random.default_rng(0))
    np.testing.assert_array_equal(other.sum(0), WEIGHTS.sum(0))
    assert np.sum((other > 0) & (WEIGHTS > 0)) < 0.6 * np.sum(WEIGHTS > 0)


def test_every_method_has_as_many_choices():
    everyone = methods(BigFed(), WEIGHTS)
    assert {len(set(method.steps)) for method in everyone} == {8}
    assert len(everyone) == 12
    errors = np.ones((3, 2, 5, 3))
    errors[0, 0, 3, 1], errors[1, :, :, 1] = np.nan, 0.5
    errors[2, :, :, 2] = 0  # test losses must not influence the choice
    assert best_of(errors) == 1
    some = everyone[0]._replace(steps=[(0.1, 1.0), (0.2, 1.0), (0.3, 2.0)])
    assert [some.at_edge(place) for place in range(3)] == [True, False, True]


def test_in_small_private_models_win(tmp_path, monkeypatch):
    """Private models converge to each client's least-squares slope; one slope for all clients does worse."""
    chosen = ("BiG-Fed", "Local", "FedAvg")
    everyone = study.methods
    monkeypatch.setattr(study, "methods", lambda *a: [each for each in everyone(*a) if each.name in chosen])
    some = ("rounds=80", "seeds=2", "examples=30", "rates=[0.05, 0.2]", "outer_steps=[0.01]", "seed=3")
    experiment, config = load_config("big-fed", some, experiments())
    assert isinstance(config, BigFed)
    _, run = execute(experiment, config, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [(row["method"], row["seed"]) for row in found["rows"]] == [(name, s) for name in chosen for s in (3, 4)]
    assert all(len(row["test_loss"]) == 80 and row["test_loss"][-1] == row["final"] for row in found["rows"])
    final = {(row["method"], row["seed"]): row["final"] for row in found["rows"]}
    for seed in (3, 4):
        made = draw_club(config, WEIGHTS, seed)
        (x, y), (u, v) = ((inputs[..., 0], outputs) for inputs, outputs in (made.train, made.test))
        own = (x * y).mean(1) / (x * x).mean(1)
        common = (x * y).mean() / (x * x).mean()
        best = ((own[:, None] * u - v) ** 2).mean()
        for name in ("BiG-Fed", "Local"):
            assert final[name, seed] == pytest.approx(best, rel=0.02)
        assert final["FedAvg", seed] == pytest.approx(((common * u - v) ** 2).mean(), rel=0.02)
    assert len(found["correlation_by_seed"]) == 2
    assert found["correlation_inner_outer"] > 0.9
    assert found["frozen"]["outer"][0] > found["frozen"]["outer"][-1]
    assert {path.stem for path in run.figures} == {"inner-and-outer", "test-loss"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("multipliers=[0.6, 0.1]", "multipliers"),
        ("clusters=[40]", "clusters: got 40; allowed: at most 34"),
        ("rates=[]", "rates"),
        ("network=rign", "ring"),
        ("network=star", "star, where no client ever hears a negative sample"),
        ("damping=0", "damping"),
    ],
)
def test_what_cannot_be_used_ends_in_one_line(setting, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", "big-fed", "-s", setting])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*"))
