"""Start the processes of a run on this machine and watch them: what ends one ends all."""

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from hyperpush.errors import HyperpushError, InvalidInput

PATIENCE = 10.0  # seconds that the others have to end by themselves when one has died
PARENT = "HYPERPUSH_PARENT"  # the process that started this one


def start(arguments: Sequence[str], processes: int, function: str = "hyperpush.cli.app:main") -> int:
    """Run `hyperpush *arguments` in so many processes; the exit code of the first, whose output is shown.

    `function` is what each calls, a `module:name` that reads the arguments from `sys.argv`.
    """
    if processes < 1:
        raise InvalidInput("--processes", processes, "1 or more")
    module, _, name = function.partition(":")
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-c", f"from {module} import {name}; {name}()", *arguments, "--coordinator", address]
    with tempfile.TemporaryFile("w+") as said:
        children: list[subprocess.Popen[Any]] = []
        before = {}
        try:
            for index in range(processes):
                children.append(_child([*command, "--process", str(index)], None if index == 0 else said))
                _pin(children[-1].pid, index, processes)

            def forward(number: int, frame: Any) -> None:
                for child in children:
                    child.send_signal(number)

            if threading.current_thread() is threading.main_thread():
                before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
            return _watch(children, said)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()


def _child(command: Sequence[str], said: IO[str] | None) -> "subprocess.Popen[Any]":
    # In a session of its own: a signal from the terminal comes through the starter, once.
    return subprocess.Popen(
        command,
        env={**os.environ, PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=None if said is None else subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,
    )


def _watch(children: "Sequence[subprocess.Popen[Any]]", said: IO[str]) -> int:
    """The exit code of all, or of the first process if it has said what went wrong; else the error that names who died
    first, which the others often follow at once."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait(index: int) -> None:
        children[index].wait()
        ended.put(index)

    for index in range(len(children)):
        threading.Thread(target=wait, args=(index,), daemon=True).start()
    for _ in children:
        index = _next(ended, None)
        if index is not None and children[index].returncode:
            return _failed(index, children, ended, said)
    return 0


def _next(ended: "queue.SimpleQueue[int]", deadline: float | None) -> int | None:
    """The next process that ends; None if that takes until the deadline."""
    while deadline is None or time.monotonic() < deadline:
        try:
            return ended.get(timeout=0.2)  # not for ever: signals are to be passed on in between
        except queue.Empty:
            continue
    return None


def _failed(
    index: int, children: "Sequence[subprocess.Popen[Any]]", ended: "queue.SimpleQueue[int]", said: IO[str]
) -> int:
    deadline = time.monotonic() + PATIENCE
    while any(child.returncode is None for child in children) and _next(ended, deadline) is not None:
        pass
    code, own = children[0].returncode, children[index].returncode
    if code in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM) and own > 0:
        return code  # it has said why
    raise HyperpushError(f"process {index} of {len(children)} {_how(own)}, which ends the run on all{_last(said)}")


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _last(said: IO[str]) -> str:
    """What the other processes said last, if that is an error of ours."""
    said.seek(0)
    errors = [line.strip() for line in said if line.startswith("error: ")]
    return f" ({errors[-1].removeprefix('error: ')})" if errors else ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _pin(pid: int, index: int, processes: int) -> None:
    """Give a process its share of the cores, so that they do not get in each other's way."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if processes <= len(cores):
            os.sched_setaffinity(pid, cores[index::processes])


def end_with_parent() -> None:
    """End this process when the one that started it is gone."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
