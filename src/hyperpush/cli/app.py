"""Define the commands of `hyperpush`.

Each command imports its code when it runs, so that `--help`, completion, `list` and `show` do not wait for JAX.
"""

import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hyperpush.base.errors import HyperpushError, InvalidInput, unknown
from hyperpush.base.extensions import PAPERS, has_papers
from hyperpush.base.imports import plain_name
from hyperpush.base.signals import stop_signals
from hyperpush.base.version import __version__
from hyperpush.cli.arguments import AsJson, Out, Overrides, Source, complete_name
from hyperpush.cli.audits import audit
from hyperpush.cli.commands import USAGE_ERROR, Commands
from hyperpush.cli.index import COLUMNS, load_index
from hyperpush.cli.output import print_json, print_table, refuse_failure, refuse_growth
from hyperpush.runs.tables import table

if TYPE_CHECKING:
    from hyperpush.runs.run import StudyRun

app = typer.Typer(
    cls=Commands,
    help="Decentralized bilevel optimization over directed, changing networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Minutes = Annotated[
    float | None,
    typer.Option("--checkpoint-minutes", min=0, help="Minutes between checkpoints; 0 saves none.", show_default="2"),
]
Rounds = Annotated[
    int | None, typer.Option("--checkpoint-rounds", min=1, help="Rounds between checkpoints.", show_default="by time")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Number of processes. Without --coordinator all of them start here.")
]
Coordinator = Annotated[
    str | None, typer.Option(help="HOST:PORT of process 0, or env on a Slurm, MPI or Kubernetes cluster.")
]
Process = Annotated[int | None, typer.Option(min=0, help="Number of this process, from 0; requires --coordinator.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 3 if the result did not converge.")]
Stationary = Annotated[
    bool,
    typer.Option("--strict-stationary", help="Exit with code 3 if the result did not converge or is not stationary."),
]

_arguments: list[str] = []  # arguments of this command, which further processes of the run are started with


def _version(asked: bool) -> bool:
    if asked:
        print(f"hyperpush {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Decentralized bilevel optimization over directed, changing networks."""


@app.command("list")
def list_(methods: Annotated[bool, typer.Option("--methods", help="List the methods instead.")] = False) -> None:
    """List studies and networks, or methods with their demands and messages."""
    index = load_index()
    if methods:
        for title, rows in index["methods"].items():
            print_table(title, COLUMNS, rows)
    else:
        print_table("studies", ("name", "summary"), index["studies"])
        print_table("networks", ("name", "class", "summary"), index["networks"])
        if not has_papers():
            print(PAPERS)
    for reason in index["broken"].values():
        print("warning:", reason, file=sys.stderr)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A study, method, network or engine.", autocompletion=complete_name)
    ],
) -> None:
    """Print the options of a study, method, network or engine as TOML, each with its explanation."""
    index = load_index()
    if name in index["broken"]:
        raise HyperpushError(index["broken"][name])
    if plain_name(name) not in index["options"]:
        raise unknown("name", name, index["names"])
    print(index["options"][plain_name(name)], end="")


@app.command()
def run(
    what: Source,
    overrides: Overrides = None,
    out: Out = None,
    minutes: Minutes = None,
    rounds: Rounds = None,
    processes: Processes = None,
    coordinator: Coordinator = None,
    process: Process = None,
    as_json: AsJson = False,
    strict: Strict = False,
    strict_stationary: Stationary = False,
) -> None:
    """Run a study or a TOML file. `hyperpush resume` continues an interrupted run."""
    from hyperpush.spec import studies
    from hyperpush.spec.config import load_config
    from hyperpush.spec.execute import execute

    experiment, config = load_config(what, overrides or [], studies.experiments())  # errors come before processes start
    _together(processes, coordinator, process)
    _report(*execute(experiment, config, out, checkpoints=_policy(minutes, rounds)), as_json, strict, strict_stationary)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an interrupted run.")],
    minutes: Minutes = None,
    rounds: Rounds = None,
    processes: Processes = None,
    coordinator: Coordinator = None,
    process: Process = None,
    as_json: AsJson = False,
    strict: Strict = False,
    strict_stationary: Stationary = False,
) -> None:
    """Continue an interrupted run from its last valid checkpoint."""
    from hyperpush.runs.run import find_interrupted
    from hyperpush.spec import studies
    from hyperpush.spec.execute import resume

    find_interrupted(folder)
    _together(processes, coordinator, process)
    _report(
        *resume(folder, studies.experiments(), checkpoints=_policy(minutes, rounds)), as_json, strict, strict_stationary
    )


