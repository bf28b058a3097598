"""Effects of parties on the others: scores computed by hand, and a small table from its file to its rows."""

import effects
import numpy as np
import pytest
from effects import EffectsOfParties, compare, judge, read
from wide import float64  # noqa: F401

from hyperpush.base.errors import InvalidInput


def test_scores_leave_out_the_party_itself():
    true = np.array([[9.0, 1.0, 1.0], [-1.0, 9.0, -1.0], [2.0, 1.0, 9.0]])
    assert judge(true * [[0, 1, 1], [1, 0, 1], [1, 1, 0]], true) == {"others": 1.0, "sites": 1.0, "signs": 1.0}
    found = judge(true * [[1], [-1], [1]], true)
    # The effects on the others are 2, −2 and 3, with mean 1; the estimate of the second one is off by 4.
    assert found["others"] == pytest.approx(1 - 16 / (1 + 9 + 4))
    assert found["signs"] == pytest.approx(2 / 3)


def test_rows_are_means_over_seeds():
    way = {"sites": 1.0, "signs": 1.0, "rounds": 10, "floats": 20, "seconds": 0.5}
    rows = [{"cell": {"table": "heart", "seed": seed}, "parties": 4, "params": 15,
             "ways": {name: {**way, "others": seed} for name in effects.WAYS}} for seed in (0, 1)]  # fmt: skip
    first = next(compare(rows))
    assert (first["table"], first["way"], first["others"], first["rounds"]) == ("heart", "first order", 0.5, 10)
    assert list(compare([])) == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a table of three parties, one of which is too small."""
    draw, lines = np.random.default_rng(0), ["party,a,b,label"]
    for party, count in (("x", 30), ("y", 40), ("z", 25), ("small", 19)):
        rows = draw.normal(size=(count, 2))
        labels = rows @ [1.0, -1.0] + draw.normal(size=count) > 0
        lines += [f"{party},{a:.4f},{b:.4f},{int(label)}" for (a, b), label in zip(rows, labels, strict=True)]
    (tmp_path / "multisite").mkdir()
    (tmp_path / "multisite" / "heart.csv").write_text("\n".join(lines))
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    return tmp_path


def test_small_parties_are_left_out(folder, monkeypatch):
    assert read("heart").names == ("x", "y", "z")
    monkeypatch.delenv("HYPERPUSH_DATA")
    with pytest.raises(InvalidInput, match="HYPERPUSH_DATA"):
        read("heart")


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_a_table_is_measured_once(folder, monkeypatch):
    config = EffectsOfParties(tables=("heart",), seeds=1, file=str(folder / "cells.jsonl"))
    found = effects.run(config)
    by_way = {row["way"]: row for row in found["rows"]}
    assert by_way["retrain"]["others"] == by_way["retrain"]["sites"] == 1
    assert by_way["newton"]["others"] > 0.9
    assert by_way["newton"]["others"] > by_way["first order"]["others"]
    monkeypatch.setattr(effects, "measure", None)
    assert effects.run(config) == found
