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

from hyperpush import saved
from hyperpush.config import to_toml
from hyperpush.errors import InvalidInput, unknown
from hyperpush.peers.checkpoint import Checkpoint
from hyperpush.peers.options import Peers, addresses, digest, identity, private
from hyperpush.peers.options import read as read
from hyperpush.peers.session import Address, Identity

MODEL, HYPERS, STATUS, CHECKPOINT = "params.safetensors", "hypers.safetensors", "status.json", "checkpoint.safetensors"
SECRET = "secret.key"


def own_data(path: Path, like: Any) -> Any:
    """A party's examples from its file, in the shape of the problem's data: `inner/0`, … as the leaves are called.

    Only the first axis of an array, its examples, may be of another length than in the problem.
    """
    import jax
    import numpy as np

    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(where, simple=True, separator="/") for where, _ in leaves]
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInput("data", str(path), f"an .npz file with {', '.join(names)} ({error})") from None
    if set(arrays) != set(names):
        raise InvalidInput("data", sorted(arrays), f"arrays named {', '.join(names)}, in {path}")
    found = []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        array = arrays[name]
        if array.ndim != leaf.ndim or array.shape[1:] != leaf.shape[1:]:
            raise InvalidInput(f"data {name}", array.shape, f"examples of shape {leaf.shape[1:]}")
        if array.dtype.kind not in "biuf":
            raise InvalidInput(f"data {name}", str(array.dtype), "numbers")
        if array.ndim and not len(array):
            raise InvalidInput(f"data {name}", "no examples", "at least 1")
        if not np.all(np.isfinite(array)):
            raise InvalidInput(f"data {name}", "a number that is not finite", "finite numbers")
        found.append(np.asarray(array, leaf.dtype))
    return structure.unflatten(found)


class Status(threading.Thread):
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
    from hyperpush.run import _jax

    with _jax(config.experiment.precision):
        return _take_part(config, name, base, out, who, say)


