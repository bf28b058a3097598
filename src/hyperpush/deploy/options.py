"""The configuration of a run among peers, read from a TOML file.

All parties have the same file, except for paths and addresses, which may differ. Peers compare a digest before they
start. It covers the session, its mode, private draws, the names in order, and the spec.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hyperpush.base.annotations import Option, check_option, options_of
from hyperpush.base.config import Config, as_table, option
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.engines.peer.checkpoint import all_files
from hyperpush.engines.peers import Peers
from hyperpush.engines.transport.zenoh.addresses import check_name
from hyperpush.methods.registry import read_value
from hyperpush.runs.folder import RunFolder
from hyperpush.spec.config import is_spec, read_toml, set_from_text, validate
from hyperpush.spec.experiment import SpecConfig
from hyperpush.spec.objects import task_function

CHECKPOINT, SECRET = "checkpoint.safetensors", "secret.key"  # names of files in a party's folder
# The options of `Peers` in the table `[deploy]`, which all parties share. All others follow from a party's own table.
SHARED = (
    "session",
    "mode",
    "patience",
    "close_after",
    "longest_wait",
    "checkpoint_every",
    "authority",
    "faults",
    "fault_seed",
)


def shared_options() -> Mapping[str, Option]:
    """Return the options of `Peers` that the table `[deploy]` accepts, by name."""
    return {name: each for name, each in options_of(Peers).items() if name in SHARED}


def engine_defaults() -> dict[str, Any]:
    """Return the defaults of the options that the table `[deploy]` accepts, by name."""
    return {name: each.default for name, each in shared_options().items()}


class Party(Config):
    """One party's table `[peers.NAME]`: its address and its files."""

    address: str | None = option(None, "host:port that it listens on; left out: it only dials.")
    data: str | None = option(None, ".npz file or module:function; left out: the task's own.")
    certificate: str | None = option(None, "PEM file that names it.")
    private_key: str | None = option(None, "PEM file with the certificate's private key.")
    out: str | None = option(None, "Folder for its results; left out: its name.")


class Deployment(Config):
    """The configuration of a run among peers."""

    engine: dict[str, Any] = option(engine_defaults(), "The options of Peers that all parties share, by name.")
    private_draws: bool = option(False, "Draws come from a secret of each party, not from the key.")
    spec: SpecConfig = option(SpecConfig(), "The spec that all parties run.")
    peers: dict[str, Party] = option({}, "The parties by name, in the order of their clients.")

    def check(self) -> None:
        """Raise InvalidInput for names that are invalid in message keys, and for faults in synchronous mode."""
        check_name("deploy.session", self.engine["session"])
        for name in self.peers:
            check_name("peers", name)
        if self.engine["faults"] is not None and self.engine["mode"] == "synchronous":
            raise InvalidInput("deploy.faults", self.engine["faults"], "none, or mode = 'asynchronous'")

    def with_engine(self, **changes: Any) -> "Deployment":
        """Return this deployment with some options of the engine changed."""
        return replace(self, engine={**self.engine, **changes})


def read(path: Path, overrides: Sequence[str] = (), count: int | None = None) -> Deployment:
    """Return the deployment described in a TOML file: a spec with the tables `[deploy]` and `[peers.NAME]`.

    `count` is the number of peers that a swarm will create if the file has no `[peers.NAME]`; None: unknown.
    """
    values = read_toml(path)
    if not is_spec(values):
        raise InvalidInput("task", values.get("task"), "a table [task]: whatever `hyperpush run` runs can be deployed")
    for override in overrides:
        set_from_text(values, override, SpecConfig)
    spec = validate(SpecConfig, values)
    clients = len(spec.peers) or count
    if clients is not None and "clients" in inspect.signature(task_function(spec.task.get("name"))).parameters:
        spec = replace(spec, task={"clients": clients, **spec.task})
    table = dict(spec.deploy)
    own = {name: table.pop(name) for name in ("private_draws",) if name in table}
    engine, deployed = engine_defaults() | read_engine(table), {**own, "peers": spec.peers}
    found = replace(validate(Deployment, deployed), engine=engine, spec=replace(spec, peers={}, deploy={}))
    check_draws(found, "private" in spec.task)
    return found


def read_engine(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Peers` in a table `[deploy]`, with their types and ranges checked."""
    described, found = shared_options(), {}
    for name, given in table.items():
        if name not in described:
            raise unknown(f"deploy.{name}", name, [*described, "private_draws"])
        found[name] = read_value(described[name].annotation, given, f"deploy.{name}")
        check_option(f"deploy.{name}", described[name].annotation, found[name])
    return found


def check_draws(config: Deployment, private: bool) -> None:
    """Raise InvalidInput for a private task without `private_draws`: every party could draw the same noise again."""
    if private and not config.private_draws:
        allowed = "true for a private task: a party that knows the key can draw the noise again and subtract it"
        raise InvalidInput("deploy.private_draws", False, allowed)


def digest(config: Deployment) -> bytes:
    """Return the digest of the shared configuration, which peers compare before they start."""
    agreed = {
        "session": config.engine["session"],
        "mode": config.engine["mode"],
        "private_draws": config.private_draws,
        "names": list(config.peers),
        "spec": as_table(config.spec),
    }
    return blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=32).digest()


def folder_of(config: Deployment, name: str, base: Path) -> Path:
    """Return the folder of a party's results."""
    return base / (config.peers[name].out or name)


def party_folder(path: Path, field: str = "folder") -> RunFolder:
    """Return the run folder of a party, which has its final name from the start (other run folders are hidden)."""
    return RunFolder(path, field, hidden=False, saved=tuple(each.name for each in all_files(path / CHECKPOINT)))


def engine_of(config: Deployment, name: str, base: Path, private: bool) -> Peers:
    """Return the engine that the tables describe for one party; paths are relative to `base`."""
    own, out = config.peers[name], folder_of(config, name, base)

    def file(path: str | None) -> Path | None:
        return None if path is None else base / path

    files = {each: file(getattr(own, each)) for each in ("certificate", "private_key")}
    authority = file(config.engine["authority"])
    with dotted_keys(name):
        return Peers(
            name,
            {each: party.address for each, party in config.peers.items()},
            **{**config.engine, **files, "authority": authority},
            tls=any((authority, *files.values())),
            checkpoint=out / CHECKPOINT if config.engine["checkpoint_every"] else None,
            keep_checkpoint=True,
            secret=out / SECRET if config.private_draws else None,
            repeats=not private,
            digest=digest(config),
        )


@contextmanager
def dotted_keys(name: str) -> Iterator[None]:
    """Rename the fields in errors about a party's engine to the keys in the TOML file."""
    try:
        yield
    except InvalidInput as error:
        table, _, rest = error.field.partition(".")
        option, _, whose = rest.partition(".")
        if table != "Peers":
            raise
        key = f"peers.{whose}.address" if option == "addresses" else f"deploy.{option}"
        key = f"peers.{name}.{option}" if option in ("certificate", "private_key") else key
        raise InvalidInput(key, error.given, error.allowed) from None
