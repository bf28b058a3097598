"""Interrupted runs: the files that they leave, their messages, and resuming them."""

import fcntl
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import hyperpush as hp
from hyperpush.base.config import Config
from hyperpush.base.errors import Diverged, InUse, InvalidInput
from hyperpush.cli import app as cli
from hyperpush.runs.checkpoints import Policy, store
from hyperpush.runs.checkpoints.journal import Journal
from hyperpush.runs.checkpoints.store import CheckpointFolder
from hyperpush.runs.experiment import Experiment
from hyperpush.spec import studies
from hyperpush.spec.execute import execute, resume
from hyperpush.tasks.quadratic import quadratic
from hyperpush.verbs.saved import load

STOP: dict[str, Any] = {}
POLICY = Policy(minutes=None, rounds=20)


class Pieces(Config):
    """Options of the run."""

    steps: int = 70


def run_pieces(config: Pieces, run: Any) -> dict[str, Any]:
    """Train twice; STOP can interrupt the second training at some round."""
    task, norms = quadratic(3, 0), []
    for piece in range(2):

        def progress(name: str, done: int, total: int, piece: int = piece) -> None:
            if piece == 1 and done >= STOP.get("at", 1000):
                raise STOP["error"]

        solver, told = hp.SGP(config.steps, 0.1), (hp.hooks.Progress(progress),)
        task = hp.train(task, solver, hp.networks.Ring(3), key=piece, hooks=told).task
        norms.append(float(jax.numpy.linalg.norm(task.params)))
        run.record(piece=piece, norm=norms[-1])
        run.save_models(f"params-{piece}", task.params)
    return {"norms": norms}


KNOWN = {"pieces": Experiment("pieces", "Train twice.", Pieces, run_pieces)}


def interrupted(out: Path, error: BaseException) -> str:
    """Interrupt a run in the middle of its second piece, and return its output."""
    screen = io.StringIO()
    STOP.update(at=60, error=error)
    try:
        with pytest.raises(type(error)):
            execute(KNOWN["pieces"], Pieces(), out, Console(file=screen, width=200), POLICY)
    finally:
        STOP.clear()
    return screen.getvalue()


def resumed(out: Path) -> str:
    """Resume a run, compare its files with those of an undisturbed run, and return its output."""
    screen = io.StringIO()
    resume(out, KNOWN, Console(file=screen, width=200), POLICY)
    execute(KNOWN["pieces"], Pieces(), out.with_name("alone"), Console(quiet=True))
    found, alone = load(out), load(out.with_name("alone"))
    assert found.result == alone.result
    assert found.result["norms"][0] > 0.1
    assert found.metrics == alone.metrics
    for name in ("params-0", "params-1"):
        np.testing.assert_array_equal(found.models(name), alone.models(name))
    assert sorted(each.name for each in out.iterdir()) == sorted(
        each.name for each in (out.with_name("alone")).iterdir()
    )
    return screen.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("a bug")], ids=repr)
def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path, error):
    out = tmp_path / "out"
    assert f"to continue: hyperpush resume {out}" in interrupted(out, error)
    assert [each.name for each in tmp_path.iterdir()] == [".out.partial"]
    with (tmp_path / ".out.partial" / "metrics.jsonl").open("a") as file:
        file.write('{"piece": 1, "no')  # an incomplete line
    with pytest.raises(InvalidInput, match=f"hyperpush resume {out}"):
        execute(KNOWN["pieces"], Pieces(), out)
    assert "warning" not in resumed(out)


