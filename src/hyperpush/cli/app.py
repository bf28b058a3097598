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
from hyperpush.errors import HyperpushError, InvalidInput, unknown
from hyperpush.runs.checkpoints import KEEP, MINUTES, Policy
from hyperpush.runs.config import default_toml, load_config
from hyperpush.runs.experiment import Experiment, import_with_extras
from hyperpush.runs.report.tables import table
from hyperpush.runs.run import StudyRun, execute, find_interrupted, planned
from hyperpush.runs.run import resume as resume_run
from hyperpush.runs.saved import to_json
from hyperpush.studies import registry

app = typer.Typer(
    help="Decentralized bilevel optimization over directed, changing networks.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="Set one option. Repeat it for more.")
]
Out = Annotated[Path | None, typer.Option(help="Run folder; it must be new or empty.", show_default="under runs/")]
Minutes = Annotated[
    float, typer.Option("--checkpoint-minutes", min=0, help="Minutes between checkpoints; 0 saves none by time.")
]
Rounds = Annotated[
    int | None, typer.Option("--checkpoint-rounds", min=1, help="Rounds between checkpoints.", show_default="by time")
]
Keep = Annotated[int, typer.Option("--checkpoint-keep", min=1, help="Checkpoints to keep of each state.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Number of processes. Without --coordinator all of them start here.")
]
Coordinator = Annotated[
    str | None, typer.Option(help="HOST:PORT of process 0, or env on a Slurm, MPI or Kubernetes cluster.")
]
Process = Annotated[int | None, typer.Option(min=0, help="Number of this process, from 0; requires --coordinator.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


_arguments: list[str] = []  # as given on the command line, for processes that are to do the same


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
    methods: Annotated[bool, typer.Option("--methods", help="List the methods instead.")] = False,
) -> None:
    """List studies and networks, or methods with what they require and send."""
    if methods:
        methods_of = importlib.import_module("hyperpush.registry").registered
        titles = {
            "inner": "inner solvers",
            "hypergradients": "hypergradients",
            "algorithms": "bilevel algorithms",
            "big_fed": "on graphs",
        }
        shown = ("network", "target", "note", "fixed_point", "sends", "paper")
        for kind, title in titles.items():
            rows = [
                (name, *(getattr(each.info, column) for column in shown), "yes" if each.info.matrices else "no")
                for name, each in methods_of(kind).items()
            ]
            _print_table(title, ("name", *shown, "matrices"), rows)
    else:
        listed = registry.experiments().values()
        _print_table("studies", ("name", "summary"), [(each.name, each.summary) for each in listed])
        networks = importlib.import_module("hyperpush.networks")
        exported = [getattr(networks, name) for name in networks.__all__]
        named = [each for each in exported if isinstance(each, type) and isinstance(getattr(each, "name", None), str)]
        lines = [(each.name, each.__name__, (each.__doc__ or "").partition("\n")[0]) for each in named]
        _print_table("networks", ("name", "class", "summary"), lines)


@app.command()
def run(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A study, or a TOML file.")],
    overrides: Overrides = None,
    out: Out = None,
    minutes: Minutes = MINUTES,
    rounds: Rounds = None,
    keep: Keep = KEEP,
    processes: Processes = None,
    coordinator: Coordinator = None,
    process: Process = None,
    as_json: AsJson = False,
) -> None:
    """Run a study or a TOML file. `hyperpush resume` continues an interrupted run."""
    known = registry.experiments()
    load_config(what, overrides or [], known)  # before processes are started
    _together(processes, coordinator, process)
    _run(known, what, overrides or [], out, as_json, Policy(minutes or None, rounds, keep))


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an interrupted run.")],
    minutes: Minutes = MINUTES,
    rounds: Rounds = None,
    keep: Keep = KEEP,
    processes: Processes = None,
    coordinator: Coordinator = None,
    process: Process = None,
    as_json: AsJson = False,
) -> None:
    """Continue an interrupted run from its last valid checkpoint."""
    find_interrupted(folder)
    _together(processes, coordinator, process)
    _report(*resume_run(folder, registry.experiments(), checkpoints=Policy(minutes or None, rounds, keep)), as_json)


@app.command()
def sweep(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A study, or a TOML file.")],
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[...]", help="Values to choose from. Repeat it for more."),
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="KEY=[...]", help="Values to compare. Repeat it for more options.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of reported runs of each method.", show_default="3")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep.", show_default="under runs/")] = None,
    as_json: AsJson = False,
) -> None:
    """Tune every method with the same budget, choose on validation, report over seeds. Repeat it to continue."""
    asked = [f"sweep.{table}.{each}" for table, given in (("grid", grid), ("compare", compare)) for each in given or []]
    asked += [] if seeds is None else [f"sweep.seeds={seeds}"]
    plans, report = (importlib.import_module(f"hyperpush.cli.sweep.{name}") for name in ("plan", "report"))
    result, folder = report.sweep(plans.load(what, [*(overrides or []), *asked], registry.experiments()), out)
    print("sweep:", folder, file=sys.stderr)
    if as_json:
        print(to_json({**result, "run": folder}))
    if result["failed"]:
        raise typer.Exit(1)


