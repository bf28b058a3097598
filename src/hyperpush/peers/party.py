"""One party of a run among peers: from its configuration to its own model."""

import json
import os
import secrets
import signal
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from safetensors.numpy import save

from hyperpush import spec
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer import Left
from hyperpush.errors import HyperpushError, InvalidInput, unknown
from hyperpush.hypergradients.tracked import TrackedHGP
from hyperpush.imports import load_function
from hyperpush.method import Method
from hyperpush.peers.checkpoint import Checkpoint
from hyperpush.peers.engine import Host, PeerEngine, Rehearsal, Rehearsed, needs_server, neighbours
from hyperpush.peers.faulty import Faulty
from hyperpush.peers.handshakes import count_handshakes
from hyperpush.peers.options import Peers, addresses, check_draws, digest, identity
from hyperpush.peers.options import read as read
from hyperpush.peers.session import Address, Identity, settings
from hyperpush.peers.trained import TrainFirst
from hyperpush.peers.zenoh import Zenoh
from hyperpush.privacy.budget import Budget
from hyperpush.privacy.mechanisms import Laplace
from hyperpush.results import History
from hyperpush.runs import saved
from hyperpush.runs.config import to_toml
from hyperpush.runs.run import _jax
from hyperpush.spec import Spec

MODEL, HYPERS, HYPERGRADIENT = "params.safetensors", "hypers.safetensors", "hypergradient.safetensors"
STATUS, CHECKPOINT = "status.json", "checkpoint.safetensors"
SECRET = "secret.key"
DELTA = 1e-5  # δ at which a result says what Gaussian noise costs


def own_data(given: str, base: Path, name: str, like: dict[str, Any]) -> dict[str, Any]:
    """A party's examples by data set, in the shape of the task's: from an .npz file, or from `module:function(name)`.

    Arrays of a file are called as the leaves are: `train/0`, …. Only the first axis, the examples, may be of another
    length than in the task.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    names, field = [leaf_name(where) for where, _ in leaves], f"peers.{name}.data"
    if ":" in given and not (base / given).exists():
        arrays = _load_arrays(field, given, name)
    else:
        arrays = _read_arrays(field, base / given, names)
    if set(arrays) != set(names):
        raise InvalidInput(field, sorted(arrays), f"arrays named {', '.join(names)}, in {given}")
    checked = [_checked(f"{field} {key}", arrays[key], leaf) for key, (_, leaf) in zip(names, leaves, strict=True)]
    return structure.unflatten(checked)


def leaf_name(where: Any) -> str:
    """What files call a leaf of a pytree."""
    return jax.tree_util.keystr(where, simple=True, separator="/")


def _load_arrays(field: str, given: str, name: str) -> dict[str, np.ndarray]:
    """The arrays that the party's own function returns."""
    function = load_function(field, given)
    try:
        found = jax.tree_util.tree_flatten_with_path(function(name))[0]
        return {leaf_name(where): np.asarray(leaf) for where, leaf in found}
    except HyperpushError:
        raise
    except Exception as error:  # the function is the user's: whatever it raises, say so
        said = f"{given}, which fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of the party's name that returns its examples") from error


