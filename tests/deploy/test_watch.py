"""Warnings that a running party gives its user about certificates and code."""

import time
from types import SimpleNamespace
from typing import Any

from deploy.deployed import deployed

from hyperpush.deploy.watch import SOON, Watch


def watch(tmp_path, said):
    spec = {"task": {"name": "quadratic", "seed": 0}, "network": "fully-connected", "method": "TreeNewton"}
    return Watch(deployed(tmp_path / "run.toml", spec, 2), "alice", tmp_path, said.append)


def session(own, theirs) -> Any:
    members = SimpleNamespace(card=SimpleNamespace(ends=own))
    neighbors = {1: SimpleNamespace(name="bob", ends=theirs)}
    return SimpleNamespace(transport=SimpleNamespace(members=members, neighbors=neighbors))


def test_a_certificate_that_ends_within_a_day_is_a_warning_once_at_any_time_of_the_run(tmp_path):
    said, now = [], int(time.time())
    made = watch(tmp_path, said)
    made._warn_of_certificates(session(now + SOON + 60, 0))  # one certificate expires later, the other has no date
    assert said == []
    for _ in range(2):  # the second time, later in the same run
        made._warn_of_certificates(session(now + SOON - 60, now - 5))
    assert len(said) == 2
    assert said[0].startswith("alice: warning: alice's certificate ends at ")
    assert said[0].endswith("in 1,439 minutes; its links end with it")
    assert said[1] == "alice: warning: bob's certificate has ended; its links end with it"
