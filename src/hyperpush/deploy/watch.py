"""User interface of a running party: status file, lines about other parties, warnings, and signals that stop it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hyperpush.base.errors import HyperpushError, Stopped
from hyperpush.base.signals import stop_signals
from hyperpush.deploy.folder import note_release, released_before
from hyperpush.deploy.handshakes import count_handshakes
from hyperpush.deploy.options import Deployment, digest
from hyperpush.engines.peers import PeerSession
from hyperpush.engines.transport.zenoh.neighbors import shown_time
from hyperpush.runs.events import event, write_events
from hyperpush.verbs.budget import Budget

STATUS, LEAVE = "status.json", "leave"  # files in a party's folder: its view of the run, and a request to leave
# Warn if a certificate ends within this many seconds: longer than most runs, and time enough to get a new certificate.
SOON = 24 * 3600


class StatusFile(threading.Thread):
    """Thread that writes the latest `state` event to a file, a few times a second. A write that fails is skipped.

    Args:
        path: The file.
        look: Function that returns the contents of the event.
        every: Seconds between two writes.
        also: Function called after each write.
    """

    def __init__(
        self,
        path: Path,
        look: Callable[[], Mapping[str, Any]],
        every: float = 0.2,
        also: Callable[[], None] = lambda: None,
    ):
        super().__init__(daemon=True)
        self.path, self.look, self.every, self.also = path, look, every, also
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(self.every):
            self.write()
            self.also()

    def write(self) -> None:
        """Write the file now."""
        with suppress(OSError, RuntimeError):  # no free file descriptor; a dict that changed during iteration
            write_events(self.path, [event("state", self.look())], durable=False)

    def end(self) -> None:
        """Write the file for the last time, and end the thread."""
        self._end.set()
        self.join(5)
        self.also()
        self.write()


class Watch:
    """User interface of a party's running session, which also stops the session on request.

    Args:
        config: The configuration of the run.
        name: Name of this party.
        out: The party's folder.
        say: Function that shows a line to the user.
        costs: The most that this start can release; None for a task that is not private.
        summarize: Function from the budgets of several starts to their joint privacy costs, for the status file.
    """

    def __init__(
        self,
        config: Deployment,
        name: str,
        out: Path,
        say: Callable[[str], None],
        costs: Budget | None = None,
        summarize: Callable[[Sequence[Budget]], dict[str, Any]] = lambda starts: {},
    ):
        self.config, self.name, self.say, self.out, self.costs = config, name, say, out, costs
        self.before: list[Budget] = []  # releases of earlier fresh starts in this folder
        self.session: PeerSession | None = None
        self.handshakes = count_handshakes()
        self.ended = ""  # reason for the end of the run; empty while it runs
        self._summarize = summarize
        self.private: dict[str, Any] | None = None  # ε of this start and of those before
        self._warned: set[str] = set()
        self._file = StatusFile(out / STATUS, self.look, also=self._attend)

    def start(self, session: PeerSession) -> None:
        """Show and watch a session that has just started. The engine calls this method as `on_start`."""
        self.session = session
        session.transport.waits.handshakes = lambda: dict(self.handshakes)
        secure = "mutual TLS" if self.config.engine["authority"] else "no certificate: loopback only"
        self.say(f"{self.name}: {secure}; configuration {digest(self.config).hex()[:16]}…")
        if session.resumed_at is not None:
            self.say(f"{self.name}: continues from step {session.resumed_at}")
        if session.not_compared:
            self.say(f"{self.name}: warning: the parties' code is not compared: {session.not_compared}")
        if self.costs is not None:
            self._account(session, self.costs)
        (self.out / LEAVE).unlink(missing_ok=True)  # a request from an earlier run
        self._file.start()

    def _account(self, session: PeerSession, costs: Budget) -> None:
        """Arrange to note the releases of this start once all parties are present, and report earlier starts."""
        self.before = released_before(self.out, session.start)
        self.private = self._summarize([*self.before, costs])
        session.on_begin = lambda: note_release(self.out, session.start, costs)
        if self.before:
            self.say(
                f"{self.name}: starts anew, with new noise; releases of {len(self.before)} earlier starts count, too"
            )

    def look(self) -> dict[str, Any]:
        """Return the contents of the status file."""
        assert self.session is not None
        seen = self.session.status()
        seen["rejected_by_transport"] = seen["rejected_by_transport"] | dict(self.handshakes)
        about = {"client": self.name, "pid": os.getpid(), "mode": self.config.engine["mode"], "ended": self.ended}
        private = {} if self.private is None else {"privacy": self.private}
        return {**about, **seen, **private, "peers": len(self.config.peers)}

    def _attend(self) -> None:
        """Show news about other parties, warn of certificates that end soon, and leave the run if requested."""
        session = self.session
        assert session is not None
        for line in session.news():
            self.say(f"{self.name}: {line}")
        if session.begun:
            self._warn_of_certificates(session)
        if session.begun and not session.leaves and (self.out / LEAVE).exists():
            with suppress(OSError):
                (self.out / LEAVE).unlink()
            self.say(f"{self.name}: leaves, and hands over its mass")
            with suppress(HyperpushError):  # synchronous parties cannot leave; `hyperpush leave` says so
                session.leave()

    def _warn_of_certificates(self, session: PeerSession) -> None:
        known = {other.name: other.ends for other in list(session.transport.neighbors.values())}
        for name, ends in {self.name: session.transport.members.card.ends, **known}.items():
            left = ends - time.time()
            if ends and left < SOON and name not in self._warned:
                self._warned.add(name)
                when = f"ends at {shown_time(ends)}, in {left / 60:,.0f} minutes" if left > 0 else "has ended"
                self.say(f"{self.name}: warning: {name}'s certificate {when}; its links end with it")

    def end(self, why: str = "") -> None:
        """Note that the run has ended. `why` is the reason, or empty if the run is done."""
        self.ended = why or "done"
        if self.session is not None:
            self._file.end()

    def stop(self, number: int) -> None:
        """Stop at the next message because of a signal. A second signal stops at once."""
        name = signal.Signals(number).name
        if self.session is None or self.ended == "stopping":
            when = "before it began" if self.session is None else "at once"
            raise Stopped(f"peer {self.name}: ended by {name} {when}", number)
        self.ended = "stopping"
        self.session.stop(Stopped(f"peer {self.name}: ended by {name}; {self._how_to_continue()}", number))

    def _how_to_continue(self) -> str:
        if not self.config.engine["checkpoint_every"]:
            return "without checkpoints it cannot continue"
        asynchronous = self.config.engine["mode"] == "asynchronous"
        seconds = self.config.engine["close_after"] if asynchronous else self.config.engine["patience"]
        then = "remove it" if asynchronous else "give up"
        told = f"started again, it continues from its checkpoint: within {seconds:g} s, before the others {then}"
        return f"{told}. To leave for good, use hyperpush leave {self.out}" if asynchronous else told


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` on signals that stop a run, instead of ending the process, in a `with` block of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        act(number)

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
