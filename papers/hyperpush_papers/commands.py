"""Commands of this package: `papers`, `sweep` and `data`. Each imports its code only when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hyperpush.base.errors import unknown
from hyperpush.cli.arguments import AsJson, Overrides, Source
from hyperpush.cli.output import print_json, print_table, refuse_failure
from hyperpush_papers.papers import find, items
from hyperpush_papers.papers import papers as all_papers

papers, sweep, data = typer.Typer(), typer.Typer(), typer.Typer()


@papers.command()
def print_papers(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Such as E, E.1 or E.table1.", autocompletion=lambda: list(items())),
    ] = None,
) -> None:
    """List the papers' figures, tables and theorems, or print one: commands, published numbers and ours."""
    if name is None:
        for paper in all_papers().values():
            rows = [(item.name, item.what, item.runs or f"not reproduced: {item.missing}") for item in paper.items]
            print_table(paper.heading, ("name", "what", "runs"), rows)
        return
    for item in find(name):
        print(f"{item.name}: {item.what}", all_papers()[item.name[0]].heading, sep="\n")
        for command in item.commands:
            print("   ", command)
        if grid := item.grid():
            print_table("", [cell or "" for cell in grid[0]], grid[1:])
        print(*item.sentences("docs/results/{}.md"), "", sep="\n")


@sweep.command()
def run_sweep(
    what: Source,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KEY=[...]", help="Values to choose from. Repeat it for more.")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="KEY=[...]", help="Values to compare. Repeat it for more options.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of reported runs of each method.", show_default="3")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep.", show_default="under runs/")] = None,
    as_json: AsJson = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 3 if a reported run did not converge.")
    ] = False,
) -> None:
    """Tune every method with the same budget, choose on validation, report over seeds. Repeat to continue."""
    from hyperpush.spec import studies
    from hyperpush_papers.sweep.plan import load
    from hyperpush_papers.sweep.report import sweep

    asked = [f"sweep.{table}.{each}" for table, given in (("grid", grid), ("compare", compare)) for each in given or []]
    asked += [] if seeds is None else [f"sweep.seeds={seeds}"]
    result, folder = sweep(load(what, [*(overrides or []), *asked], studies.experiments()), out)
    print("sweep:", folder, file=sys.stderr)
    print_json({**result, "run": folder}, as_json)
    if result["failed"]:
        raise typer.Exit(1)
    refuse_failure({"rows": result["rows"]}, strict)


@data.command()
def handle_data(
    action: Annotated[str | None, typer.Argument(metavar="get", help="Download a data set and verify it.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A data set.")] = None,
    to: Annotated[Path | None, typer.Option(help="Parent of the folder NAME.", show_default="HYPERPUSH_DATA")] = None,
) -> None:
    """List the data sets and their files in HYPERPUSH_DATA, or download one."""
    if action is None:
        from hyperpush_papers.common.data.catalog import entries

        columns = ("name", "data", "files in $HYPERPUSH_DATA, plain, .gz or .xz", "there", "download")
        print_table("data sets", columns, entries())
    elif action != "get":
        raise unknown("data", action, ["get"])
    else:
        from hyperpush_papers.common.data.download import get

        for path in get(name or "", to):
            print(path)
