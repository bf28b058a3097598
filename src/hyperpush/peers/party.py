"""One party of a run among peers: from its configuration to its own model.

All parties hold the same file but for paths and addresses, which are everybody's own affair. What they have to agree on
(the run, its mode, the names in their order, the experiment) goes into a digest that peers compare before they start.
"""

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
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush import saved
from hyperpush.config import Config, to_toml, validate
from hyperpush.errors import InvalidInput, unknown
from hyperpush.experiments.solve import Solve
from hyperpush.peers.certificates import check_name
from hyperpush.peers.session import Address, Identity

Probability = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0)]

MODEL, HYPERS, STATUS, CHECKPOINT = "params.safetensors", "hypers.safetensors", "status.json", "checkpoint.safetensors"
SECRET = "secret.key"


class Where(Config):
    """One party: where it is, and where its own files are."""

    address: str | None = Field(default=None, description="host:port that it listens on; nobody dials it if left out.")
    data: str | None = Field(
        default=None, description=".npz file with its examples; those of the problem's own client if left out."
    )
    certificate: str | None = Field(default=None, description="PEM file that names it.")
    key: str | None = Field(default=None, description="PEM file with the certificate's private key.")
    out: str | None = Field(default=None, description="Folder for its results; its name if left out.")


class Injected(Config):
    """Faults for trials."""

    loss: Probability = Field(default=0.0, description="Probability that a message is lost.")
    duplicate: Probability = Field(default=0.0, description="Probability that it comes twice.")
    delay: int = Field(default=0, ge=0, description="Rounds by which it may be late.")
    seed: int = Field(default=0, ge=0, description="Decides which.")

    @property
    def any(self) -> bool:
        return bool(self.loss or self.duplicate or self.delay)


class Privacy(Config):
    """Local differential privacy of all that a party sends; chosen beforehand, as what is chosen by looking leaks."""

    epsilon: Annotated[float, Field(gt=0)] = Field(default=1.0, description="What all of it may cost in all.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=1e-5, description="δ, with Gaussian noise; 0 for pure ε, with Laplace noise."
    )
    clip: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Largest ℓ2 norm of an example's gradient.")
    curvature: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Largest norm of an example's ∂²_xx f v, for v of norm 1."
    )
    coupling: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Largest norm of an example's ∂²_λx f v, for v of norm 1."
    )


class Shared(Solve):
    """What all peers do: the options of `hyperpush run solve`, and privacy."""

    privacy: Privacy | None = Field(
        default=None, description="Noise in all that is made of data, so that every party's messages cost at most ε."
    )


class Peers(Config):
    """A run among peers."""

    run: str = Field(default="trial", description="Its name: part of every message's key.")
    mode: Literal["synchronous", "asynchronous"] = Field(
        default="synchronous", description="In step, as simulated; or everybody at its own pace."
    )
    patience: Seconds = Field(default=120.0, description="Seconds to wait for a peer before it is an error.")
    close_after: Seconds = Field(
        default=30.0, description="Seconds after which, asynchronously, a vanished peer is closed out."
    )
    longest_wait: Seconds = Field(default=2.0, description="Most seconds to wait for a message, asynchronously.")
    checkpoint: int = Field(
        default=1, ge=0, description="Exchanges between checkpoints, 0 for none; asynchronously every one is."
    )
    private_draws: bool = Field(
        default=False,
        description="Whether a peer's draws (mini-batches, noise) come from a secret of its own, not from the seed.",
    )
    authority: str | None = Field(default=None, description="PEM file of the authority that signs certificates.")
    experiment: Shared = Field(default=Shared(), description="As for `hyperpush run solve`, and `privacy`.")
    peers: dict[str, Where] = Field(default={}, description="The parties by name, in the order of their clients.")
    faults: Injected = Injected()

    @model_validator(mode="after")
    def _fits(self) -> "Peers":
        check_name("run", self.run)
        for name in self.peers:
            check_name("peers", name)
        if self.peers and self.experiment.clients != len(self.peers):
            raise InvalidInput("experiment.clients", self.experiment.clients, f"{len(self.peers)}, as many as peers")
        if self.faults.any and self.mode == "synchronous":
            raise InvalidInput("faults", self.faults.model_dump(), "none, or mode = 'asynchronous'")
        if self.experiment.privacy is not None and not self.private_draws:
            raise InvalidInput(
                "private_draws", False, "true, with privacy: who knows the seed can take noise off again"
            )
        return self


