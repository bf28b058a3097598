"""The benchmark of memory: what it counts, and that it runs and reports."""

import json

import pytest

from hyperpush.bench import BENCHES
from hyperpush.bench.config import Memory
from hyperpush.bench.memory import prepare
from hyperpush.errors import InvalidInput
from hyperpush.runs.config import load_config
from hyperpush.runs.run import execute

PARAMETERS, CLASSES = 13_750, 10
SMALL = Memory(clients=3, examples=2, model="influence", steps=1, methods=("hgp",), batches=(2,))


def test_states_are_counted():
    hgp, tracked, automatic = (prepare(SMALL, method, None) for method in ("hgp", "tracked", "automatic"))
    assert {hgp.parameters, tracked.parameters, automatic.parameters} == {PARAMETERS}
    assert hgp.numbers == 2 * (PARAMETERS + CLASSES) + 1  # params and hypers, u and v, and ω
    assert (automatic.numbers - tracked.numbers) // PARAMETERS == 2 * (5 - 1)  # two vectors for each change it keeps


def test_the_benchmark_runs_and_reports(tmp_path):
    result, run = execute(BENCHES["memory"], SMALL, tmp_path / "out")
    assert json.loads((run.path / "result.json").read_text()) == result
    (row,) = result["memory"]
    assert {name: row[name] for name in ("method", "batch", "parameters", "vectors", "products")} == {
        "method": "hgp",
        "batch": 2,
        "parameters": PARAMETERS,
        "vectors": 2,
        "products": 1,
    }
    assert row["states_megabytes"] == pytest.approx(3 * 4 * (2 * (PARAMETERS + CLASSES) + 1) / 2**20)
    assert row["seconds_per_product"] > 0
    assert row["peak_megabytes"] is None or row["peak_megabytes"] > row["states_megabytes"]
    assert result["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    "override", ["clients=1", "examples=0", "methods=[]", "model=lenet", "batches=[-1]", "steps=0"]
)
def test_bad_options_are_named(override):
    with pytest.raises(InvalidInput, match=override.partition("=")[0]):
        load_config("memory", [override], BENCHES)
