"""Runs in several processes: the same numbers, one clear message when a process dies, and resuming afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hyperpush.base.errors import HyperpushError
from hyperpush.base.processes.starter import free_ports, start
from hyperpush.cli import app as cli
from hyperpush.verbs.saved import load

# One device per process: with the tests' four, two processes would compile for eight devices.
ALONE = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")}
SPEC = """
every = 1
[task]
name = "logistic"
clients = 6
seed = 0
log_rates = true
[network]
name = "random-directed"
[method]
name = "PDBO"
steps = 2
inner = { name = "SGP", steps = 200, step_size = 0.5 }
hypergradient = { name = "HGP", steps = 40, pushes = 10, step_size = 0.5 }
outer = { name = "adam", learning_rate = 0.1 }
"""


def test_two_processes_compute_what_one_does(tmp_path):
    script = Path(__file__).with_name("joined.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, str(free_ports(1)[0])],
        env=ALONE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("how", "message"), [("killed", "was killed by SIGKILL"), ("ended", "ended with exit code 3")])
def test_the_process_that_dies_first_is_named(tmp_path, monkeypatch, how, message):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with pytest.raises(HyperpushError, match=f"process 1 of 2 {message}, which ends the run on all"):
        start([str(tmp_path / "sign"), how], 2, "dies:dies")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2", "--coordinator", "127.0.0.1:1"], "--coordinator: got 'process None of 2'"),
        (["--processes", "2", "--coordinator", "127.0.0.1:1", "--process", "2"], "from 0 to N - 1"),
        (["--process", "1"], "only with --coordinator"),
        (["--processes", "2", "-s", "key=-1"], "key: got -1"),
        (["--processes", "0"], "Invalid value for '--processes'"),
    ],
)
def test_bad_options_end_before_anything_starts(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "my.toml").write_text(SPEC)
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "my.toml", *arguments])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert caught.value.code == 2
    assert message in said
    assert "Traceback" not in said
    assert [each.name for each in tmp_path.iterdir()] == ["my.toml"]


def hyperpush(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "hyperpush", *arguments]
    return subprocess.Popen(command, cwd=folder, env=ALONE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.faults
def test_one_two_and_four_processes_agree_also_when_one_dies(tmp_path):
    (tmp_path / "my.toml").write_text(SPEC)
    rounds = ("--checkpoint-rounds", "50")
    for count in ("1", "2", "4"):
        started = hyperpush(tmp_path, "run", "my.toml", "--processes", count, "--out", count, *rounds)
        assert started.wait(600) == 0, started.stderr and started.stderr.read()
    killed = hyperpush(tmp_path, "run", "my.toml", "--processes", "2", "--out", "killed", *rounds)
    while not list(tmp_path.glob(".killed.partial/checkpoints/0*")):
        assert killed.poll() is None
        time.sleep(0.01)
    os.kill(children(killed.pid)[1], signal.SIGKILL)
    assert killed.wait(60) == 2
    assert killed.stderr is not None
    said = killed.stderr.read()
    assert "error: process 1 of 2 was killed by SIGKILL, which ends the run on all" in said
    assert "resume" in said
    # resumed with another number of processes
    resumed = hyperpush(tmp_path, "resume", "killed", "--processes", "1", *rounds)
    assert resumed.wait(600) == 0, resumed.stderr and resumed.stderr.read()
    alone = load(tmp_path / "1")
    for name in ("2", "4", "killed"):
        found = load(tmp_path / name)
        np.testing.assert_allclose(found.result["history"]["cost"], alone.result["history"]["cost"], rtol=1e-5)
        for kind in ("params", "hypers"):
            np.testing.assert_allclose(found.models(kind), alone.models(kind), rtol=1e-5, atol=1e-5)
        assert len(found.metrics) == len(alone.metrics) == 3
        assert json.loads((tmp_path / name / "result.json").read_text())["costs"] == alone.result["costs"]