def read(path: Path, count: int | None = None, faults: Mapping[str, Any] | None = None) -> Peers:
    """A configuration from a TOML file: of a run with `peers`, or of a swarm of `count`, perhaps with other faults."""
    from hyperpush.config import _read

    values = _read(path)
    peers = values.get("peers")
    clients = len(peers) if isinstance(peers, dict) else count
    if clients is not None and isinstance(values.setdefault("experiment", {}), dict):
        values["experiment"].setdefault("clients", clients)
    if faults and isinstance(values.setdefault("faults", {}), dict):
        values["faults"] |= faults
    found = validate(Peers, values)
    assert isinstance(found, Peers)
    return found


def private(options: Shared, inner: Any, estimator: Any, consensus: Any, stop: Any) -> tuple[Any, Any]:
    """The solver and the estimator with the noise that the configuration asks for; refused where there is none."""
    import hyperpush as hp

    asked = options.privacy
    if asked is None:
        return inner, estimator
    for field, method, able in (
        ("experiment.inner.method", inner, (hp.SGP,)),
        ("experiment.estimator.method", estimator, (hp.HGP, hp.TrackedHGP)),
    ):
        if not isinstance(method, able):
            allowed = " or ".join(each.__name__ for each in able)
            raise InvalidInput(field, type(method).__name__, f"{allowed}, as experiment.privacy is given")
    kind, delta = (hp.Gaussian, asked.delta) if asked.delta else (hp.Laplace, None)
    inner = replace(inner, privacy=hp.Noise(kind(1.0), asked.clip))
    estimator = replace(estimator, privacy=hp.Noise(kind(1.0), asked.clip, asked.curvature, asked.coupling))
    steps = options.outer.steps
    made = hp.within(asked.epsilon, delta, inner, estimator if steps else None, steps, consensus, stop)
    return made[0], estimator if made[1] is None else made[1]


def digest(config: Peers) -> bytes:
    """What peers compare before they start."""
    agreed = {
        "run": config.run,
        "mode": config.mode,
        "private_draws": config.private_draws,
        "names": list(config.peers),
        "experiment": config.experiment.model_dump(mode="json"),
    }
    return blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=32).digest()


def identity(config: Peers, name: str, base: Path) -> Identity | None:
    """The files of `name`'s certificate; None if there are none."""
    own = config.peers[name]
    given = {"authority": config.authority, f"peers.{name}.certificate": own.certificate, f"peers.{name}.key": own.key}
    if not any(given.values()):
        return None
    for field, value in given.items():
        if value is None:
            raise InvalidInput(field, None, "a PEM file, as others of the certificate are given")
    return Identity(*(base / str(value) for value in given.values())).valid(name)


def addresses(config: Peers, name: str, neighbours: list[str]) -> dict[str, Address | None]:
    """Whom `name` dials: of two peers that both listen, the later one dials."""
    names, found = list(config.peers), {}
    for other in neighbours:
        there = config.peers[other].address
        if there is None and config.peers[name].address is None:
            raise InvalidInput(f"peers.{other}.address", None, f"host:port, or one for {name}: one of both must listen")
        dials = there is not None and (config.peers[name].address is None or names.index(other) < names.index(name))
        found[other] = Address.parse(f"peers.{other}.address", str(there)) if dials else None
    return found


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
        raise InvalidInput(f"peers.{name}.out", str(out), "a folder without the result of an earlier run")
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
    from hyperpush.peers.checkpoint import Checkpoint
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
