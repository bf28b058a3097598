"""The benchmark of training: that it runs, counts and reports."""

import json

import pytest

from hyperpush.bench import BENCHES, training
from hyperpush.bench.config import Training
from hyperpush.errors import InvalidInput
from hyperpush.runs.config import load_config
from hyperpush.runs.run import execute

pytestmark = pytest.mark.long

SMALL = Training(clients=(2, 4), batch=2, model="influence", rounds=1, repeats=1)
# 2 per weight and place: 24×24 places of 5×5×1×20, 8×8 of 5×5×20×20, a dense layer 320×10.
FORWARD = 2 * (24 * 24 * 25 * 20 + 8 * 8 * 25 * 20 * 20 + 320 * 10)


def test_the_benchmark_runs_and_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PRODUCT", 50)
    result, run = execute(BENCHES["training"], SMALL, tmp_path / "out")
    assert json.loads((run.path / "result.json").read_text()) == result
    sgp, hgp, _, twice, *_ = result["training"]
    assert (sgp["round"], hgp["round"]) == ("SGP", "HGP, S = 1")
    assert (sgp["exponent"], hgp["exponent"]) == (None, None)
    assert 2 ** twice["exponent"] == pytest.approx(twice["seconds"] / sgp["seconds"])
    images = 2 * 2
    assert sgp["gflops"] * sgp["seconds"] * 1e9 == pytest.approx(3 * FORWARD * images)
    assert hgp["gflops"] * hgp["seconds"] * 1e9 == pytest.approx(6 * FORWARD * images)
    for row in result["training"]:
        assert row["share"] == pytest.approx(row["gflops"] / row["product_gflops"])


@pytest.mark.parametrize("override", ["clients=[1]", "batch=0", "model=lenet", "rounds=0"])
def test_bad_options_are_named(override):
    with pytest.raises(InvalidInput, match=override.partition("=")[0]):
        load_config("training", [override], BENCHES)
