"""The benchmark of several processes: what it runs is what it says, on the devices of this process."""

import json
import signal
import sys

import jax
import pytest

from hyperpush.bench.config import Scale
from hyperpush.bench.scale import prepare, take_part
from hyperpush.cli import app as cli
from hyperpush.engines.planning import Planner
from hyperpush.errors import InvalidInput
from hyperpush.studies.models import cnn

ASKED = {"method": "sgp", "clients": 4, "examples": 2, "rounds": 2, "model": "influence", "seed": 0}


def test_each_client_sends_its_model_in_each_round():
    parameters = sum(leaf.size for leaf in jax.tree.leaves(cnn.INFLUENCE.init(jax.random.key(0))))
    with (planner := Planner(4)).active():  # which counts and does not compute
        prepare(ASKED)()
    (piece,) = planner.pieces
    assert (piece["rounds"], piece["floats"]) == (2, 2 * (parameters + 1))  # the params and a weight


def test_clients_that_cannot_be_spread_evenly_are_refused():
    with pytest.raises(InvalidInput, match=r"clients: got 5; allowed: a multiple of the 4 devices"):
        prepare({**ASKED, "clients": 5})


def test_the_defaults_are_valid():
    assert Scale().processes == (1, 2)


@pytest.mark.parametrize(("option", "given"), [("clients", 5), ("memory_clients", 3)])
def test_clients_that_processes_cannot_divide_are_one_line(tmp_path, monkeypatch, capsys, option, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "scale", "-s", f"{option}={given}"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert f"error: {option}: got {given}; allowed: a multiple of the 2 processes" in said
    assert "Traceback" not in said
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_a_measured_process_says_what_is_wrong_in_a_line(monkeypatch, capsys):
    asked = {**ASKED, "clients": 5, "processes": 1, "repeats": 1, "folder": ""}
    arguments = [json.dumps(asked), "--coordinator", "127.0.0.1:1", "--process", "0"]
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    with pytest.raises(SystemExit) as caught:
        take_part()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: clients: got 5; allowed: a multiple of the 4 devices")
