"""Everything that has a name: its line in `hyperpush list`, and its options as TOML under what its docstring says."""

import dataclasses
import inspect
import re
from typing import Any

import tomli_w

from hyperpush.base.errors import HyperpushError
from hyperpush.base.imports import plain_name
from hyperpush.cli.index import COLUMNS, Index
from hyperpush.methods.registry import KINDS, broken, registered, table
from hyperpush.runs.experiment import Experiment
from hyperpush.spec.config import default_toml
from hyperpush.spec.studies import experiments

TITLES = {
    "inner": "inner solvers",
    "hypergradients": "hypergradients",
    "algorithms": "bilevel algorithms",
    "big_fed": "on graphs",
}


def describe_all(stamp: str) -> Index:
    """Everything, as `hyperpush list` and `hyperpush show` print it."""
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
        "broken": {name: str(error) for name, error in {**broken(), **unusable}.items()},
    }


def _load_studies() -> tuple[dict[str, Experiment], dict[str, HyperpushError]]:
    """Every study, and why others cannot be had."""
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
    """What the class is, and a table with all its options."""
    text = inspect.cleandoc(cls.__doc__ or "")
    table_name = {"networks": "network", "engines": "engine", "hooks": "hooks.NAME"}.get(kind, "method")
    lines = [f"# {line}".rstrip() for line in text.split("\n\n")[0].splitlines()]
    info = getattr(cls, "info", None)
    if info is not None:
        lines += [f"# network: {info.network}; target: {info.target}; sends {info.sends}", f"# {info.paper}"]
    lines += ["", f"[{table_name}]", tomli_w.dumps({"name": _name(kind, cls)}).strip()]
    documented, example = _documented_options(text), dict(info.example) if info is not None else {}
    for parameter in inspect.signature(cls).parameters.values():
        if kind == "networks" and parameter.name == "clients":
            continue  # they come from the task
        lines += ["", *(f"# {line}" for line in documented.get(parameter.name, ()))]
        lines.append(_line(parameter, example))
    return "\n".join(lines) + "\n"


def _name(kind: str, cls: type) -> str:
    return next(name for name, each in registered(kind).items() if each is cls)


def _documented_options(text: str) -> dict[str, list[str]]:
    """What a docstring's `Args:` say, by option."""
    found: dict[str, list[str]] = {}
    inside, name = False, ""
    for line in text.splitlines():
        if line.strip() == "Args:":
            inside = True
        elif inside and line and not line.startswith(" "):
            break
        elif inside and (match := re.match(r"    (\w+): (.*)", line)):
            name = match[1]
            found[name] = [match[2]]
        elif inside and name and line.strip():
            found[name].append(line.strip())
    return found


def _line(parameter: inspect.Parameter, example: dict[str, Any]) -> str:
    """An option as TOML: an example's value, else its default; a comment where there is none that TOML can hold."""
    if parameter.name in example:
        return _toml(parameter.name, example[parameter.name])
    if parameter.default is parameter.empty:
        return f"# {parameter.name} has no default"
    if parameter.default is None:
        return f"# {parameter.name} is not set"
    default = parameter.default
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        default = table(default)
    return _toml(parameter.name, default)


def _toml(name: str, value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(tomli_w.dumps({key: each}).strip() for key, each in value.items())
        return f"{name} = {{ {inside} }}"
    try:
        return tomli_w.dumps({name: list(value) if isinstance(value, tuple) else value}).strip()
    except (TypeError, ValueError):
        return f"# {name} is {value}"
