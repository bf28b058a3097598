"""Every study gives what it gave before, at its smallest size; every draw, bit by bit."""

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
