"""The table of the statuses of all algorithms, compared with NumPy."""

import numpy as np
import pytest
from endings import METHODS, measure
from wide import float64  # noqa: F401

from hyperpush.algorithms.base import Algorithm
from hyperpush.methods.registry import registered

ALL = {
    name for name, each in registered("algorithms").items() if isinstance(each, type) and issubclass(each, Algorithm)
}


def test_every_algorithm_has_a_row():
    assert set(METHODS) == ALL - {"CDBOLocal"}  # left out, because it ends at x_L as five others do


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("steps", [3, 2000])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.long
def test_the_status_tells_few_steps_from_many_and_names_the_point(name, steps):
    row, nested, many = measure(name, steps, seed=1), name in ("PDBO", "CDBO"), steps == 2000
    reached = [point for point in ("x_G", "x_L", "x_M") if name != "PDBO" and row[point] < 0.02]
    assert row["converged"] == (many or nested)
    assert row["reason"] == ("tolerance" if many or nested else "unsolved")
    assert row["stationary"] == (row["true_gradient"] <= 0.01)
    assert row["at"] == ("" if not many or nested or "x_G" in reached else f"it is at {reached[0]}")
    if not nested:  # single loops report the gradient before the last update
        assert row["gradient"] == pytest.approx(row["true_gradient"], rel=1e-3, abs=1e-9)
    assert not many or bool(reached) or name == "PDBO"
    assert np.isfinite(row["gradient"])
