"""The benchmark of several processes runs the stated program on the devices of this process."""

import json
import sys
from dataclasses import asdict, replace

import jax
import pytest
import scale
from scale import Scale, prepare, take_part
from script import main

from hyperpush.base.errors import InvalidInput
from hyperpush.engines.planning import Planner
from hyperpush_papers.common.models import cnn

SMALL = Scale(clients=4, batch=2, rounds=2, model="influence")


def test_each_client_sends_its_model_in_each_round():
    parameters = sum(leaf.size for leaf in jax.tree.leaves(cnn.INFLUENCE.init(jax.random.key(0))))
    with (planner := Planner(4)).active():  # the planner counts messages and computes nothing
        prepare(SMALL)()
    (piece,) = planner.pieces
    assert (piece["rounds"], piece["floats"]) == (2, 2 * (parameters + 1))  # the params and a weight


def test_clients_that_cannot_be_spread_evenly_are_refused():
    with pytest.raises(InvalidInput, match=r"clients: got 5; allowed: a multiple of the 4 devices"):
        prepare(replace(SMALL, clients=5))


def test_clients_that_processes_cannot_divide_are_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        main(Scale, scale.run, ["--clients", "5"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "error: clients: got 5; allowed: a multiple of the 2 processes" in said
    assert "Traceback" not in said


def test_a_measured_process_says_what_is_wrong_in_a_line(monkeypatch, capsys):
    config = json.dumps(asdict(replace(SMALL, clients=5)))
    monkeypatch.setattr(sys, "argv", ["-c", config, "1", "", "--coordinator", "127.0.0.1:1", "--process", "0"])
    with pytest.raises(SystemExit) as caught:
        take_part()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: clients: got 5; allowed: a multiple of the 4 devices")
