"""The command line. JAX is imported only by the commands that compute."""

import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import hyperpush
from hyperpush.config import default_toml, find, load_config
from hyperpush.errors import HyperpushError
from hyperpush.experiments import registry
from hyperpush.experiments.registry import Experiment
from hyperpush.report.tables import table
from hyperpush.run import execute
from hyperpush.saved import to_json

app = typer.Typer(
    help="Decentralized bilevel optimization over directed, changing networks.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="Set one option; may be repeated.")
]
Out = Annotated[Path | None, typer.Option(help="The run folder; must be new or empty.", show_default="under runs/")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]


def _version(asked: bool) -> bool:
    if asked:
        print(f"hyperpush {hyperpush.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Decentralized bilevel optimization over directed, changing networks."""


@app.command("list")
def list_(
    methods: Annotated[bool, typer.Option("--methods", help="Compare the methods instead.")] = False,
) -> None:
    """List the experiments and networks, or the methods with what they need and send."""
    if methods:
        declared = importlib.import_module("hyperpush.declarations")
        kinds = {
            "hyper-gradients": declared.ESTIMATORS,
            "bilevel algorithms": declared.ALGORITHMS,
            "on graphs": declared.ON_GRAPHS,
        }
        for title, kind in kinds.items():
            rows = [
                (
                    name,
                    each.network,
                    each.target,
                    each.fixed_point,
                    each.sends,
                    "yes" if each.matrices else "no",
                    each.paper,
                )
                for name, each in kind.items()
            ]
            _print_table(title, ("name", "network", "target", "ends at", "sends", "matrices", "paper"), rows)
    else:
        listed = registry.experiments().values()
        _print_table("experiments", ("name", "summary"), [(each.name, each.summary) for each in listed])
        exported = vars(importlib.import_module("hyperpush.networks")).values()
        named = [each for each in exported if isinstance(each, type) and isinstance(getattr(each, "name", None), str)]
        lines = [(each.name, each.__name__, (each.__doc__ or "").partition("\n")[0]) for each in named]
        _print_table("networks", ("name", "class", "summary"), lines)


@app.command()
def run(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="An experiment or a file that names one.")],
    overrides: Overrides = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment."""
    _run(registry.experiments(), what, overrides or [], out, as_json)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment.")]) -> None:
    """Print an experiment's options as TOML to start from."""
    print(default_toml(find(name, registry.experiments())), end="")


@app.command()
def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="A benchmark.")],
    overrides: Overrides = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory."""
    _run(importlib.import_module("hyperpush.bench").BENCHES, what, overrides or [], out, as_json)


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Where to put them; an authority there (ca.pem, ca.key) is used.")],
    names: Annotated[list[str], typer.Argument(help="The peers.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Address that they listen on; may be repeated.", show_default="loopback")
    ] = None,
    days: Annotated[int, typer.Option(help="How long they are valid.")] = 365,
) -> None:
    """Make a private authority and certificates for peers, for trials."""
    made = importlib.import_module("hyperpush.peers.certificates").make(
        folder, names, host or ["127.0.0.1", "localhost"], days
    )
    for files in made:
        print(files.certificate, files.key)


@app.command()
def peer(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run, as all its peers hold it.")],
    name: Annotated[str, typer.Option(help="Which of its peers to be.")],
    as_json: AsJson = False,
) -> None:
    """Take part in a run as one of its peers, next to one's own data."""
    party = importlib.import_module("hyperpush.peers.party")
    read = party.read(config)
    result = party.take_part(read, name, config.parent, lambda line: print(line, file=sys.stderr, flush=True))
    print("done:", config.parent / (read.peers[name].out or name), file=sys.stderr)
    if as_json:
        print(to_json(result))


@app.command()
def swarm(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run, without [peers].")],
    count: Annotated[int, typer.Option("-n", help="How many peers.")] = 8,
    loss: Annotated[float | None, typer.Option(help="Probability that a message is lost.")] = None,
    duplicate: Annotated[float | None, typer.Option(help="Probability that it comes twice.")] = None,
    delay: Annotated[int | None, typer.Option(help="Rounds by which it may be late.")] = None,
    kill: Annotated[int, typer.Option(help="Peers to kill at random rounds.")] = 0,
    restart: Annotated[int, typer.Option(help="How many of those to start again.")] = 0,
    kill_before: Annotated[int, typer.Option(help="Round before which they are killed.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Decides the faults.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without certificates and TLS.")] = False,
    out: Out = None,
    seconds: Annotated[float, typer.Option(help="All are ended after this time.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Start peers on this machine, each a process on loopback, with faults for a trial."""
    party, swarms = (importlib.import_module(f"hyperpush.peers.{name}") for name in ("party", "swarm"))
    faults = {"loss": loss, "duplicate": duplicate, "delay": delay, "seed": seed}
    read = party.read(config, count, {name: value for name, value in faults.items() if value is not None})
    folder = swarms.folder(out)
    live = importlib.import_module("rich.live").Live(console=Console(stderr=True), auto_refresh=False, transient=False)

    def show(seen: Mapping[str, Any]) -> None:
        live.update(table("peers", swarms.COLUMNS, swarms.rows(seen)), refresh=True)

    faults_of_peers = {"kill": kill, "restart": restart, "kill_before": kill_before}
    with live:
        result = swarms.swarm(read, count, folder, secure=not plain, seconds=seconds, show=show, **faults_of_peers)
    print("run:", folder, file=sys.stderr)
    if as_json:
        print(to_json(result))


def _run(known: Mapping[str, Experiment], what: str, overrides: Sequence[str], out: Path | None, as_json: bool) -> None:
    experiment, config = load_config(what, overrides, known)
    result, run = execute(experiment, config, out)
    for path in run.figures:
        print("figure:", path, file=sys.stderr)
    print("run:", run.path, file=sys.stderr)
    if as_json:
        print(to_json({**result, "run": run.path}))


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    # A pipe has no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(table(title, columns, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that the user can act on is one line on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app(arguments)
    except HyperpushError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