def _read_arrays(field: str, path: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInput(field, str(path), f"an .npz file with {', '.join(names)} ({error})") from None


def _checked(field: str, array: np.ndarray, like: Any) -> np.ndarray:
    """One array of a party's examples, in the type of the task's."""
    if array.ndim != like.ndim or array.shape[1:] != like.shape[1:]:
        raise InvalidInput(field, array.shape, f"examples of shape {like.shape[1:]}")
    if array.dtype.kind not in "biuf":
        raise InvalidInput(field, str(array.dtype), "numbers")
    if array.ndim and not len(array):
        raise InvalidInput(field, "no examples", "at least 1")
    if not np.all(np.isfinite(array)):
        raise InvalidInput(field, "a number that is not finite", "finite numbers")
    return np.asarray(array, like.dtype)


def own_sentence(config: Peers, name: str, base: Path) -> Spec:
    """What this party runs: the sentence of all, on its own data and start."""
    made, names = spec.read(config.spec.sentence()), list(config.peers)
    if made.task.clients != len(names):
        raise InvalidInput("task.clients", made.task.clients, f"{len(names)}, as many as peers")
    check_draws(config, made.task.privacy is not None)
    task = made.task.replace(names=tuple(names))
    given = config.peers[name].data
    own = None
    if given is not None:
        like = {key: each.of(names.index(name)) for key, each in task._sets.items()}
        own = own_data(given, base, name, like)
    method = without_votes(made.method) if config.mode == "asynchronous" else made.method
    return replace(made, task=task.for_client(name, own), method=method)


def without_votes(method: Any) -> Any:
    """The method with estimators that take all their steps: asynchronously nobody can vote on an end."""
    if isinstance(method, TrackedHGP):
        return replace(method, tolerance=None)
    changes = {key: without_votes(each) for key, each in method.options().items() if isinstance(each, Method)}
    return replace(method, **changes) if changes else method


def rehearse(made: Spec, asynchronous: bool) -> None:
    """Refuse what the verbs would refuse, before anything is written or sent."""
    if made.trainer is not None and getattr(made.method, "trains", False):
        allowed = f"nothing: {type(made.method).__name__} trains itself"
        raise InvalidInput("train", type(made.trainer).__name__, allowed)
    for each in (made, as_one(made)):
        with suppress(Rehearsed):
            each.run(engine=Rehearsal(asynchronous))


def as_one(made: Spec) -> Spec:
    """The sentence with its training as part of its method, so that there is one program to walk."""
    if made.trainer is None:
        return made
    return replace(made, trainer=None, method=TrainFirst(made.trainer, made.method))


class StatusFile(threading.Thread):
    """Writes what a peer sees to a file, a few times a second, for whoever watches."""

    def __init__(self, path: Path, look: Callable[[], Mapping[str, Any]], every: float = 0.2):
        super().__init__(daemon=True)
        self.path, self.look, self.every = path, look, every
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(self.every):
            self.write()

    def write(self) -> None:
        new = self.path.with_name(self.path.name + ".new")
        with suppress(OSError):
            new.write_text(saved.to_json(dict(self.look())), encoding="utf-8")
            new.replace(self.path)

    def end(self) -> None:
        self._end.set()
        self.join(5)
        self.write()


def take_part(config: Peers, name: str, base: Path = Path(), say: Callable[[str], None] = print) -> dict[str, Any]:
    """Be the party `name`: run the experiment with the others, write the own model; returns the result."""
    if name not in config.peers:
        raise unknown("--name", name, config.peers)
    own = config.peers[name]
    out = base / (own.out or name)
    if (out / saved.RESULT).exists():
        left_over = Checkpoint(out / CHECKPOINT, digest(config))
        if left_over.load() is None:
            raise InvalidInput(f"peers.{name}.out", str(out), "a folder without the result of an earlier run")
        left_over.remove()  # killed when all was written
        return json.loads((out / saved.RESULT).read_text(encoding="utf-8"))
    who = identity(config, name, base)
    with _jax(config.spec.precision):
        return _take_part(config, name, base, out, who, say)


def _take_part(
    config: Peers,
    name: str,
    base: Path,
    out: Path,
    who: Identity | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    names = list(config.peers)
    client, own = names.index(name), config.peers[name]
    made = own_sentence(config, name, base)
    rehearse(made, config.mode == "asynchronous")
    made = as_one(made)
    program = made.method.program(made.task.problem)
    around = neighbours(made.network, client, everyone=needs_server(program))
    agreed = digest(config)
    links = addresses(config, name, [names[other] for other in around])
    listen = None if own.address is None else Address.parse(f"peers.{name}.address", own.address)
    settings(config.run, name, listen, links, who)  # before anything is written
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"peers.{name}.out", str(out), f"a folder that can be written ({error.strerror})") from None
    asynchronous = config.mode == "asynchronous"
    store = Checkpoint(out / CHECKPOINT, agreed) if config.checkpoint else None
    stored = None if store is None else store.load()
    handshakes = count_handshakes()
    transport = Zenoh(
        config.run,
        names,
        client,
        links,
        listen=listen,
        identity=who,
        digest=agreed,
        mode=config.mode,
        patience=config.patience,
        close_after=config.close_after,
        longest_wait=config.longest_wait,
        durable=store is not None,
        closed=() if stored is None else stored[1]["closed"],
        left=() if stored is None else stored[1]["left"],
    )
    say(f"{name}: {'mutual TLS' if who else 'no certificate: loopback only'}; configuration {agreed.hex()[:16]}…")
    faulty = transport
    if config.faults.any:
        fate = Faults(config.faults.loss, config.faults.duplicate, config.faults.delay)
        faulty = Faulty(transport, fate, config.faults.seed, client)
    own_key = secret(out / SECRET, agreed) if config.private_draws else None
    repeats = made.task.privacy is None  # what ε pays for once cannot be sent again, with other noise, in a new view
    engine = Host(client, faulty, asynchronous, store, max(config.checkpoint, 1), own_key, repeats)

    def look() -> dict[str, Any]:
        return {"name": name, "pid": os.getpid(), **engine.status(), **_seen(transport, handshakes)}

    begun = threading.Event()

    def told() -> None:
        if asynchronous and begun.is_set() and not engine.leaves:
            engine.leave()
        else:
            back = "started again, it goes on from its checkpoint" if store else "without checkpoints it cannot go on"
            transport.stop(f"ended by SIGTERM; {back}")

    watcher = StatusFile(out / STATUS, look)
    watcher.start()
    began = time.monotonic()
    with _on_sigterm(told):
        try:
            if stored is not None:
                say(f"{name}: going on from step {stored[1]['step']}")
            transport.ready(0 if stored is None else stored[1]["step"], everyone=stored is None)
            begun.set()
            result = made.run(engine=PeerEngine(engine))
        except Left:
            say(f"{name}: left, and handed its mass over")
            result = None
        finally:
            watcher.end()
            transport.close()
        summary: dict[str, Any] = {"name": name, "mode": config.mode, "left": result is None}
        if result is not None:
            summary |= _write_result(out, result)
            write_atomic(out / saved.CONFIG, to_toml("spec", config.spec).encode())
        seen = engine.status()
        summary |= {
            "resumed_at": None if stored is None else stored[1]["step"],
            "rounds": seen["round"],
            "floats": None if result is None else result.costs.floats,
            "bytes": None if result is None else result.costs.bytes,
            "late": seen["late"],
            "rejected": seen["rejected"] | transport.rejections.counts() | handshakes.counts(),
            "closed_out": [names[other] for other in sorted(transport.closed)],
            "seconds": round(time.monotonic() - began, 3),
        }
        write_atomic(out / saved.RESULT, (saved.to_json(summary) + "\n").encode())  # last: it says that all is there
        if store is not None:
            store.remove()
    return summary


@contextmanager
def _on_sigterm(told: Callable[[], None]) -> Iterator[None]:
    """Do this when the process is told to end, instead of ending it; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_atomic(path: Path, data: bytes) -> None:
    """All of a file or nothing."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)


def _write_result(out: Path, result: Any) -> dict[str, Any]:
    """A party's own model, hypers, hypergradient and history; what its summary says of them."""
    found: dict[str, Any] = {"status": str(result.status)}
    history = getattr(result, "history", None)
    if isinstance(history, History) and len(history):
        columns = history.columns()
        rows = [
            {key: float(column[row]) for key, column in columns.items() if np.isfinite(column[row])}
            for row in range(len(history))
        ]
        write_atomic(out / saved.METRICS, "".join(saved.to_json(row) + "\n" for row in rows).encode())
        if history.recorded_cost is not None:
            found["outer_costs"] = np.asarray(history.recorded_cost, np.float64).tolist()
    for name, file in (("params", MODEL), ("hypers", HYPERS), ("value", HYPERGRADIENT)):
        if getattr(result, name, None) is not None:
            save_tree(out / file, jax.tree.map(np.asarray, eqx.filter(getattr(result, name), eqx.is_array)))
    if hasattr(result, "examples"):
        found |= {"scores": result.examples[0].tolist(), "client": float(result.clients[0])}
    if result.privacy is not None:
        found |= _spent(result.privacy)
    return found


def _spent(budget: Budget) -> dict[str, Any]:
    """What was released of a party's data, and what it costs: pure ε of Laplace noise, else that at `DELTA`."""
    pure = all(isinstance(part.mechanism, Laplace) for part in budget.parts)
    epsilon, delta = (budget.epsilon(), 0.0) if pure else (budget.epsilon(DELTA), DELTA)
    return {"epsilon": epsilon, "delta": delta, "releases": dict(budget.releases), "assumes": budget.assumes}


def secret(path: Path, agreed: bytes) -> Any:
    """A random key of this party's own: of a secret in a file, so that it is the same after a restart, and of the run.

    Another configuration draws other noise, though the secret is still there.
    """
    if not path.exists():
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        with new.open("wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    own = path.read_bytes()
    if len(own) != 32:
        raise InvalidInput(str(path), f"{len(own)} bytes", "32, as it was written; remove it to start anew")
    made = blake2b(agreed, key=own, digest_size=8).digest()
    return jax.random.wrap_key_data(jax.numpy.frombuffer(made, jax.numpy.uint32))


def save_tree(path: Path, tree: Any) -> None:
    """The arrays of a pytree in one safetensors file, by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {leaf_name(where): np.array(leaf, order="C") for where, leaf in leaves}
    write_atomic(path, save(named))


def _seen(transport: Any, handshakes: Any) -> dict[str, Any]:
    links = transport.status()
    return {
        "links": links,
        "rejected_by_transport": transport.rejections.counts() | handshakes.counts(),
        "received_bytes": sum(link["received_bytes"] for link in links.values()),
        "sent_bytes": sum(link["sent_bytes"] for link in links.values()),
    }
