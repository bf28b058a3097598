"""Start the processes of a run on this machine and watch them: if one process fails, all processes end."""

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
from hyperpush.base.signals import stop_signals

PATIENCE = 10.0  # seconds that the other processes have to end by themselves after one has failed
PARENT = "HYPERPUSH_PARENT"  # environment variable with the id of the process that started this one
Child = subprocess.Popen[Any]


def start(arguments: Sequence[str], processes: int, function: str = "hyperpush.cli.app:main") -> int:
    """Run `hyperpush *arguments` in several processes, and return the exit code.

    Only the output of process 0 is shown. Each process calls `function`, given as `module:name`, which reads the
    arguments from `sys.argv`.
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
                # Each process has its own session: a signal from the terminal reaches it only through `forward`.
                quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": said} if index else {}
                own = {"env": {**os.environ, PARENT: str(os.getpid())}, "start_new_session": True}
                options = {"stdin": subprocess.DEVNULL, **own, **quiet}
                children.append(subprocess.Popen([*command, "--process", str(index)], **options))
                _pin(children[-1].pid, index, processes)
            if threading.current_thread() is threading.main_thread():
                before = {number: signal.signal(number, forward) for number in stop_signals()}
            return _watch(children, said)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()


def _watch(children: Sequence[Child], said: IO[str]) -> int:
    """Wait for all processes; return 0 if all succeeded, or the exit code of process 0 if it printed the reason.

    Otherwise raise an error that names the process that failed first, because others often fail as a consequence.
    """
    ended: list[int] = []  # indices of processes in the order in which they ended

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
    if first is not None and first > 1 and code > 0:  # exit codes above 1 come from errors with a printed reason
        return first
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said.seek(0)
    errors = [line.strip().removeprefix("error: ") for line in said if line.startswith("error: ")]
    why = f" ({errors[-1]})" if errors else ""
    raise HyperpushError(f"process {failed} of {len(children)} {how}, which ends the run on all{why}")


def _first_failure(children: Sequence[Child], ended: Sequence[int]) -> int | None:
    return next((index for index in ended if children[index].returncode), None)


def free_ports(count: int) -> list[int]:
    """Return the numbers of `count` free ports of the loopback interface."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _pin(pid: int, index: int, processes: int) -> None:
    """Pin a process to its share of the cores, so that processes do not disturb each other."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if processes <= len(cores):
            os.sched_setaffinity(pid, cores[index::processes])


def end_with_parent() -> None:
    """End this process when the process that started it has ended, as `PARENT` names it."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
