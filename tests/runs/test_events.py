"""Events: their first fields, incomplete lines, and the output of every writer."""

import json

import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.runs.events import append_event, event, read_events, write_events


def test_the_first_fields_are_always_the_same():
    found = event("state", {"round": 3, "step": 2, "loop": "SGP", "client": "ada"})
    assert list(found) == ["time", "kind", "client", "loop", "step", "round"]
    with pytest.raises(InvalidInput, match="kind: got 'mine'"):
        event("record", {"kind": "mine"})


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for step in range(2):
        append_event(file, event("row", {"step": step, "cost": np.float32(0.5)}))
    for end in ('{"time": 1, "ki', '{"time": 1, "kind": "row"}'):
        whole = file.read_text()
        file.write_text(whole + end)
        assert [each["step"] for each in read_events(file)] == [0, 1]
        file.write_text(whole)
    write_events(file, read_events(file)[1:])
    assert [each["step"] for each in read_events(file)] == [1]


def test_the_hook_writes_rows(tmp_path):
    task, solver = hp.tasks.quadratic(3, 0), hp.SGP(steps=4, step_size=0.1)
    hook = hp.hooks.JSONLines(tmp_path / "rows.jsonl")
    trained = hp.train(task, solver, hp.networks.Ring(3), key=0, every=2, hooks=[hook])
    found = read_events(tmp_path / "rows.jsonl")
    assert [each["step"] for each in found] == [0, 2, 4]
    assert {(each["kind"], each["loop"]) for each in found} == {("row", "SGP")}
    assert trained.history is not None
    np.testing.assert_allclose([each["cost"] for each in found], trained.history.cost.mean(axis=1), rtol=1e-6)
    assert all(json.dumps(each, allow_nan=False) for each in found)
