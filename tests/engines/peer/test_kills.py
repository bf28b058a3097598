"""Peers are killed (SIGKILL) at random rounds: some restart, some do not, and the others finish with their answer."""

import json

import numpy as np
import pytest
from engines.peer.parties import averaging, values

from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy.swarm import Processes, schedule

ROUNDS = 120


def run(base, clients, seed, kill, restart, close_after=15.0):
    names = [f"p{number}" for number in range(clients)]
    options = {"close_after": close_after, "longest_wait": 0.5}
    processes = Processes(base, averaging, (str(base), names, free_ports(clients), ROUNDS, options))
    kills = schedule(names, kill, restart, ROUNDS, seed)
    processes.run(names, kills, 300)
    found = {}
    for name in names:
        path = base / name / "found.json"
        found[name] = json.loads(path.read_text()) if path.exists() else None
    return names, kills, processes.ends, found


def check(names, kills, ends, found):
    """Check that the remaining parties hold their exact average and all of their mass."""
    gone = {kill.name for kill in kills if kill.again_after is None and ends[kill.name] == -9}
    left = [name for name in names if name not in gone]
    assert {name: ends[name] for name in left} == dict.fromkeys(left, 0)
    assert all(found[name] is None for name in gone)
    rows = [names.index(name) for name in left]
    truth = values(len(names))[rows]
    assert all(found[name]["closed"] == sorted(names.index(each) for each in gone) for name in left)
    np.testing.assert_allclose(sum(found[name]["mass"] for name in left), len(left), rtol=1e-12)
    np.testing.assert_allclose(sum(np.asarray(found[name]["w"]) for name in left), truth.sum(0), atol=1e-10)
    for name in left:
        np.testing.assert_allclose(np.asarray(found[name]["w"]) / found[name]["mass"], truth.mean(0), atol=1e-6)
    return gone, [name for name in left if found[name]["resumed"]]


@pytest.mark.faults
def test_one_of_four_is_killed_and_comes_back(tmp_path):
    names, kills, ends, found = run(tmp_path, 4, seed=0, kill=1, restart=1, close_after=120.0)
    gone, resumed = check(names, kills, ends, found)
    assert (gone, resumed) == (set(), [kills[0].name])


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(20))
def test_two_of_eight_are_killed_and_one_comes_back(seed, tmp_path):
    names, kills, ends, found = run(tmp_path, 8, seed, kill=2, restart=1)
    gone, resumed = check(names, kills, ends, found)
    assert ([*resumed], gone) == ([kills[0].name], {kills[1].name})
