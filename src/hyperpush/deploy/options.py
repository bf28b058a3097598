"""The configuration of a run among peers.

All parties hold the same file but for paths and addresses, which are everybody's own affair. What they have to agree on
(the run, its mode, the names in their order, the spec) goes into a digest that peers compare before they start.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.engines.faults import Faults
from hyperpush.engines.peers import Mode, Peers
from hyperpush.engines.transport.zenoh.addresses import check_name
from hyperpush.spec.config import Config, is_spec, read_toml, set_from_text, validate
from hyperpush.spec.experiment import SpecConfig
from hyperpush.spec.objects import task_function

Probability = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0)]
CHECKPOINT, SECRET = "checkpoint.safetensors", "secret.key"  # files of a party


class Where(Config):
    """One party: where it is, and where its own files are."""

    address: str | None = Field(default=None, description="host:port that it listens on; left out: it only dials.")
    data: str | None = Field(default=None, description=".npz file or module:function; left out: the task's own.")
    certificate: str | None = Field(default=None, description="PEM file that names it.")
    key: str | None = Field(default=None, description="PEM file with the certificate's private key.")
    out: str | None = Field(default=None, description="Folder for its results; left out: its name.")


class Injected(Config):
    """Faults for trials."""

    loss: Probability = Field(default=0.0, description="Probability that a message is lost.")
    duplicate: Probability = Field(default=0.0, description="Probability that it comes twice.")
    delay: int = Field(default=0, ge=0, description="Rounds by which it may be late.")
    seed: int = Field(default=0, ge=0, description="Decides which.")

    @property
    def any(self) -> bool:
        return bool(self.loss or self.duplicate or self.delay)


class Deployment(Config):
    """A run among peers."""

    run: str = Field(default="trial", description="Its name: part of every message's key.")
    mode: Mode = Field(default="synchronous", description="In step, as simulated; or everybody at its own pace.")
    patience: Seconds = Field(default=120.0, description="Seconds to wait for a peer before it is an error.")
    close_after: Seconds = Field(default=30.0, description="Seconds until a vanished peer is removed.")
    longest_wait: Seconds = Field(default=2.0, description="Most seconds to wait for a message, asynchronously.")
    checkpoint: int = Field(default=1, ge=0, description="Exchanges between checkpoints, 0 for none.")
    private_draws: bool = Field(default=False, description="Whether draws come from a secret, not from the key.")
    authority: str | None = Field(default=None, description="PEM file of the authority that signs certificates.")
    spec: SpecConfig = Field(default=SpecConfig(), description="The sentence that all parties run.")
    peers: dict[str, Where] = Field(default={}, description="The parties by name, in the order of their clients.")
    faults: Injected = Injected()

    @model_validator(mode="after")
    def _fits(self) -> "Deployment":
        check_name("deploy.run", self.run)
        for name in self.peers:
            check_name("peers", name)
        if self.faults.any and self.mode == "synchronous":
            raise InvalidInput("deploy.faults", self.faults.model_dump(), "none, or mode = 'asynchronous'")
        return self


def read(path: Path, overrides: Sequence[str] = (), count: int | None = None) -> Deployment:
    """A deployment from a TOML file: a spec with `[deploy]` and `[peers.NAME]`; a swarm of `count` makes the peers."""
    values = read_toml(path)
    if not is_spec(values):
        raise InvalidInput("task", values.get("task"), "a table [task]: whatever `hyperpush run` runs can be deployed")
    for override in overrides:
        set_from_text(values, override, SpecConfig)
    spec = validate(SpecConfig, values)
    clients = len(spec.peers) or count
    if clients is not None and "clients" in inspect.signature(task_function(spec.task.get("name"))).parameters:
        spec = spec.model_copy(update={"task": {"clients": clients, **spec.task}})
    options = [name for name in Deployment.model_fields if name not in ("spec", "peers")]
    for key in spec.deploy:
        if key not in options:
            raise unknown(f"deploy.{key}", key, options)
    try:
        found = validate(Deployment, {**spec.deploy, "peers": spec.peers})
    except InvalidInput as error:
        field = error.field if error.field.startswith(("deploy.", "peers")) else f"deploy.{error.field}"
        raise InvalidInput(field, error.given, error.allowed) from None
    found = found.model_copy(update={"spec": spec.model_copy(update={"peers": {}, "deploy": {}})})
    check_draws(found, "private" in spec.task)
    return found


def check_draws(config: Deployment, private: bool) -> None:
    """Refuse a private task whose noise everybody could draw again."""
    if private and not config.private_draws:
        allowed = "true for a private task: whoever knows the key can take the noise off again"
        raise InvalidInput("deploy.private_draws", False, allowed)


def digest(config: Deployment) -> bytes:
    """What peers compare before they start."""
    agreed = {
        "run": config.run,
        "mode": config.mode,
        "private_draws": config.private_draws,
        "names": list(config.peers),
        "spec": config.spec.model_dump(mode="json"),
    }
    return blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=32).digest()


def folder_of(config: Deployment, name: str, base: Path) -> Path:
    """Where a party's results go."""
    return base / (config.peers[name].out or name)


def engine_of(config: Deployment, name: str, base: Path, private: bool) -> Peers:
    """The engine that the tables describe for one party; paths are relative to `base`."""
    own, out, faults = config.peers[name], folder_of(config, name, base), config.faults

    def file(path: str | None) -> Path | None:
        return None if path is None else base / path

    with dotted_keys(name):
        return Peers(
            name,
            {each: where.address for each, where in config.peers.items()},
            file(config.authority),
            file(own.certificate),
            file(own.key),
            tls=bool(config.authority or own.certificate or own.key),
            session=config.run,
            mode=config.mode,
            patience=config.patience,
            close_after=config.close_after,
            longest_wait=config.longest_wait,
            checkpoint=out / CHECKPOINT if config.checkpoint else None,
            checkpoint_every=max(config.checkpoint, 1),
            keep_checkpoint=True,
            secret=out / SECRET if config.private_draws else None,
            repeats=not private,
            faults=Faults(faults.loss, faults.duplicate, faults.delay) if faults.any else None,
            fault_seed=faults.seed,
            digest=digest(config),
        )


@contextmanager
def dotted_keys(name: str) -> Iterator[None]:
    """Let errors about a party's engine name the key in the file."""
    try:
        yield
    except InvalidInput as error:
        table, _, rest = error.field.partition(".")
        option, _, whose = rest.partition(".")
        if table != "Peers":
            raise
        key = f"peers.{whose}.address" if option == "addresses" else f"deploy.{option}"
        own = {"certificate": "certificate", "private_key": "key"}
        key = f"peers.{name}.{own[option]}" if option in own else key
        raise InvalidInput(key, error.given, error.allowed) from None
