"""Start the processes of a run on this machine and watch them: what ends one ends all."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from hyperpush.base.errors import HyperpushError, InvalidInput

PATIENCE = 10.0  # seconds that the others have to end by themselves when one has died
PARENT = "HYPERPUSH_PARENT"  # the process that started this one
Child = subprocess.Popen[Any]


def start(arguments: Sequence[str], processes: int, function: str = "hyperpush.cli.app:main") -> int:
    """Run `hyperpush *arguments` in so many processes; the exit code of the first, whose output is shown.

    `function` is what each calls, a `module:name` that reads the arguments from `sys.argv`.
    """
    if processes < 1:
        raise InvalidInput("--processes", processes, "1 or more")
    module, _, name = function.partition(":")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-c", f"from {module} import {name}; {name}()", *arguments, "--coordinator", address]
    children: list[Child] = []
    before = {}

    def forward(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    with tempfile.TemporaryFile("w+") as said:
        try:
            for index in range(processes):
                # In a session of its own: a signal from the terminal comes through the starter, once.
                quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": said} if index else {}
                own = {"env": {**os.environ, PARENT: str(os.getpid())}, "start_new_session": True}
                options = {"stdin": subprocess.DEVNULL, **own, **quiet}
                children.append(subprocess.Popen([*command, "--process", str(index)], **options))
                _pin(children[-1].pid, index, processes)
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


def _watch(children: Sequence[Child], said: IO[str]) -> int:
    """The exit code of all, or of the first process if it has said what went wrong; else the error that names who died
    first, which the others often follow at once."""
    ended: list[int] = []  # in the order in which they did

    def wait(index: int) -> None:
        children[index].wait()
        ended.append(index)

    for index in range(len(children)):
        threading.Thread(target=wait, args=(index,), daemon=True).start()
    failed, deadline = None, float("inf")
    while len(ended) < len(children) and time.monotonic() < deadline:
        time.sleep(0.05)
        if failed is None and (failed := _first_failure(children, ended)) is not None:
            deadline = time.monotonic() + PATIENCE
    failed = _first_failure(children, ended)
    if failed is None:
        return 0
    first, code = children[0].returncode, children[failed].returncode
    if first in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM) and code > 0:
        return first  # it has said why
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said.seek(0)
    errors = [line.strip().removeprefix("error: ") for line in said if line.startswith("error: ")]
    why = f" ({errors[-1]})" if errors else ""
    raise HyperpushError(f"process {failed} of {len(children)} {how}, which ends the run on all{why}")


def _first_failure(children: Sequence[Child], ended: Sequence[int]) -> int | None:
    return next((index for index in ended if children[index].returncode), None)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


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
