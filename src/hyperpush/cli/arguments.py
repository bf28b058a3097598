"""Define arguments that several commands take, and their completion in the shell."""

from pathlib import Path
from typing import Annotated

import typer

from hyperpush.cli.index import load_index


def complete_study(incomplete: str) -> list[str]:
    """Return the names of studies that begin with this text."""
    return [name for name, _ in load_index()["studies"] if name.startswith(incomplete)]


def complete_name(incomplete: str) -> list[str]:
    """Return the names of studies, methods, networks and engines that begin with this text."""
    return [name for name in load_index()["names"] if name.startswith(incomplete)]


def complete_option(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the options, as `key=`, of the study that the command line names before this text."""
    keys = load_index()["keys"].get(str(ctx.params.get("what")), [])
    return [f"{key}=" for key in keys if key.startswith(incomplete)]


Source = Annotated[
    str, typer.Argument(metavar="NAME|FILE.toml", help="A study, or a TOML file.", autocompletion=complete_study)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-s", "--set", metavar="KEY=VALUE", help="Set one option. Repeat it for more.", autocompletion=complete_option
    ),
]
Out = Annotated[Path | None, typer.Option(help="Run folder; it must be new or empty.", show_default="under runs/")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