def test_a_signal_in_the_garbage_collector_ends_the_run_at_the_next_piece(tmp_path):
    journal = Journal(CheckpointFolder(tmp_path, lambda text: None), POLICY)

    def _xla_gc_callback() -> None:
        journal._ask(signal.SIGINT, sys._getframe())

    with journal.active():
        _xla_gc_callback()  # an exception here would only be printed
        with pytest.raises(KeyboardInterrupt):
            hp.train(quadratic(3, 0), hp.SGP(2, 0.1), hp.networks.Ring(3), key=0)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    out = tmp_path / "out"
    interrupted(out, KeyboardInterrupt())
    states = sorted((tmp_path / ".out.partial" / "checkpoints").glob("0*-state-*"))
    assert len(states) > 1
    data = bytearray(states[-1].read_bytes())
    data[len(data) // 2] ^= 64
    states[-1].write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    said = resumed(out)
    assert f"warning: checkpoint {states[-1].name[:12]} is damaged" in said
    assert "other bytes" in said


@pytest.mark.parametrize("cause", ["interrupted", "refused", "stray file"])
def test_a_resume_that_fails_at_its_start_deletes_nothing(tmp_path, monkeypatch, cause):
    out, checkpoints = tmp_path / "out", tmp_path / ".out.partial" / "checkpoints"
    interrupted(out, KeyboardInterrupt())
    before = {each.name for each in checkpoints.iterdir()}

    def fails(*_: Any) -> Any:
        raise {"interrupted": KeyboardInterrupt(), "refused": InvalidInput("HYPERPUSH_DATA", None, "a folder")}[cause]

    if cause == "stray file":
        (checkpoints / "notes.txt").write_text("mine")
    else:
        where = {"interrupted": "lifecycle.Journal", "refused": "run.StudyRun"}[cause]
        monkeypatch.setattr(f"hyperpush.runs.{where}", fails)
        with pytest.raises((KeyboardInterrupt, InvalidInput)):
            resume(out, KNOWN, Console(quiet=True), POLICY)
        monkeypatch.undo()
        assert {each.name for each in checkpoints.iterdir()} == before
    assert "warning" not in resumed(out)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it(name, tmp_path, monkeypatch):
    out, written, number = tmp_path / "out", store._write, getattr(signal, name)
    # must not be ignored
    before = signal.signal(number, signal.SIG_DFL if name == "SIGHUP" else signal.default_int_handler)

    def slow(*arguments: Any) -> None:
        os.kill(os.getpid(), number)
        written(*arguments)

    monkeypatch.setattr(store, "_write", slow)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
            execute(KNOWN["pieces"], Pieces(), out, Console(quiet=True), POLICY)
    finally:
        signal.signal(number, before)
    assert getattr(ended.value, "code", 130) == 128 + number
    monkeypatch.undo()
    assert len(list((tmp_path / ".out.partial" / "checkpoints").glob("0*-state-*"))) == 1
    resumed(out)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(run: Any, **values: Any) -> None:
        raise OSError(28, "No space left on device", str(run.work / "metrics.jsonl"))

    monkeypatch.setattr("hyperpush.runs.run.StudyRun.record", full)
    with pytest.raises(hp.HyperpushError, match=r"metrics.jsonl could not be written: No space left on device"):
        execute(KNOWN["pieces"], Pieces(), tmp_path / "out", Console(quiet=True), POLICY)


def test_what_cannot_be_resumed_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(studies, "experiments", lambda: KNOWN)
    out = tmp_path / "out"
    interrupted(out, KeyboardInterrupt())
    with (tmp_path / ".out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InUse, match=r"run: another process works in .*out; end it first"):
            resume(out, KNOWN, checkpoints=POLICY)
    config = tmp_path / ".out.partial" / "config.toml"
    config.write_text(config.read_text().replace("70", "71"))
    with pytest.raises(hp.HyperpushError, match="another computation"):
        resume(out, KNOWN, Console(quiet=True), POLICY)
    config.write_text(config.read_text().replace("71", "70"))
    resume(tmp_path / ".out.partial", KNOWN, Console(quiet=True), POLICY)
    for folder, cause in ((out, "a finished run"), (tmp_path / "none", "an interrupted run")):
        with pytest.raises(SystemExit) as caught:
            cli.main(["resume", str(folder)])
        said = capsys.readouterr().err
        assert caught.value.code == 2
        assert cause in said
        assert "Traceback" not in said


def test_a_run_that_diverges_leaves_nothing(tmp_path):
    assert "to continue" not in interrupted(tmp_path / "out", Diverged("SGP", 60, "a smaller step size may help"))
    assert list(tmp_path.iterdir()) == []
