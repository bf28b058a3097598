"""Runs that are killed with SIGKILL write the same files as undisturbed runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpush.runs.events import read_events


def compare(folder: Path, kills: int, seed: int) -> None:
    command = [sys.executable, Path(__file__).with_name("killed.py"), folder, str(kills), str(seed)]
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == {"kills": kills, "exit_code": 0}, (folder / "stderr").read_text()
    alone, killed = folder / "alone", folder / "killed"
    names = sorted(str(each.relative_to(alone)) for each in alone.rglob("*"))
    assert sorted(str(each.relative_to(killed)) for each in killed.rglob("*")) == names
    one, two = ([{**each, "time": 0} for each in read_events(run / "metrics.jsonl")] for run in (alone, killed))
    assert one
    assert one == two
    for name in ("result.json", "models/params/all.safetensors"):
        assert (killed / name).read_bytes() == (alone / name).read_bytes(), name
    assert not (folder / ".killed.partial").exists()
    assert json.loads((alone / "result.json").read_text())["norms"][0] > 0.1


@pytest.mark.long
def test_a_run_that_is_killed_twice(tmp_path):
    compare(tmp_path, 2, 0)


@pytest.mark.faults
def test_a_run_that_is_killed_twenty_times(tmp_path):
    compare(tmp_path, 20, 1)
