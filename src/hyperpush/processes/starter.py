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

from hyperpush.errors import HyperpushError, InvalidInput

PATIENCE = 10.0  # seconds that the others have to end by themselves when one has died
PARENT = "HYPERPUSH_PARENT"  # the process that started this one


def start(arguments: Sequence[str], processes: int, function: str = "hyperpush.cli:main") -> int:
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
    while True:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return 0
        failed = next((index for index, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is None:
            time.sleep(0.05)
            continue
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(child.poll() is None for child in children):
            time.sleep(0.05)
        code = children[0].poll()
        if code in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM) and codes[failed] != -signal.SIGKILL:
            return code  # it has said why
        raise HyperpushError(
            f"process {failed} of {len(children)} {_how(codes[failed])}, which ends the run on all{_last(said)}"
        )


def _how(code: int | None) -> str:
    if code is not None and code < 0:
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
