"""The configuration of a run among peers.

All parties hold the same file but for paths and addresses, which are everybody's own affair. What they have to agree on
(the run, its mode, the names in their order, the spec) goes into a digest that peers compare before they start.
"""

import inspect
import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.errors import InvalidInput, unknown
from hyperpush.peers.certificates import check_name
from hyperpush.peers.session import Address, Identity
from hyperpush.runs.config import Config, is_spec, read_toml, validate
from hyperpush.runs.spec import SpecConfig
from hyperpush.spec import task_function

Probability = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0)]


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
    spec: SpecConfig = Field(default=SpecConfig(), description="The sentence that all parties run.")
    peers: dict[str, Where] = Field(default={}, description="The parties by name, in the order of their clients.")
    faults: Injected = Injected()

    @model_validator(mode="after")
    def _fits(self) -> "Peers":
        check_name("deploy.run", self.run)
        for name in self.peers:
            check_name("peers", name)
        if self.faults.any and self.mode == "synchronous":
            raise InvalidInput("deploy.faults", self.faults.model_dump(), "none, or mode = 'asynchronous'")
        return self


def read(path: Path, count: int | None = None, faults: Mapping[str, Any] | None = None) -> Peers:
    """A deployment from a TOML file: a spec with `[deploy]` and `[peers.NAME]`; a swarm of `count` makes the peers."""
    values = read_toml(path)
    if not is_spec(values):
        raise InvalidInput("task", values.get("task"), "a table [task]: whatever `hyperpush run` runs can be deployed")
    spec = validate(SpecConfig, values)
    assert isinstance(spec, SpecConfig)
    clients = len(spec.peers) or count
    if clients is not None and "clients" in inspect.signature(task_function(spec.task.get("name"))).parameters:
        spec = spec.model_copy(update={"task": {"clients": clients, **spec.task}})
    deploy = dict(spec.deploy)
    options = [name for name in Peers.model_fields if name not in ("spec", "peers")]
    for key in deploy:
        if key not in options:
            raise unknown(f"deploy.{key}", key, options)
    if faults:
        deploy["faults"] = {**deploy.get("faults", {}), **faults}
    try:
        found = validate(Peers, {**deploy, "peers": spec.peers})
    except InvalidInput as error:
        field = error.field if error.field.startswith(("deploy.", "peers")) else f"deploy.{error.field}"
        raise InvalidInput(field, error.given, error.allowed) from None
    assert isinstance(found, Peers)
    found = found.model_copy(update={"spec": spec.model_copy(update={"peers": {}, "deploy": {}})})
    check_draws(found, "private" in spec.task)
    return found


def check_draws(config: Peers, private: bool) -> None:
    """Refuse a private task whose noise everybody could draw again."""
    if private and not config.private_draws:
        allowed = "true for a private task: whoever knows the key can take the noise off again"
        raise InvalidInput("deploy.private_draws", False, allowed)


def digest(config: Peers) -> bytes:
    """What peers compare before they start."""
    agreed = {
        "run": config.run,
        "mode": config.mode,
        "private_draws": config.private_draws,
        "names": list(config.peers),
        "spec": config.spec.model_dump(mode="json"),
    }
    return blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=32).digest()


def identity(config: Peers, name: str, base: Path) -> Identity | None:
    """The files of `name`'s certificate; None if there are none."""
    own = config.peers[name]
    given = {
        "deploy.authority": config.authority,
        f"peers.{name}.certificate": own.certificate,
        f"peers.{name}.key": own.key,
    }
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
