"""Read and write the TOML file of an audit, which holds its tables, its settings and its network."""

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from hyperpush.audits.audit import audit
from hyperpush.audits.result import AuditResult
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.methods.by_name import network
from hyperpush.tables.read import Tables, read
from hyperpush.verbs.hooks import Hook

SECTIONS = ("tables", "audit", "network")
ELSEWHERE = ("tables", "network", "engine", "hooks")  # arguments that [audit] does not take
OPTIONS = tuple(name for name in inspect.signature(audit).parameters if name not in ELSEWHERE)
READ = ("files", "label", "party", "kind", "columns")
KINDS = ("number", "category")


@dataclass(frozen=True)
class Settings:
    """Arguments of an audit, as its TOML file gives them.

    Attributes:
        tables: Arguments of `hp.tables.read`: `files` is its first argument, `columns` gives the kind of each column.
        audit: Arguments of `hp.audit`.
        network: The name of a network and its options; empty for the default.
    """

    tables: Mapping[str, Any]
    audit: Mapping[str, Any]
    network: Mapping[str, Any]

    def read(self) -> Tables:
        """Read the tables; raise `InvalidInput` if columns are listed and differ from those in the files."""
        given = dict(self.tables)
        files, columns = given.pop("files", None), given.pop("columns", None) or {}
        if files is None or "label" not in given:
            raise InvalidInput("[tables]", sorted(self.tables), "at least files and label")
        for name, kind in columns.items():
            if kind not in KINDS:
                raise InvalidInput(f"tables.columns.{name}", kind, " or ".join(map(repr, KINDS)))
        found = read(files, categories=[name for name, kind in columns.items() if kind == "category"], **given)
        names = [column.name for column in found.schema.columns]
        if columns and set(names) != set(columns):
            other = sorted(set(names) ^ set(columns))[0]
            given = "in the files only" if other in names else "not in the files"
            raise InvalidInput(
                f"tables.columns.{other}", given, "all columns of the files and no others, each with its kind"
            )
        for column in found.schema.columns:
            if columns.get(column.name) == "number" and column.values:
                raise InvalidInput(f"tables.columns.{column.name}", "number", "'category': the column holds text")
        return found

    def run(self, hooks: Sequence[Hook] = ()) -> AuditResult:
        """Read the tables and run the audit with these settings."""
        tables = self.read()
        options = dict(self.network)
        made = network(options.pop("name"), len(tables.names), **options) if options else None
        return audit(tables, made, **self.audit, hooks=hooks)


def load(path: Path) -> Settings:
    """Read a TOML file; paths in it are relative to its folder."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(str(path), str(error), "a TOML file with [tables], [audit] and [network]") from None
    for name in found:
        if name not in SECTIONS:
            raise unknown(str(path), name, SECTIONS)
    tables, options, chosen = (_section(path, found, name) for name in SECTIONS)
    for section, known in ((tables, READ), (options, OPTIONS)):
        for name in section:
            if name not in known:
                raise unknown(str(path), name, known)
    if chosen and "name" not in chosen:
        raise InvalidInput(f"{path}, [network]", sorted(chosen), "a name, such as name = 'exponential'")
    if "files" in tables:
        tables["files"] = _beside(path.parent, tables["files"])
    return Settings(tables, options, chosen)


def describe(tables: Tables, given: Mapping[str, Any]) -> str:
    """Return the TOML file of an audit of these tables, with every column's kind and the default settings.

    Args:
        tables: The tables that were read.
        given: The arguments `files`, `label` and `party` by which they were read.
    """
    columns = {column.name: "category" if column.values else "number" for column in tables.schema.columns}
    kept = {name: value for name, value in given.items() if value is not None}
    defaults = {name: inspect.signature(audit).parameters[name].default for name in OPTIONS}
    settings = {name: value for name, value in defaults.items() if value is not None}
    return tomli_w.dumps({"tables": {**kept, "kind": tables.schema.kind, "columns": columns}, "audit": settings})


def _section(path: Path, found: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = found.get(name, {})
    if not isinstance(section, dict):
        raise InvalidInput(f"{path}, {name}", section, f"a section [{name}]")
    return dict(section)


def _beside(folder: Path, files: Any) -> Any:
    if isinstance(files, dict):
        return {name: _beside(folder, file) for name, file in files.items()}
    if not isinstance(files, str):
        raise InvalidInput("tables.files", files, "a path, or a table of paths by party")
    return folder / files
