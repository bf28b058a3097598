"""The comparison of bilevel algorithms: it covers all of them, and its cheap cases are correct."""

import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.methods.registry import registered
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush_papers.bilevel_quadratic.config import BilevelQuadratic
from hyperpush_papers.bilevel_quadratic.study import algorithms


def test_every_declared_algorithm_takes_part():
    made = algorithms(BilevelQuadratic())
    agreeing = {name for name, each in registered("algorithms").items() if each.info.fixed_point}
    assert agreeing == set(registered("algorithms")) - {"PDBO"}
    assert {type(algorithm).__name__ for _, algorithm in made} == agreeing
    assert all(label.replace(",", "").split()[0] == type(algorithm).__name__ for label, algorithm in made)
    estimators = [
        type(algorithm.options()["hypergradient"]).__name__ for label, algorithm in made if label.startswith("CDBO +")
    ]
    assert estimators == ["HGP", "TrackedHGP"]
    assert len({label for label, _ in made}) == len(made)


def test_rows_and_curves_of_some(tmp_path):
    some = ("methods=['INTERACT', 'LDPDSBO']", "falling=3000", "steps=[0.05, 0.025]", "passes=30")
    experiment, config = load_config("bilevel-quadratic", some, experiments())
    result, _ = execute(experiment, config, tmp_path / "run")
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["INTERACT", "LDPDSBO, falling steps", "LDPDSBO, step 0.05", "LDPDSBO, step 0.025"]
    local, coarse, fine = rows["INTERACT"], rows["LDPDSBO, step 0.05"], rows["LDPDSBO, step 0.025"]
    assert local["fixed_point"] == "x_L"
    assert local["distance"] < 1e-6
    # The distance to the minimizer equals that of the fixed point, which the result reports separately.
    assert local["distance_to_global"] == pytest.approx(result["fixed_points_from_global"]["x_L"], rel=1e-6)
    assert local["distance_to_global"] > 0.1
    assert 0.4 < fine["distance"] / coarse["distance"] < 0.6
    assert rows["LDPDSBO, falling steps"]["distance"] < fine["distance"]
    # x and its tracker have 3 hypers each; x, y and z have 3 + 4 + 4 numbers.
    assert local["floats_per_client"] == 1000 * 6
    assert coarse["floats_per_client"] == 600 * 11
    assert coarse["rounds"] == 600
    for curve, row in zip(result["curves"], result["rows"], strict=True):
        assert curve["distance"][-1] == pytest.approx(row["distance"], rel=1e-6, abs=1e-12)
        assert curve["floats_per_client"][-1] == pytest.approx(row["floats_per_client"])
        assert curve["distance"][-1] < curve["distance"][0]


def test_unknown_methods_are_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"methods.*INTERAKT.*INTERACT"):
        execute(experiments()["bilevel-quadratic"], BilevelQuadratic(methods=("INTERAKT",)), tmp_path / "run")
