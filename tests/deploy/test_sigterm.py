"""After SIGTERM a party keeps a checkpoint; after a request to leave it transfers its mass to the others."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pytest
from deploy.deployed import deployed
from safetensors.numpy import load_file

from hyperpush.base.errors import HyperpushError, InvalidInput, Stopped
from hyperpush.base.processes.starter import free_ports
from hyperpush.cli.app import app
from hyperpush.deploy.party import run_peer
from hyperpush.deploy.report import ask_to_leave, describe
from hyperpush.deploy.swarm import on_loopback
from hyperpush.deploy.watch import STATUS
from hyperpush.runs.events import read_events

STEPS = 150
FIRST, SECOND = "peer-0", "peer-1"


def made(base, mode):
    spec = {
        "task": {"name": "quadratic", "seed": 0},
        "network": {"name": "fully-connected"},
        "method": {
            "name": "PDBO",
            "steps": 1,
            "inner": {"name": "SGP", "steps": STEPS, "step_size": 0.01},
            "hypergradient": {"name": "TrackedHGP", "steps": 3, "pushes": 1, "step_size": 0.01},
            "outer": {"name": "adam", "learning_rate": 0.1},
        },
    }
    base.mkdir(exist_ok=True)
    config = deployed(base / "run.toml", spec, 2, mode=mode, longest_wait=0.2)
    return on_loopback(config, ["peer-0", "peer-1"], base, secure=False)


def beside(config):
    """Run the second party in a thread; return its result or exception, filled in once the thread has ended."""
    found = []

    def work():
        try:
            found.append(run_peer(config, SECOND, say=lambda line: None))
        except HyperpushError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, found


def kill_self():
    os.kill(os.getpid(), signal.SIGTERM)


def told_at(base, round, act=kill_self):
    """Send SIGTERM to this process, or call `act`, once the first party, in the main thread, has reached a round."""

    def work():
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                if json.loads((base / FIRST / STATUS).read_text())["round"] >= round:
                    act()
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.002)

    threading.Thread(target=work, daemon=True).start()


def files(base):
    return {path.name for path in (base / FIRST).iterdir() if not path.name.startswith(".")} - {STATUS}


@pytest.mark.faults
def test_in_step_it_stops_and_comes_back(tmp_path):
    config = made(tmp_path, "synchronous")
    before = signal.getsignal(signal.SIGTERM)
    other, found = beside(config)
    told_at(tmp_path, 10)
    with pytest.raises(Stopped, match=r"peer-0: ended by SIGTERM; started again, it continues .* within 120 s") as told:
        run_peer(config, FIRST, say=lambda line: None)
    assert told.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert files(tmp_path) == {"checkpoint.safetensors", "checkpoint-2.safetensors"}
    result = run_peer(config, FIRST, say=lambda line: None)
    other.join(120)
    assert result["resumed_at"] >= 9
    assert found[0]["rounds"] == result["rounds"]
    assert not list(tmp_path.rglob("*.new"))
    # In synchronous mode a run repeats bit for bit, even if a party was away for a while.
    again = made(tmp_path / "again", "synchronous")
    other, _ = beside(again)
    run_peer(again, FIRST, say=lambda line: None)
    other.join(120)
    for name in (FIRST, SECOND):
        for file in ("params", "hypers"):
            path = f"{name}/models/{file}/{name}.safetensors"
            one, two = (load_file(base / path)[""] for base in (tmp_path, tmp_path / "again"))
            assert np.abs(one).max() > 0
            np.testing.assert_array_equal(one, two)
        one, two = (read_events(base / name / "metrics.jsonl") for base in (tmp_path, tmp_path / "again"))
        assert "hypergradient_norm" in one[1]
        assert [{**each, "time": 0} for each in one] == [{**each, "time": 0} for each in two]


@pytest.mark.long
def test_at_its_own_pace_it_leaves_when_it_is_asked_to_and_the_other_ends(tmp_path):
    config = made(tmp_path, "asynchronous")
    other, found = beside(config)
    said, seen = [], []

    def ask():
        seen.extend(describe(tmp_path / FIRST))
        assert (
            main_says(["leave", str(tmp_path / FIRST)])
            == "peer-0 hands over its mass at its next exchange and ends then"
        )

    told_at(tmp_path, 10, ask)
    result = run_peer(config, FIRST, say=said.append)
    assert result["left"]
    assert result["rounds"] < STEPS
    assert files(tmp_path) == {"result.json"}
    assert any("leaves, and hands over its mass" in line for line in said)
    assert "peer-0: asynchronous, round " in seen[0]
    assert "running (process " in seen[0]
    assert any(line.startswith("  peer-1  here, heard ") for line in seen)
    assert "not running: left" in describe(tmp_path / FIRST)[0]
    other.join(120)
    assert not found[0]["left"]
    assert found[0]["closed_out"] == []
    assert json.loads((tmp_path / SECOND / "result.json").read_text())["rounds"] > STEPS
    assert not list(tmp_path.rglob("*.new"))
    with pytest.raises(HyperpushError, match=r"peers\.peer-0\.out"):  # this party has left for good
        run_peer(config, FIRST)
    with pytest.raises(InvalidInput, match="the folder of a party that is running"):
        ask_to_leave(tmp_path / FIRST)
    with pytest.raises(InvalidInput, match=r"the folder of a party that was started, or its status\.json"):
        describe(tmp_path)


def main_says(arguments):
    """Return the output of a command."""
    told = io.StringIO()
    with redirect_stdout(told), suppress(SystemExit):
        app(arguments, standalone_mode=False)
    return told.getvalue().strip()


RUN = """
[task]
name = "quadratic"
seed = 0
[network]
name = "fully-connected"
[method]
name = "PDBO"
steps = 1
inner = {{ name = "SGP", steps = 100000, step_size = 0.001 }}
hypergradient = {{ name = "TrackedHGP", steps = 3, pushes = 1, step_size = 0.01 }}
outer = {{ name = "adam", learning_rate = 0.1 }}
[deploy]
mode = "{mode}"
longest_wait = 0.2
[peers.{first}]
address = "127.0.0.1:{ports[0]}"
[peers.{second}]
address = "127.0.0.1:{ports[1]}"
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "number", "times", "code", "says"),
    [
        (
            "synchronous",
            signal.SIGTERM,
            1,
            143,
            "error: peer peer-0: ended by SIGTERM; started again, it continues from",
        ),
        ("synchronous", signal.SIGINT, 1, 130, "error: peer peer-0: ended by SIGINT; started again, it continues from"),
        (
            "asynchronous",
            signal.SIGTERM,
            1,
            143,
            "error: peer peer-0: ended by SIGTERM; started again, it continues fr",
        ),
        ("asynchronous", signal.SIGINT, 2, 130, "error: peer peer-0: ended by SIGINT"),
        ("asynchronous", None, 1, 0, "done: "),
    ],
)
def test_exit_codes_of_the_command(mode, number, times, code, says, tmp_path):
    """`hyperpush peer` after SIGTERM during training prints one line on stderr and no traceback."""
    text = RUN.format(mode=mode, first=FIRST, second=SECOND, ports=free_ports(2))
    (tmp_path / "run.toml").write_text(text)
    program = str(Path(sys.executable).with_name("hyperpush"))
    command = [program, "peer", str(tmp_path / "run.toml"), "--name"]
    running = {name: subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in (FIRST, SECOND)}
    try:
        until = time.monotonic() + 240
        while time.monotonic() < until:
            try:
                if json.loads((tmp_path / FIRST / STATUS).read_text())["round"] >= 5:
                    break
            except (OSError, ValueError):
                pass
            time.sleep(0.05)
        for _ in range(times):
            if number is None:
                subprocess.run([program, "leave", str(tmp_path / FIRST)], check=True)
            else:
                running[FIRST].send_signal(number)
        _, said = running[FIRST].communicate(timeout=120)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    lines = said.splitlines()
    assert running[FIRST].returncode == code
    assert "Traceback" not in said
    assert lines[-1].startswith(says)
    assert (tmp_path / FIRST / "result.json").exists() == (code == 0)
    assert (tmp_path / FIRST / "checkpoint.safetensors").exists() == (code != 0)
