"""The command `hyperpush audit`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyperpush.base.errors import InvalidInput
from hyperpush.cli.arguments import AsJson
from hyperpush.cli.output import print_json, print_table, refuse_failure

if TYPE_CHECKING:
    from hyperpush.audits.result import AuditResult

JOIN = ("party", "records", "alone", "together", "not_contributing", "gain", "low", "high", "p", "verdict")
WITHOUT = ("party", "gain", "low", "high", "p", "verdict", "visible")
WORST = 10  # largest number of records to print


def audit(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE.csv|FILE.toml", help="One CSV file per party, or one file, or TOML.")
    ],
    label: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    party: Annotated[str | None, typer.Option(help="Column that names the party, for one CSV file.")] = None,
    records: Annotated[bool, typer.Option("--records", help="Score each record, too.")] = False,
    page: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the TOML file of this audit; run nothing.")] = False,
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if a training is not solved.")] = False,
) -> None:
    """Audit a collaboration on tables: gains of each party, harmful parties, and harmful records."""
    from hyperpush.audits.settings import Settings, describe, load
    from hyperpush.pages.report import check_path
    from hyperpush.verbs.hooks import Bar

    if page is not None:
        check_path(page, overwrite)
    settings = load(source) if source.suffix == ".toml" else _given(source, label, party)
    if source.suffix == ".toml" and (label or party):
        raise InvalidInput("--label, --party", label or party, f"no value here: set them in {source.name}")
    if schema:
        print(describe(settings.read(), {**settings.tables, "files": str(settings.tables["files"])}), end="")
        return
    options = {**settings.audit, **({"records": True} if records else {})}
    found = Settings(settings.tables, options, settings.network).run([Bar()])
    if page is not None:
        found.page(page, overwrite)
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found, page)
    refuse_failure(found.to_dict(), strict)


def _given(source: Path, label: str | None, party: str | None) -> Any:
    from hyperpush.audits.settings import Settings

    if label is None:
        raise InvalidInput("--label", None, "the column to predict")
    return Settings({"files": source, "label": label, "party": party}, {}, {})


def _show(found: "AuditResult", page: Path | None) -> None:
    """Print the tables of an audit."""
    from hyperpush.audits.shown import summary

    for line in (*summary(found), f"Status: {found.status}."):
        print(line)
    for title, columns, rows in (
        ("is joining worth it?", JOIN, found.join),
        ("what the others gain or lose when a party leaves", WITHOUT, found.without),
        ("named as harmful", WITHOUT[:5], found.named),
        ("records that hurt the others most", ("party", "file", "line", "gain"), found.records[:WORST]),
    ):
        if rows:
            print_table(title, columns, [[_cell(getattr(row, name)) for name in columns] for row in rows])
    for warning in found.warnings:
        print("warning:", warning)
    if page is not None:
        print("page:", page)


def _cell(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
