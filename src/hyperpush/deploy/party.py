"""One party of a run among peers: from its configuration to its own model."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperpush.base.errors import HyperpushError, InvalidInput, unknown
from hyperpush.base.files import write_atomically
from hyperpush.deploy.data import read_own_data
from hyperpush.deploy.folder import note_release, own_folder, released_before
from hyperpush.deploy.handshakes import count_handshakes
from hyperpush.deploy.options import CHECKPOINT, Deployment, check_draws, digest, dotted_keys, engine_of, folder_of
from hyperpush.deploy.train_first import TrainFirst
from hyperpush.engines.peer import Checkpoint, Left
from hyperpush.engines.peers import Peers, PeerSession
from hyperpush.engines.result import RunResult
from hyperpush.influence.scores import Influence
from hyperpush.networks import Network
from hyperpush.privacy.mechanisms import Laplace
from hyperpush.programs import Node, ProgramRecipe, as_recipe
from hyperpush.runs.events import event, to_json, write_events
from hyperpush.runs.folder import CONFIG, METRICS, RESULT
from hyperpush.runs.process import set_up_jax
from hyperpush.spec import objects as spec
from hyperpush.spec.config import to_toml
from hyperpush.spec.objects import Spec
from hyperpush.spec.run import history_rows, scores_of
from hyperpush.verbs.budget import Budget, budget
from hyperpush.verbs.results import History, Result
from hyperpush.verbs.saving import summarize, write_arrays

STATUS = "status.json"
DELTA = 1e-5  # δ at which a result says what Gaussian noise costs


def own_sentence(config: Deployment, name: str, base: Path, sentence: Spec | None = None) -> Spec:
    """What this party runs: the sentence of all, which may have been read before, on its own data and start."""
    sentence, names = sentence or spec.read(config.spec.sentence()), list(config.peers)
    if sentence.task.clients != len(names):
        raise InvalidInput("task.clients", sentence.task.clients, f"{len(names)}, as many as peers")
    known = sentence.task.names
    if any(peer != client and peer in known for peer, client in zip(names, known, strict=True)):
        raise InvalidInput("peers", ", ".join(names), f"the order of the task's clients, {', '.join(known)}")
    check_draws(config, sentence.task.privacy is not None)
    task, given, own = sentence.task.replace(names=tuple(names)), config.peers[name].data, None
    if given is not None:
        like = {key: each.of(names.index(name)) for key, each in task._sets.items()}
        own = read_own_data(given, base, name, like)
    start = sentence.start and base / sentence.start
    return replace(sentence, task=task.for_client(name, own), start=start)


class Rehearsed(Exception):
    """A run got to its first program: all that is checked before has passed."""


class Rehearsal(Peers):
    """Takes the place of a party's engine before anything is sent: all is checked, and nothing runs."""

    def run(self, program: Node | ProgramRecipe, network: Network, *args: Any, **options: Any) -> RunResult:
        """Refuse what cannot run, and end."""
        self.connect(as_recipe(program).program(), network)
        raise Rehearsed


def rehearse(sentence: Spec, engine: Peers) -> None:
    """Refuse what the verbs and the engine would refuse, before anything is written or sent."""
    if sentence.trainer is not None and getattr(sentence.method, "trains", False):
        allowed = f"nothing: {type(sentence.method).__name__} trains itself"
        raise InvalidInput("train", type(sentence.trainer).__name__, allowed)
    for each in (sentence, as_one_program(sentence)):
        with suppress(Rehearsed), dotted_keys(engine.party):
            each.run(engine=Rehearsal(**vars(engine)))


def prepare(config: Deployment, name: str, base: Path, of_all: Spec | None = None) -> tuple[Spec, Peers]:
    """What a party runs, and where; refuses what cannot run."""
    sentence = own_sentence(config, name, base, of_all)
    engine = engine_of(config, name, base, sentence.task.privacy is not None)
    rehearse(sentence, engine)
    return sentence, engine


def as_one_program(sentence: Spec) -> Spec:
    """The sentence with its training as part of its method, so that there is one program to run."""
    if sentence.trainer is None:
        return sentence
    return replace(sentence, trainer=None, method=TrainFirst(sentence.trainer, sentence.method))


class StatusFile(threading.Thread):
    """Writes what a peer sees to a file, a few times a second, for whoever watches: the latest `state` event alone."""

    def __init__(self, path: Path, look: Callable[[], Mapping[str, Any]], every: float = 0.2):
        super().__init__(daemon=True)
        self.path, self.look, self.every = path, look, every
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(self.every):
            self.write()

    def write(self) -> None:
        with suppress(OSError):
            write_events(self.path, [event("state", self.look())], durable=False)

    def end(self) -> None:
        self._end.set()
        self.join(5)
        self.write()


