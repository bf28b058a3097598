"""The training benchmark runs, counts and reports."""

import pytest
import training
from script import read
from training import Training

pytestmark = pytest.mark.long

SMALL = Training(clients=(2, 4), batch=2, model="influence", rounds=1, repeats=1)
# Two operations per weight and position: 24×24 positions of 5×5×1×20, 8×8 of 5×5×20×20, and a dense layer of 320×10.
FORWARD = 2 * (24 * 24 * 25 * 20 + 8 * 8 * 25 * 20 * 20 + 320 * 10)


def test_the_benchmark_runs_and_reports(monkeypatch):
    monkeypatch.setattr(training, "PRODUCT", 50)
    result = training.run(SMALL)
    sgp, hgp, _, twice, *_ = result["training"]
    assert (sgp["round"], hgp["round"]) == ("SGP", "HGP, S = 1")
    assert (sgp["exponent"], hgp["exponent"]) == (None, None)
    assert 2 ** twice["exponent"] == pytest.approx(twice["seconds"] / sgp["seconds"])
    images = 2 * 2
    assert sgp["gflops"] * sgp["seconds"] * 1e9 == pytest.approx(3 * FORWARD * images)
    assert hgp["gflops"] * hgp["seconds"] * 1e9 == pytest.approx(6 * FORWARD * images)
    for row in result["training"]:
        assert row["share"] == pytest.approx(row["gflops"] / row["product_gflops"])


@pytest.mark.parametrize(("option", "value"), [("clients", "1"), ("batch", "0"), ("model", "lenet"), ("rounds", "0")])
def test_bad_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        read(Training, [f"--{option}", value])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]
