"""Every study gives its expected numbers at its smallest size, and every draw its expected values."""

import numpy as np
import pytest
import reference

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", reference.names())
def test_results_are_as_before(name):
    case = reference.CASES.get(name)
    if case and case.needs_data and not reference.has_data():
        pytest.skip("needs the data sets of HYPERPUSH_DATA")
    relative = case.relative if case else 0.0
    found = list(reference.differences(reference.compute(name), reference.read(name), relative))
    more = f"\n… and {len(found) - 20} more" if len(found) > 20 else ""
    assert not found, (
        "\n".join(found[:20]) + more + f"\nexpected: {reference.read('made_on')}\nhere: {reference.here()}"
    )


def test_a_difference_is_told_by_its_place():
    expected = {"rows": [{"cost": 2.0, "name": "a"}], "kept": 1e-17, "gone": 1}
    found = {"rows": [{"cost": 2.0 * (1 + 1e-8), "name": "b"}, {}], "kept": 2e-17, "new": 1}
    told = list(reference.differences(found, expected))
    places = [".gone: missing", ".new: not expected", ".rows: 2 entries", ".rows[0].cost: 2.0", ".rows[0].name: 'b'"]
    assert [line[: len(place)] for line, place in zip(told, places, strict=True)] == places


def test_a_draw_that_moves_by_more_than_rounding_is_told():
    drawn = {"whole": np.arange(5), "floats": np.linspace(0, 1, 5)}
    expected = reference.digest(drawn)
    assert not list(reference.differences(reference.digest({**drawn, "floats": drawn["floats"] + 1e-15}), expected))
    for changed in (
        {"whole": np.arange(5)[::-1]},
        {"floats": drawn["floats"][::-1]},
        {"floats": drawn["floats"] + 1e-6},
    ):
        assert list(reference.differences(reference.digest({**drawn, **changed}), expected))


def test_of_a_status_its_verdict_is_kept():
    status = {"converged": False, "reason": "unsolved", "residual": 0.5, "gradient": None}
    assert reference.kept({"status": status}) == {"status": {name: status[name] for name in list(status)[:3]}}
