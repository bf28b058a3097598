"""Make the texts of `hyperpush list` (one line per name) and `hyperpush show` (a docstring and options as TOML)."""

import dataclasses
import inspect
from typing import Any

import tomli_w

from hyperpush.base.annotations import Option, options_of
from hyperpush.base.errors import HyperpushError
from hyperpush.base.imports import plain_name
from hyperpush.cli.index import COLUMNS, Index
from hyperpush.methods.registry import KINDS, broken, registered, table
from hyperpush.runs.experiment import Experiment
from hyperpush.spec.config import default_toml, option_names
from hyperpush.spec.studies import experiments

TITLES = {
    "inner": "inner solvers",
    "hypergradients": "hypergradients",
    "algorithms": "bilevel algorithms",
    "big_fed": "on graphs",
}


def describe_all(stamp: str) -> Index:
    """Return the index with all texts of `hyperpush list` and `hyperpush show`; `stamp` is a digest of the code."""
    classes = [(kind, each) for kind in KINDS for each in registered(kind).items()]
    studies, unusable = _load_studies()
    networks = [(name, cls.__name__, _first_line(cls)) for name, cls in registered("networks").items()]
    methods = {
        title: [
            (name, *(getattr(cls.info, column) for column in COLUMNS[1:-1]), "yes" if cls.info.matrices else "no")
            for name, cls in registered(kind).items()
        ]
        for kind, title in TITLES.items()
    }
    options = {
        plain_name(alias): options_toml(kind, cls)
        for kind, (name, cls) in reversed(classes)
        for alias in (cls.__name__, name)
    }
    return {
        "stamp": stamp,
        "studies": [(each.name, each.summary) for each in studies.values()],
        "networks": networks,
        "methods": methods,
        "names": [*studies, *dict.fromkeys(name for _, (name, _) in classes)],
        "options": options | {plain_name(each.name): default_toml(each) for each in studies.values()},
        "keys": {each.name: option_names(each.config()) for each in studies.values()},
        "broken": {name: str(error) for name, error in {**broken(), **unusable}.items()},
    }


def _load_studies() -> tuple[dict[str, Experiment], dict[str, HyperpushError]]:
    """Return all studies, and the errors of those that cannot be loaded."""
    known, found, unusable = experiments(), {}, {}
    for name in known:
        try:
            found[name] = known[name]
        except HyperpushError as error:
            unusable[name] = error
    return found, unusable


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def options_toml(kind: str, cls: type) -> str:
    """Return the description of a class as TOML comments, followed by a table with all options of the class."""
    text = inspect.cleandoc(cls.__doc__ or "")
    table_name = {"networks": "network", "engines": "engine", "hooks": "hooks.NAME"}.get(kind, "method")
    lines = [f"# {line}".rstrip() for line in text.split("\n\n")[0].splitlines()]
    info = getattr(cls, "info", None)
    if info is not None:
        lines += [f"# network: {info.network}; target: {info.target}; sends {info.sends}", f"# {info.paper}"]
    lines += ["", f"[{table_name}]", tomli_w.dumps({"name": _name(kind, cls)}).strip()]
    example = dict(info.example) if info is not None else {}
    for option in options_of(cls).values():
        if kind == "networks" and option.name == "clients":
            continue  # the number of clients comes from the task
        allowed = [f"Allowed: {'; '.join(option.notes)}."] if option.notes else []
        lines += ["", *(f"# {line}" for line in (*option.help, *allowed)), _line(option, example)]
    return "\n".join(lines) + "\n"


def _name(kind: str, cls: type) -> str:
    return next(name for name, each in registered(kind).items() if each is cls)


def _line(option: Option, example: dict[str, Any]) -> str:
    """Return an option as TOML, with its value in `example` or its default; as a comment if TOML cannot hold it."""
    if option.name in example:
        return _toml(option.name, example[option.name])
    if option.default is inspect.Parameter.empty:
        return f"# {option.name} has no default"
    if option.default is None:
        return f"# {option.name} is not set"
    default = option.default
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        default = table(default)
    return _toml(option.name, default)


def _toml(name: str, value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(tomli_w.dumps({key: each}).strip() for key, each in value.items())
        return f"{name} = {{ {inside} }}"
    try:
        return tomli_w.dumps({name: list(value) if isinstance(value, tuple) else value}).strip()
    except (TypeError, ValueError):
        return f"# {name} is {value}"
