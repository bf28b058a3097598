"""Run one party among peers, from its configuration to its model."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperpush.base.errors import HyperpushError, InvalidInput, unknown
from hyperpush.base.files import unwritten, write_atomically
from hyperpush.deploy.data import read_own_data
from hyperpush.deploy.folder import private_folder
from hyperpush.deploy.options import (
    CHECKPOINT,
    Deployment,
    check_draws,
    digest,
    dotted_keys,
    engine_of,
    folder_of,
    party_folder,
)
from hyperpush.deploy.train_first import TrainFirst
from hyperpush.deploy.watch import Watch, on_signals
from hyperpush.engines.peer import Checkpoint, Left
from hyperpush.engines.peers import Peers
from hyperpush.engines.result import RunResult
from hyperpush.influence.scores import Influence
from hyperpush.networks import Network
from hyperpush.privacy.mechanisms import Laplace
from hyperpush.programs import Node, ProgramRecipe, as_recipe
from hyperpush.runs.events import event, to_json, write_events
from hyperpush.runs.folder import CONFIG, METRICS, RESULT
from hyperpush.runs.lifecycle import Lifecycle
from hyperpush.runs.process import set_up_jax
from hyperpush.spec import objects
from hyperpush.spec.config import to_toml
from hyperpush.spec.objects import Spec
from hyperpush.spec.run import history_rows, scores_of
from hyperpush.verbs.budget import Budget, budget
from hyperpush.verbs.results import History, Result
from hyperpush.verbs.saving import summarize, write_arrays

DELTA = 1e-5  # δ at which results report the ε of Gaussian noise


def own_spec(config: Deployment, name: str, base: Path, spec: Spec | None = None) -> Spec:
    """Return the shared spec with this party's data and initial point.

    Args:
        config: The deployment.
        name: This party.
        base: Folder to which relative paths refer.
        spec: The shared spec, if it was read before. None: read it from `config`.
    """
    spec, names = spec or objects.read(config.spec.tables()), list(config.peers)
    if spec.task.clients != len(names):
        raise InvalidInput("task.clients", spec.task.clients, f"{len(names)}, the number of peers")
    known = spec.task.names
    if any(peer != client and peer in known for peer, client in zip(names, known, strict=True)):
        raise InvalidInput("peers", ", ".join(names), f"the order of the task's clients, {', '.join(known)}")
    check_draws(config, spec.task.privacy is not None)
    task, given, own = spec.task.replace(names=tuple(names)), config.peers[name].data, None
    if given is not None:
        like = {key: each.of(names.index(name)) for key, each in task._sets.items()}
        own = read_own_data(given, base, name, like)
    start = spec.start and base / spec.start
    return replace(spec, task=task.for_client(name, own), start=start)


class Rehearsed(Exception):
    """Raised when a rehearsal reaches the first program of a run, so all checks before it have passed."""


class Rehearsal(Peers):
    """Engine in place of a party's own that makes all checks, then stops before anything runs or is sent."""

    def run(self, program: Node | ProgramRecipe, network: Network, *args: Any, **options: Any) -> RunResult:
        """Raise InvalidInput for a program that this party cannot run, else `Rehearsed`."""
        self.connect(as_recipe(program).program(), network)
        raise Rehearsed


def rehearse(spec: Spec, engine: Peers) -> None:
    """Raise the errors that running a spec would raise in its checks, before anything is written or sent."""
    if spec.trainer is not None and spec.method.trains:
        allowed = f"no [train] table: {type(spec.method).__name__} trains by itself"
        raise InvalidInput("train", type(spec.trainer).__name__, allowed)
    with suppress(Rehearsed), dotted_keys(engine.party):
        as_one_program(spec).run(engine=Rehearsal(**vars(engine)))


def prepare(
    config: Deployment, name: str, base: Path, of_all: Spec | None = None, rehearsed: bool = False
) -> tuple[Spec, Peers]:
    """Return a party's spec and its engine, after a rehearsal unless the spec was rehearsed before.

    `of_all` is the shared spec, if it was read before.
    """
    spec = own_spec(config, name, base, of_all)
    engine = engine_of(config, name, base, spec.task.privacy is not None)
    if not rehearsed:
        rehearse(spec, engine)
    return spec, engine


def as_one_program(spec: Spec) -> Spec:
    """Return the spec with its training inside its method, so that the party runs a single program."""
    if spec.trainer is None:
        return spec
    return replace(spec, trainer=None, method=TrainFirst(spec.trainer, spec.method))