def _take_part(
    config: Peers,
    name: str,
    base: Path,
    out: Path,
    who: Identity | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    import jax
    import numpy as np
    import optax

    from hyperpush import networks
    from hyperpush.bilevel.consensus import OuterConsensus
    from hyperpush.bilevel.solve import solve
    from hyperpush.engine.faults import Faults
    from hyperpush.engine.peer import Left, row
    from hyperpush.estimators.tracked import TrackedHGP
    from hyperpush.experiments.solve import estimation, instance, solver, stopping
    from hyperpush.peers.engine import Engine, neighbours
    from hyperpush.peers.faulty import Faulty
    from hyperpush.peers.handshakes import count_handshakes
    from hyperpush.peers.session import settings
    from hyperpush.peers.zenoh import Zenoh

    options, names = config.experiment, list(config.peers)
    client, own = names.index(name), config.peers[name]
    made = instance(options)
    network = networks.by_name(options.network, options.clients, options.seed, **options.network_options)
    inner_data, outer_data = made.inner_data, made.outer_data
    if own.data is not None:
        like = jax.tree.map(lambda leaf: row(leaf, client), {"inner": inner_data, "outer": outer_data})
        mine = own_data(base / own.data, like)
        # Every row is this party's: only its own is ever looked at.
        inner_data, outer_data = (
            jax.tree.map(lambda leaf: np.broadcast_to(leaf, (options.clients, *np.shape(leaf))), mine[part])
            for part in ("inner", "outer")
        )
    alone = options.outer.form == "CDBO-Local"
    inner = solver(options.inner, "Alone" if alone else options.inner.method)
    estimator = estimation(options.estimator, "LocalGradient" if alone else options.estimator.method)
    if config.mode == "asynchronous" and isinstance(estimator, TrackedHGP):
        estimator = replace(estimator, tolerance=None)  # nobody can vote on its end
    consensus = None if options.outer.form == "PDBO" else OuterConsensus(options.outer.pushes, options.outer.tracked)
    stop = stopping(options, made.problem)
    inner, estimator = private(options, inner, estimator, consensus, stop)
    around = neighbours(network, client, everyone=inner.__class__.__name__ == "FedAvg")
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
    repeats = options.privacy is None  # what ε pays for once cannot be sent again, with other noise, in a new view
    engine = Engine(client, faulty, asynchronous, store, max(config.checkpoint, 1), own_key, repeats)

    def look() -> dict[str, Any]:
        return {"name": name, "pid": os.getpid(), **engine.status(), **_seen(transport, handshakes)}

    begun = threading.Event()

    def told() -> None:
        if asynchronous and begun.is_set() and not engine.leaves:
            engine.leave()
        else:
            back = "started again, it goes on from its checkpoint" if store else "without checkpoints it cannot go on"
            transport.stop(f"ended by SIGTERM; {back}")

    watcher = Status(out / STATUS, look)
    watcher.start()
    began = time.monotonic()
    with _on_sigterm(told):
        try:
            if stored is not None:
                say(f"{name}: going on from step {stored[1]['step']}")
            transport.ready(0 if stored is None else stored[1]["step"], everyone=stored is None)
            begun.set()
            solution = solve(
                made.problem,
                network,
                inner=inner,
                hypergradient=estimator,
                outer=optax.adam(options.outer.rate),
                outer_steps=options.outer.steps,
                params=made.params,
                hypers=made.hypers,
                inner_data=inner_data,
                outer_data=outer_data,
                key=jax.random.split(jax.random.key(options.seed))[0],
                restart=options.outer.restart,
                consensus=consensus,
                stop=stop,
                trace=True,
                run=engine.run,
                **({"faults": Faults()} if asynchronous else {}),
            )
        except Left:
            say(f"{name}: left, and handed its mass over")
            solution = None
        finally:
            watcher.end()
            transport.close()
        result: dict[str, Any] = {"name": name, "mode": config.mode, "left": solution is None}
        if solution is not None:
            result["outer_costs"] = _write_solution(out, solution)
            _write(out / saved.CONFIG, to_toml("peers", config).encode())
        seen = engine.status()
        result |= {
            "resumed_at": None if stored is None else stored[1]["step"],
            "rounds": seen["round"],
            "floats": None if solution is None else solution.floats,
            "late": seen["late"],
            "rejected": seen["rejected"] | transport.rejections.counts() | handshakes.counts(),
            "closed_out": [names[other] for other in sorted(transport.closed)],
            "seconds": round(time.monotonic() - began, 3),
        }
        if options.privacy is not None:
            result |= {"epsilon": options.privacy.epsilon, "delta": options.privacy.delta}
        _write(out / saved.RESULT, (saved.to_json(result) + "\n").encode())  # last: it says that all is there
        if store is not None:
            store.remove()
    return result


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


def _write(path: Path, data: bytes) -> None:
    """All of a file or nothing."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)


def _write_solution(out: Path, solution: Any) -> list[float]:
    """A party's own model, hypers, hyper-gradients and metrics; returns its outer costs."""
    import jax
    import numpy as np

    costs = np.asarray(solution.outer_costs, np.float64)[:, 0].tolist()
    norms = np.asarray(solution.history.norms, np.float64)[:, 0].tolist()
    lines = [{"outer_step": 0, "outer_cost": costs[0]}]
    lines += [
        {"outer_step": k + 1, "outer_cost": costs[k + 1], "hypergradient_norm": norms[k]} for k in range(len(norms))
    ]
    _write(out / saved.METRICS, "".join(saved.to_json(line) + "\n" for line in lines).encode())
    for file, tree in ((MODEL, solution.params), (HYPERS, solution.hypers)):
        save_tree(out / file, jax.tree.map(lambda leaf: np.asarray(leaf)[0, ...], tree))
    if solution.hypergradients is not None:
        gradients = jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], solution.hypergradients)
        save_tree(out / "hypergradients.safetensors", gradients)
    return costs


def secret(path: Path, agreed: bytes) -> Any:
    """A random key of this party's own: of a secret in a file, so that it is the same after a restart, and of the run.

    Another configuration draws other noise, though the secret is still there.
    """
    import jax

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
    import jax
    import numpy as np
    from safetensors.numpy import save

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {
        jax.tree_util.keystr(where, simple=True, separator="/"): np.array(leaf, order="C") for where, leaf in leaves
    }
    _write(path, save(named))


def _seen(transport: Any, handshakes: Any) -> dict[str, Any]:
    links = transport.status()
    return {
        "links": links,
        "rejected_by_transport": transport.rejections.counts() | handshakes.counts(),
        "received_bytes": sum(link["received_bytes"] for link in links.values()),
        "sent_bytes": sum(link["sent_bytes"] for link in links.values()),
    }
