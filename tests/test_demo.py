"""The demo, `examples/hospitals.py`: its planted errors, and that it runs and finds them."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("hospitals", ROOT / "examples/hospitals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_plants_what_it_says_and_nothing_else(demo):
    planted, clean = demo.deal(0), demo.deal(0, plant=False)
    assert sum(len(own) for part in (clean[0], clean[2]) for own in part.values()) == 569
    differs = {name: np.flatnonzero(planted[0][name]["benign"] != clean[0][name]["benign"]) for name in demo.SHARES}
    assert {name: len(rows) for name, rows in differs.items()} == {
        "A": 0, "B": demo.PLANTED, "C": 0, "D": len(planted[0]["D"]), "E": 0
    }  # fmt: skip
    assert differs["B"].tolist() == sorted(planted[3])
    assert planted[3].min() >= demo.CHECKED  # checked records keep their labels
    for name in demo.SHARES:
        for part in (1, 2):
            assert planted[part][name].equals(clean[part][name])


def test_models_alone_read_answers_in_the_coding_of_their_hospital(demo):
    train, _, test, _ = demo.deal(0)
    # without D's label coding the accuracy would be four fifths of that
    assert demo.accuracy(demo.fit_alone(train), test) > 85
    assert demo.accuracy(lambda name, columns: demo.split(test[name])[1], test) == 100


@pytest.mark.long  # it audits, retrains and learns weights: 30 CPU seconds with an empty cache
def test_it_names_the_hospital_with_swapped_labels_and_writes_the_page(demo, tmp_path, monkeypatch, capsys):
    page, wide = tmp_path / "hospitals.html", jax.config.read("jax_enable_x64")
    monkeypatch.setattr(sys, "argv", ["hospitals.py", "--page", str(page)])
    try:
        demo.main()
    finally:
        jax.config.update("jax_enable_x64", wide)
    said = capsys.readouterr().out
    table = re.findall(r"^ +([\d.]+)  (.+)$", said.split("\n\n")[0], re.MULTILINE)
    scores = {title.split(",")[0] if "alone" in title else title: float(score) for score, title in table}
    assert len(table) <= 6
    together = scores["together"]
    assert max(scores.values()) > together
    assert re.search(r"^Named as harmful: D", said, re.MULTILINE)
    assert len(re.findall(r"^  row ", said, re.MULTILINE)) == demo.PLANTED
    assert page.is_file()
    assert page.with_suffix(".png").is_file()
