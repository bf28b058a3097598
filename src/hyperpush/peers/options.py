"""The configuration of a run among peers.

All parties hold the same file but for paths and addresses, which are everybody's own affair. What they have to agree on
(the run, its mode, the names in their order, the experiment) goes into a digest that peers compare before they start.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.config import Config, validate
from hyperpush.errors import InvalidInput
from hyperpush.experiments.solve import Solve
from hyperpush.peers.certificates import check_name
from hyperpush.peers.session import Address, Identity

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
