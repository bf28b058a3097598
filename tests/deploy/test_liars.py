"""One of four members lies: both modes refuse invalid content and name the liar; the guide covers other lies."""

import pytest
from deploy.liars import NAMES, outcome, run

REFUSED = {"nan": "not finite", "infinite": "not finite", "weight": "wrong", "shape": "wrong structure"}


@pytest.mark.faults
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_content_that_cannot_be_true_is_refused_and_its_sender_named(mode, kind):
    found, told = run(mode, kind)
    named, codes, percent, said = outcome(found)
    assert told > 0
    assert named, said
    assert all(REFUSED[kind] in line.replace("-", " ") and NAMES[3] in line for line in said)
    if mode == "synchronous":
        assert codes == [5, 5, 5]
        return
    assert codes == [0, 0, 0]
    assert [each.status.converged for each in found[:3]] == [False] * 3
    assert percent is not None
    assert percent > 80  # of a model trained on the other three parties' data