@app.command()
def plan(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A study, or a TOML file.")],
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes to plan for.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print what a run would take: rounds, bytes, memory, and ε if it is private. Nothing runs."""
    experiment, config = load_config(what, overrides or [], registry.experiments())
    found = planned(experiment, config, processes)
    if as_json:
        print(to_json(found))
        return
    names = list(found["pieces"][0]) if found["pieces"] else []
    rows = [[piece[name] for name in names] for piece in found["pieces"]]
    _print_table(f"{experiment.name}, {processes} processes", [name.replace("_", " ") for name in names], rows)
    shown = ("rounds", "floats", "megabytes_moved", "megabytes_per_process")
    totals = [*((name.replace("_", " "), found[name]) for name in shown), *found["epsilon"].items()]
    if found["stopped"]:
        totals.append(("not planned further", found["stopped"]))
    _print_table("together", ("quantity", "about"), totals)
    if found["assumes"]:
        print(found["assumes"])


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="A study, method, network or engine.")]) -> None:
    """Print the options of a study, method, network or engine as TOML, each with its explanation."""
    known = registry.experiments()
    if name in known:
        print(default_toml(known[name]), end="")
    else:
        explain = importlib.import_module("hyperpush.cli.explain")
        print(explain.options_toml(*explain.find_class(name, list(known))), end="")


@app.command()
def data(
    action: Annotated[str | None, typer.Argument(metavar="get", help="Download a data set and verify it.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A data set.")] = None,
    to: Annotated[Path | None, typer.Option(help="Parent of the folder NAME.", show_default="HYPERPUSH_DATA")] = None,
) -> None:
    """List the data sets and which of their files are in HYPERPUSH_DATA, or download one."""
    if action is None:
        columns = ("name", "data", "files in $HYPERPUSH_DATA, plain, .gz or .xz", "there", "download")
        _print_table("data sets", columns, import_with_extras("hyperpush.studies.data.catalogue").entries())
    elif action != "get":
        raise unknown("data", action, ["get"])
    else:
        for path in import_with_extras("hyperpush.studies.data.download").get(name or "", to):
            print(path)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="One of: rounds, training, memory, scale, peers.")],
    overrides: Overrides = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory or traffic, as ratios within one run."""
    _run(importlib.import_module("hyperpush.bench").BENCHES, what, overrides or [], out, as_json)


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder to write to. An authority in it (ca.pem, ca.key) is reused.")],
    names: Annotated[list[str], typer.Argument(help="Names of the peers.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Address to listen on. Repeat it for more.", show_default="loopback"),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
) -> None:
    """Make a private authority and certificates for peers, for trials."""
    made = importlib.import_module("hyperpush.deploy.certificates").make(
        folder, names, host or ["127.0.0.1", "localhost"], days
    )
    for files in made:
        print(files.certificate, files.key)


@app.command()
def peer(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The spec, the same for all peers.")],
    name: Annotated[str, typer.Option(help="Name of this peer in the spec.")],
    as_json: AsJson = False,
) -> None:
    """Run one peer of a spec, next to its own data."""
    party = importlib.import_module("hyperpush.deploy.party")
    read = party.read(config)
    result = party.run_peer(read, name, config.parent, lambda line: print(line, file=sys.stderr, flush=True))
    print("done:", config.parent / (read.peers[name].out or name), file=sys.stderr)
    if as_json:
        print(to_json(result))


@app.command()
def swarm(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The spec, without [peers].")],
    count: Annotated[int, typer.Option("-n", help="Number of peers.")] = 8,
    loss: Annotated[float | None, typer.Option(help="Probability that a message is lost.")] = None,
    duplicate: Annotated[float | None, typer.Option(help="Probability that a message arrives twice.")] = None,
    delay: Annotated[int | None, typer.Option(help="Largest delay of a message, in rounds.")] = None,
    kill: Annotated[int, typer.Option(help="Number of peers to kill, at random rounds.")] = 0,
    restart: Annotated[int, typer.Option(help="Number of killed peers to restart.")] = 0,
    kill_before: Annotated[int, typer.Option(help="Kill them before this round.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Seed of the faults.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Use no certificates and no TLS.")] = False,
    out: Out = None,
    seconds: Annotated[float, typer.Option(help="End all peers after this time.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Run all peers of a spec as processes on this machine, over loopback, with faults if asked."""
    party, swarms = (importlib.import_module(f"hyperpush.deploy.{name}") for name in ("party", "swarm"))
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


def _run(
    known: Mapping[str, Experiment],
    what: str,
    overrides: Sequence[str],
    out: Path | None,
    as_json: bool,
    checkpoints: Any = None,
) -> None:
    experiment, config = load_config(what, overrides, known)
    _report(*execute(experiment, config, out, checkpoints=checkpoints), as_json)


def _report(result: dict[str, Any], run: StudyRun, as_json: bool) -> None:
    for path in run.figures:
        print("figure:", path, file=sys.stderr)
    print("run:", run.path, file=sys.stderr)
    if as_json:
        print(to_json({**result, "run": run.path}))


def _together(processes: int | None, coordinator: str | None, process: int | None) -> None:
    """Join as one of several processes, or start all of them and exit when they have ended."""
    if coordinator is None:
        if process is not None:
            raise InvalidInput("--process", process, "a number only with --coordinator")
        if processes is not None and processes > 1:
            sys.exit(importlib.import_module("hyperpush.processes.starter").start(_arguments, processes))
        return
    importlib.import_module("hyperpush.processes.starter").end_with_parent()
    join = importlib.import_module("hyperpush.processes").join
    if coordinator == "env":
        join(None, processes, process)
    elif processes is None or process is None or process >= processes:
        given = f"process {process} of {processes}"
        raise InvalidInput("--coordinator", given, "--processes N and --process I, from 0 to N - 1, besides")
    else:
        join(coordinator, processes, process)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    # A pipe has no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(table(title, columns, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that the user can act on is one line on stderr and exit code 2."""
    _arguments[:] = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app(arguments)
    except HyperpushError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