def run_peer(
    config: Deployment,
    name: str,
    base: Path = Path(),
    say: Callable[[str], None] = print,
    rehearsed: bool = False,
) -> dict[str, Any]:
    """Run the spec as the party `name`, write this party's model, and return the summary of its result.

    `say` shows a line to the user. `rehearsed=True` skips the rehearsal, for a caller that has rehearsed all parties.
    """
    if name not in config.peers:
        raise unknown("--name", name, config.peers)
    out = folder_of(config, name, base)
    with set_up_jax(config.spec.precision):
        # Read the input before the folder is made, so that invalid input leaves no folder.
        ready = None if party_folder(out).finished else prepare(config, name, base, rehearsed=rehearsed)
        shared = out.resolve() in (Path.cwd(), base.resolve(), *base.resolve().parents)
        life = Lifecycle(party_folder(out, f"peers.{name}.out"))
        with private_folder(out, life.folder.field, keep_mode=shared), life.hold():
            if ready is None or life.folder.finished:
                return _read_finished(life, config)
            with life.attempt():
                return _run_in(life, config, *ready, say)


def _read_finished(life: Lifecycle, config: Deployment) -> dict[str, Any]:
    """Return the summary of a party whose process was killed after it had written the result."""
    out, field = life.folder.path, life.folder.field
    if Checkpoint(out / CHECKPOINT, digest(config)).load() is None:
        raise InvalidInput(field, str(out), "a folder without the result of an earlier run")
    text = (out / RESULT).read_text(encoding="utf-8")
    life.keep(text)
    return json.loads(text)


def _run_in(
    life: Lifecycle, config: Deployment, spec: Spec, engine: Peers, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a party's spec in its folder and return the summary."""
    out, spec = life.folder.work, as_one_program(spec)
    began = time.monotonic()
    watch = Watch(config, engine.party, out, say, _budget_of(spec), summarize=_privacy_of_starts)
    with on_signals(watch.stop):
        result = _run(spec, engine, watch)
        summary = _summary(config, engine.party, result, watch) | {"seconds": round(time.monotonic() - began, 3)}
        try:
            if result is not None:
                if result.status.converged is False:
                    say(f"{engine.party}: {result.status}")
                summary |= _write_result(out, engine.party, result, watch.before)
                write_atomically(out / CONFIG, to_toml("spec", config.spec))
            life.keep(to_json(summary) + "\n")
        except OSError as error:
            said = f"{unwritten(f'the result in {out}', error)}; make room and start again"
            kept = ": the checkpoint holds it" if config.engine["checkpoint_every"] else ""
            raise HyperpushError(said + kept) from None
    return summary


def _budget_of(spec: Spec) -> Budget | None:
    """Return the most that a run of a private spec can release; None for a spec without privacy."""
    return None if spec.task.privacy is None else budget(spec.task, spec.method, spec.network)


def _run(spec: Spec, engine: Peers, watch: Watch) -> Result | None:
    """Run the spec and return its result; None if this party has left."""
    try:
        found = spec.run(engine=replace(engine, on_start=watch.start))
    except Left:
        watch.say(f"{engine.party}: left, and transferred its mass")
        watch.end("left")
        return None
    except BaseException as error:
        watch.end(" ".join(str(error).split()) or type(error).__name__)
        raise
    watch.end()
    return found


def _summary(config: Deployment, name: str, result: Result | None, watch: Watch) -> dict[str, Any]:
    """Return a party's costs of a run, and its counts of late, refused and missing messages of other parties."""
    session = watch.session
    assert session is not None
    seen = watch.look()
    return {
        "name": name,
        "mode": config.engine["mode"],
        "left": result is None,
        "resumed_at": session.resumed_at,
        "rounds": seen["round"],
        "floats": None if result is None else result.costs.floats,
        "bytes": None if result is None else result.costs.bytes,
        "late": seen["late"],
        "rejected": seen["rejected"] | seen["rejected_by_transport"],
        "refused": seen["refused"],
        "isolated": seen["isolated"],
        "outages": {name: link["outages"] for name, link in seen["links"].items() if link["outages"]},
        "closed_out": seen["closed_out"],
    }


def _write_result(out: Path, name: str, result: Result, before: Sequence[Budget] = ()) -> dict[str, Any]:
    """Write a party's models and history into its folder `out`, and return their part of the summary."""
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
        found |= _privacy_of_starts([*before, result.privacy])
    return found


def _privacy_of_starts(starts: Sequence[Budget]) -> dict[str, Any]:
    """Return the joint privacy costs of several starts of a party, and the number of starts."""
    return _privacy_summary(sum(starts[:-1], starts[-1])) | {"starts": len(starts)}


def _privacy_summary(budget: Budget) -> dict[str, Any]:
    """Return the number of releases of a party's data, and their cost: pure ε for Laplace noise, else ε at `DELTA`."""
    pure = all(isinstance(part.mechanism, Laplace) for part in budget.parts)
    epsilon, delta = (budget.epsilon(), 0.0) if pure else (budget.epsilon(DELTA), DELTA)
    return {"epsilon": epsilon, "delta": delta, "releases": dict(budget.releases), "assumes": budget.assumes}
