"""The combined study at a small size: data of clients, text of comparisons, and a spec that runs on peers."""

import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import hyperpush as hp
from hyperpush.deploy.options import read
from hyperpush.deploy.swarm import swarm
from hyperpush.spec import objects as spec
from hyperpush.spec.execute import execute
from hyperpush_papers.together.config import EXPERIMENT, Together
from hyperpush_papers.together.parties import deal
from hyperpush_papers.together.private import BOUNDS, PriceOfPrivacy
from hyperpush_papers.together.study import Story, auc, compare, verdict

SPEC = Path(__file__).parents[2] / "examples/together.toml"
TINY: dict[str, Any] = {"parties": 4, "examples": 6, "trusted": 2, "test": 5, "steps": 3, "outer_steps": 2, "order": 2}


def test_parties_own_different_images_and_every_second_pair_has_wrong_labels():
    made, right = deal(8, 0, mislabel=1.0), deal(8, 0, mislabel=0.0)
    bad = np.isin(np.arange(8), [2, 3, 6, 7])
    np.testing.assert_array_equal(made.wrong, np.broadcast_to(bad[:, None], made.wrong.shape))
    np.testing.assert_array_equal(made.train[1][bad], (right.train[1][bad] + 1) % 10)
    np.testing.assert_array_equal(made.train[1][~bad], right.train[1][~bad])
    for part in ("trusted", "test"):
        np.testing.assert_array_equal(getattr(made, part)[1], getattr(right, part)[1])
    turned = deal(8, 0).train[0][1]
    np.testing.assert_array_equal(np.rot90(turned, -1, axes=(1, 2)), np.rot90(made.train[0][1], -1, axes=(1, 2)))
    assert made.clusters == [(u, v) for u in range(8) for v in range(u + 1, 8) if u % 2 == v % 2]
    assert len(made.rewired) == len(set(made.rewired)) == len(made.clusters)
    assert all((u - v) % 2 for u, v in made.rewired)
    with pytest.raises(hp.InvalidInput, match="parties: got 100; allowed: at most 17"):
        deal(100, 0)
    with pytest.raises(hp.InvalidInput, match="test: got 999; allowed: at most 179"):  # 1797 // 8 − 40 − 5
        deal(8, 0, test=999)
    with pytest.raises(ValueError, match="a whole number from 4"):  # wrong labels belong to the second pair of parties
        Together(parties=2)


def test_comparisons_are_by_seed_and_a_gain_within_the_interval_of_its_seeds_is_none():
    """Gains are compared seed by seed; a gain within the confidence interval of its seeds counts as no gain.

    Gains of 0 and 0.3 have mean 0.15 and standard error 0.3/√2/√2 = 0.15. Gains of 0.3 and 0.1 have mean 0.2, which is
    two standard errors. Student's interval for two seeds reaches 12.7 standard errors.
    """
    common = {"accuracy_p10": None, "auc_wrong_labels": None, "bytes": 2, "converged": None}
    scores = {
        "together": (0.8, 0.9),
        "no graph": (0.8, 0.6),
        "no cleaning": (0.4, 0.5),
        "rewired graph": (0.9, 1.0),
        "one model": (0.5, 0.8),
    }
    rows = [
        {"step": "learn", "method": name, "seed": seed, "accuracy": own, **common}
        for name, each in scores.items()
        for seed, own in enumerate(each)
    ]
    main, *controls = compare(rows)
    assert (main["gain"], main["accuracy"], main["bytes"]) == (None, pytest.approx(0.85), 2)
    assert (controls[0]["gain"], controls[0]["standard_error"]) == (pytest.approx(0.15), pytest.approx(0.15))
    endings = [verdict(each).rpartition(" it ")[2] for each in controls]
    assert endings == ["does not pay", "pays", "costs", "does not pay"]
    two = {**controls[0], "gain": 0.3, "standard_error": 0.1}  # a gain of three standard errors
    assert [verdict({**two, "seeds": n}).rpartition(" it ")[2] for n in (4, 5)] == ["does not pay", "pays"]
    assert main["not_converged"] is None
    assert compare([{**row, "converged": row["seed"] == 0} for row in rows])[0]["not_converged"] == 1
    nothing = [{**row, "step": "score", "method": name} for row in rows[:2] for name in ("influence", "loss")]
    assert [(row["gain"], row["standard_error"]) for row in compare(nothing)] == [(None, None)] * 2  # rows without AUC
    assert auc(np.array([0.0, 2.0, 1.0, 1.0]), np.array([True, True, False, False])) == 0.5
    assert auc(np.array([0.0, 1.0, 1.0, 3.0]), np.array([True, True, False, False])) == 0.875
    assert auc(np.ones(2), np.zeros(2, bool)) is None