class Watch:
    """What `hyperpush peer` does around the engine: it shows the running session, and ends it when it is told to."""

    def __init__(
        self, config: Deployment, name: str, out: Path, say: Callable[[str], None], costs: Budget | None = None
    ):
        self.config, self.name, self.say, self.out, self.costs = config, name, say, out, costs
        self.before: list[Budget] = []  # what earlier fresh starts in this folder have released
        self.session: PeerSession | None = None
        self.handshakes = count_handshakes()
        self._file = StatusFile(out / STATUS, self.look)

    def start(self, session: PeerSession) -> None:
        """The engine's `on_start`."""
        self.session = session
        secure = "mutual TLS" if self.config.authority else "no certificate: loopback only"
        self.say(f"{self.name}: {secure}; configuration {digest(self.config).hex()[:16]}…")
        if session.resumed_at is not None:
            self.say(f"{self.name}: continues from step {session.resumed_at}")
        if self.costs is not None:
            self._account(session, self.costs)
        self._file.start()

    def _account(self, session: PeerSession, costs: Budget) -> None:
        """Have what this start releases written down once all are there, and say that earlier ones count, too."""
        self.before = released_before(self.out, session.start)
        session.on_begin = lambda: note_release(self.out, session.start, costs)
        if self.before:
            self.say(
                f"{self.name}: starts anew, with new noise; what {len(self.before)} earlier starts sent counts too"
            )

    def look(self) -> dict[str, Any]:
        """What the status file says."""
        assert self.session is not None
        seen = self.session.status()
        seen["rejected_by_transport"] = seen["rejected_by_transport"] | dict(self.handshakes)
        return {"client": self.name, "pid": os.getpid(), **seen}

    def end(self) -> None:
        """The run has ended."""
        if self.session is not None:
            self._file.end()

    def end_by_signal(self) -> None:
        """Leave, asynchronously and the first time; else stop."""
        session, checkpoints = self.session, self.config.checkpoint
        how = "started again, it continues from its checkpoint" if checkpoints else "without checkpoints it is lost"
        if session is None:
            raise HyperpushError(f"peer {self.name}: ended by SIGTERM before it began")
        if self.config.mode == "asynchronous" and session.begun and not session.leaves:
            session.leave()
        else:
            session.stop(f"ended by SIGTERM; {how}")


@contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """Do this when the process is told to end, instead of ending it; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_peer(config: Deployment, name: str, base: Path = Path(), say: Callable[[str], None] = print) -> dict[str, Any]:
    """Be the party `name`: run the sentence with the others, write the own model; returns the result."""
    if name not in config.peers:
        raise unknown("--name", name, config.peers)
    out = folder_of(config, name, base)
    left_over = Checkpoint(out / CHECKPOINT, digest(config))
    if (out / RESULT).exists():
        if left_over.load() is None:
            raise InvalidInput(f"peers.{name}.out", str(out), "a folder without the result of an earlier run")
        left_over.remove()  # killed when all was written
        return json.loads((out / RESULT).read_text(encoding="utf-8"))
    with set_up_jax(config.spec.precision):
        sentence, engine = prepare(config, name, base)
        shared = out.resolve() in (Path.cwd(), base.resolve(), *base.resolve().parents)
        with own_folder(out, f"peers.{name}.out", keep_mode=shared):
            return _run_in(out, config, sentence, engine, say)


def _run_in(out: Path, config: Deployment, sentence: Spec, engine: Peers, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a party's sentence in its folder."""
    sentence = as_one_program(sentence)
    watch, began = Watch(config, engine.party, out, say, _budget_of(sentence)), time.monotonic()
    with on_sigterm(watch.end_by_signal):
        result = _run(sentence, engine, watch)
        summary = _summary(config, engine.party, result, watch) | {"seconds": round(time.monotonic() - began, 3)}
        if result is not None:
            summary |= _write_result(out, engine.party, result, watch.before)
            write_atomically(out / CONFIG, to_toml("spec", config.spec))
        # Last: it says that all is there.
        write_atomically(out / RESULT, (to_json(summary) + "\n"))
        Checkpoint(out / CHECKPOINT, digest(config)).remove()
    return summary


def _budget_of(sentence: Spec) -> Budget | None:
    """What a run of a private sentence releases at most."""
    return None if sentence.task.privacy is None else budget(sentence.task, sentence.method, sentence.network)


def _run(sentence: Spec, engine: Peers, watch: Watch) -> Result | None:
    """The result; None if this party has left."""
    try:
        return sentence.run(engine=replace(engine, on_start=watch.start))
    except Left:
        watch.say(f"{engine.party}: left, and transferred its mass")
        return None
    finally:
        watch.end()


def _summary(config: Deployment, name: str, result: Result | None, watch: Watch) -> dict[str, Any]:
    """What a run cost a party, and what it saw."""
    session, names = watch.session, list(config.peers)
    assert session is not None
    seen = watch.look()
    return {
        "name": name,
        "mode": config.mode,
        "left": result is None,
        "resumed_at": session.resumed_at,
        "rounds": seen["round"],
        "floats": None if result is None else result.costs.floats,
        "bytes": None if result is None else result.costs.bytes,
        "late": seen["late"],
        "rejected": seen["rejected"] | seen["rejected_by_transport"],
        "closed_out": [names[other] for other in sorted(session.transport.closed)],
    }


def _write_result(out: Path, name: str, result: Result, before: Sequence[Budget] = ()) -> dict[str, Any]:
    """A party's own models and history, as every run folder has them; what its summary says of them."""
    write_arrays(out, result)
    found = summarize(result)
    history = getattr(result, "history", None)
    if isinstance(history, History) and len(history):
        write_events(out / METRICS, [event("row", {"client": name, **row}) for row in history_rows(history)])
        if history.recorded_cost is not None:
            found["outer_costs"] = np.asarray(history.recorded_cost, np.float64).tolist()
    if isinstance(result, Influence):
        found |= scores_of(result)
    if result.privacy is not None:
        found |= _privacy_summary(sum(before, result.privacy)) | {"starts": 1 + len(before)}
    return found


def _privacy_summary(budget: Budget) -> dict[str, Any]:
    """What was released of a party's data, and what it costs: pure ε of Laplace noise, else that at `DELTA`."""
    pure = all(isinstance(part.mechanism, Laplace) for part in budget.parts)
    epsilon, delta = (budget.epsilon(), 0.0) if pure else (budget.epsilon(DELTA), DELTA)
    return {"epsilon": epsilon, "delta": delta, "releases": dict(budget.releases), "assumes": budget.assumes}