@app.command()
def plan(
    what: Source,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes to plan for.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print the predicted cost of a run: rounds, bytes, memory, and ε if it is private. Nothing runs."""
    from hyperpush.runs.run import plan_run
    from hyperpush.spec import studies
    from hyperpush.spec.config import load_config

    experiment, config = load_config(what, overrides or [], studies.experiments())
    found = plan_run(experiment, config, processes)
    if as_json:
        print_json(found)
        return
    rows = [list(piece.values()) for piece in found["pieces"]]
    print_table(f"{experiment.name}, {processes} processes", list(*found["pieces"][:1]), rows)
    shown = ("rounds", "floats", "megabytes_per_process")
    totals = [*((name.replace("_", " "), found[name]) for name in shown), *found["epsilon"].items()]
    if found["stopped"]:
        totals.append(("not planned further", found["stopped"]))
    print_table("together", ("quantity", "about"), totals)
    if found["assumes"]:
        print(found["assumes"])


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    page: Annotated[
        Path | None, typer.Option(help="File to write; it ends in .html.", show_default="RUN/report.html")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write a finished run as one HTML page that needs no network, and its numbers as JSON beside it."""
    from hyperpush.pages.report import report
    from hyperpush.verbs.saved import load

    page = folder / "report.html" if page is None else page
    print(report(load(folder), page, overwrite, title=folder.resolve().name))


app.command()(audit)


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder to write to. An authority in it (ca.pem, ca.key) is reused.")],
    names: Annotated[list[str], typer.Argument(help="Names of the peers.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Address to listen on. Repeat it for more.", show_default="loopback")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Days until the certificates expire.")] = 365,
) -> None:
    """Make a private authority and certificates for peers, for trials."""
    from hyperpush.deploy.certificates import make

    for files in make(folder, names, host or ["127.0.0.1", "localhost"], days):
        print(files.certificate, files.key)


@app.command()
def peer(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The spec, the same for all peers.")],
    name: Annotated[str, typer.Option(help="Name of this peer in the spec.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    strict: Strict = False,
) -> None:
    """Run one peer of a spec, next to its own data."""
    from hyperpush.deploy.options import folder_of, read
    from hyperpush.deploy.party import run_peer

    deployment = read(config, overrides or [])
    result = run_peer(deployment, name, config.parent, lambda line: print(line, file=sys.stderr, flush=True))
    print("done:", folder_of(deployment, name, config.parent), file=sys.stderr)
    print_json(result, as_json)
    refuse_growth(result)
    refuse_failure(result, strict)


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="A peer's folder, or its status.json.")],
) -> None:
    """Print the state of a peer in words: its round, mass and ε, and its view of the other peers."""
    from hyperpush.deploy.report import describe

    print("\n".join(describe(folder)))


@app.command()
def leave(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a running peer.")]) -> None:
    """Tell a running asynchronous peer to hand its mass to the others and end."""
    from hyperpush.deploy.report import ask_to_leave

    print(ask_to_leave(folder))


@app.command()
def swarm(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The spec, without [peers].")],
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", help="Number of peers.")] = 8,
    kill: Annotated[int, typer.Option(help="Number of peers to kill, at random rounds.")] = 0,
    restart: Annotated[int, typer.Option(help="Number of killed peers to restart.")] = 0,
    kill_before: Annotated[int, typer.Option(help="Kill them before this round.")] = 100,
    plain: Annotated[bool, typer.Option("--plain", help="Use no certificates and no TLS.")] = False,
    out: Out = None,
    seconds: Annotated[float, typer.Option(help="End all peers after this time.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Run all peers of a spec as processes on this machine. Inject faults with -s deploy.faults.loss=0.3."""
    from rich.live import Live

    from hyperpush.deploy import swarm as swarms
    from hyperpush.deploy.options import read

    deployment, folder = read(config, overrides or [], count), swarms.default_folder(out)
    live = Live(console=Console(stderr=True), auto_refresh=False, transient=False)

    def show(seen: Mapping[str, Any]) -> None:
        live.update(table("peers", swarms.COLUMNS, swarms.rows(seen)), refresh=True)

    kills = {"kill": kill, "restart": restart, "kill_before": kill_before}
    with live:
        result = swarms.swarm(deployment, count, folder, secure=not plain, seconds=seconds, show=show, **kills)
    print("" if live.console.is_terminal else "\n", "run: ", folder, sep="", file=sys.stderr)
    for line in swarms.doubts(result):
        print(line, file=sys.stderr)
    print_json(result, as_json)
    sys.exit(result["exit_code"])


def _policy(minutes: float | None, rounds: int | None) -> Any:
    from hyperpush.runs.checkpoints import MINUTES, Policy

    return Policy(MINUTES if minutes is None else minutes or None, rounds)


def _report(
    result: dict[str, Any], run: "StudyRun", as_json: bool, strict: bool = False, stationary: bool = False
) -> None:
    for path in run.figures:
        print("figure:", path, file=sys.stderr)
    print("run:", run.path, file=sys.stderr)
    print_json({**result, "run": run.path}, as_json)
    refuse_failure(result, strict, stationary)


def _together(processes: int | None, coordinator: str | None, process: int | None) -> None:
    """With a coordinator, join a run of several processes; else start all processes and exit when they have ended."""
    if coordinator is None:
        if process is not None:
            raise InvalidInput("--process", process, "a number only with --coordinator")
        if processes is not None and processes > 1:
            from hyperpush.base.processes.starter import start

            sys.exit(start(_arguments, processes))
        return
    from hyperpush.base.processes import join
    from hyperpush.base.processes.starter import end_with_parent

    end_with_parent()
    if coordinator == "env":
        join(None, processes, process)
    elif processes is None or process is None or process >= processes:
        given = f"process {process} of {processes}"
        raise InvalidInput("--coordinator", given, "--processes N and --process I, from 0 to N - 1, as well")
    else:
        join(coordinator, processes, process)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A HyperpushError prints one line on stderr and exits with the error's code."""
    _arguments[:] = sys.argv[1:] if arguments is None else arguments
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if sys.stderr is None:  # stderr was closed; `print` would write to stdout instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # print "?" for characters that the encoding lacks, as in ASCII
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(_arguments or ["--help"], prog_name="hyperpush", standalone_mode=False) or 0)
    except HyperpushError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)
    except USAGE_ERROR as error:
        command = "hyperpush" if error.ctx is None else error.ctx.command_path
        _fail(f"{error.format_message().rstrip('.')}; see: {command} --help")


def _fail(message: str, code: int = 2) -> None:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
