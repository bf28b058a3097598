"""The memory benchmark counts the right arrays, runs and reports."""

import memory
import pytest
from images import images
from memory import ESTIMATORS, Memory, state_sizes
from script import read

from hyperpush.networks import RandomDirected

PARAMETERS, CLASSES = 13_750, 10
SMALL = Memory(clients=3, examples=2, model="influence", batches=(2,))


def test_states_are_counted():
    task, network = images("influence", 3, 0, 2), RandomDirected(3)
    hgp, tracked, tree = (state_sizes(task, each, network) for each in ESTIMATORS.values())
    assert {hgp[0], tracked[0], tree[0]} == {PARAMETERS}
    assert hgp[1] == 2 * (PARAMETERS + CLASSES) + 1  # params and hypers, u and v, and ω
    assert tracked[1] // PARAMETERS == 1 + 6  # params, and the six vectors that its docstring lists
    # Params, the outer gradient, x; residual, direction and product of each of two right-hand sides.
    assert tree[1] // PARAMETERS == 3 + 2 * 3


@pytest.mark.long
def test_the_benchmark_runs_and_reports(monkeypatch):
    monkeypatch.setattr(memory, "ESTIMATORS", {"HGP": ESTIMATORS["HGP"]})
    result = memory.run(SMALL)
    (row,) = result["memory"]
    assert {name: row[name] for name in ("method", "batch", "parameters", "vectors", "products")} == {
        "method": "HGP",
        "batch": 2,
        "parameters": PARAMETERS,
        "vectors": 2,
        "products": 2,
    }
    assert row["states_megabytes"] == pytest.approx(3 * 4 * (2 * (PARAMETERS + CLASSES) + 1) / 2**20)
    assert row["seconds_per_product"] > 0
    assert row["peak_megabytes"] is None or row["peak_megabytes"] > row["states_megabytes"]
    assert result["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("option", "value"), [("clients", "1"), ("examples", "0"), ("model", "lenet"), ("batches", "-1")]
)
def test_bad_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        read(Memory, [f"--{option}", value])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]