@pytest.mark.long
def test_the_first_step(tmp_path):
    result, _ = execute(EXPERIMENT, Together(**TINY, until="train", seeds=(0,)), tmp_path / "run")
    assert [row["method"] for row in result["rows"]] == [
        "one model", "everyone alone", "trusted data only", "right labels only"
    ]  # fmt: skip
    names = {"step", "method", "seed", "accuracy", "accuracy_p10", "auc_wrong_labels", "bytes", "epsilon", "converged"}
    assert all(set(row) == names for row in result["rows"])
    assert [row["bytes"] > 0 for row in result["rows"]] == [True, False, True, True]


@pytest.mark.long
def test_all_steps(tmp_path):
    result, _ = execute(EXPERIMENT, Together(**TINY, seeds=(0,), until="continue"), tmp_path / "run")
    by = {(row["step"], row["method"]): row for row in result["rows"]}
    assert len(by) == len(result["rows"]) == 4 + 10 + 3 + 14
    learned = [method for (step, method), row in by.items() if step == "learn" and row["auc_wrong_labels"] is not None]
    assert learned == ["together", "no graph", "rewired graph", "no personal part"]
    assert all((row["accuracy"] is None) == (step == "score") for (step, _), row in by.items())
    assert len(result["verdicts"]) == 3 + 9 + 2 + 13


@pytest.mark.long
def test_the_private_step_holds_its_epsilon_and_counts_every_release():
    """Train data are released in 2 steps of 3 solves and 2 products of 2 estimates, validation data once each."""
    small = {"parties": 4, "examples": 20, "trusted": 5, "test": 5, "steps": 2, "outer_steps": 2, "order": 2}
    price = PriceOfPrivacy(0, (8.0, 2.0), **small, data="digits")
    by = dict(price.rows())
    assert [row["epsilon"] for row in by.values()] == [
        None, None, *(pytest.approx(epsilon, rel=1e-2) for epsilon in (8, 8, 2, 2, 1e6)), 0, 0
    ]  # fmt: skip
    assert all(row["epsilon"] <= 8 for name, row in by.items() if "≤ 8" in name)
    assert all(row["epsilon"] <= 2 for name, row in by.items() if "≤ 2" in name)
    assert [row["bytes"] > 0 for row in by.values()] == [True] * 7 + [False] * 2
    private = price.task(2).private(noise=hp.privacy.Gaussian(1.0), **BOUNDS)
    spent = hp.budget(private, price.joined)
    assert spent.releases == {"train": 2 * 3 + 2 * 2, "validation": 2}
    images, _ = price.made.train
    np.testing.assert_allclose(np.linalg.norm(images, axis=(2, 3)), 1, rtol=1e-5)
    np.testing.assert_allclose(images.sum(axis=(2, 3)), 0, atol=1e-5)


def test_without_data_the_private_step_is_left_out_in_a_line(tmp_path, monkeypatch):
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    monkeypatch.setattr(Story, "rows", lambda self, wanted: [])
    written = StringIO()
    execute(EXPERIMENT, Together(**TINY, seeds=(0,)), tmp_path / "run", console=Console(file=written, width=200))
    assert "private: left out" in written.getvalue()


@pytest.mark.long
def test_a_swarm_of_four_ends_where_the_simulator_does(tmp_path):
    found = swarm(read(SPEC, count=4), 4, tmp_path / "run", seconds=600)
    with jax.enable_x64(True):
        expected = spec.read({k: v for k, v in tomllib.loads(SPEC.read_text()).items() if k != "precision"}).run()
    assert isinstance(expected, hp.Solution)
    folders = [hp.load(tmp_path / "run" / name) for name in found["peers"]]
    for name in ("clean", "mtl"):
        together = np.stack(
            [folder.arrays("hypers")[name].reshape(expected.hypers[name].shape[1:]) for folder in folders]
        )
        assert np.abs(together).max() > 0.1
        np.testing.assert_allclose(together, expected.hypers[name], atol=1e-5)
    for own, folder in enumerate(folders):
        for found_leaf, leaf in zip(
            jax.tree.leaves(folder.arrays("params")), jax.tree.leaves(expected.params), strict=True
        ):
            np.testing.assert_allclose(np.reshape(found_leaf, leaf[own].shape), leaf[own], atol=1e-5)
