"""A method's, network's or engine's options as TOML to start from, each under what its docstring says of it."""

import dataclasses
import inspect
import re
from typing import Any

import tomli_w

from hyperpush.errors import unknown
from hyperpush.registry import KINDS, plain_name, registered, table


def find_class(name: str, others: list[str]) -> tuple[str, type]:
    """The registered class that is called so, of whatever kind; `others` are names that are allowed besides."""
    known = {each: (kind, found) for kind in KINDS for each, found in registered(kind).items()}
    for each, found in known.items():
        if plain_name(name) in (plain_name(each), plain_name(found[1].__name__)):
            return found
    raise unknown("name", name, [*others, *known])


def options_toml(kind: str, cls: type) -> str:
    """What the class is, and a table with all its options."""
    text = inspect.cleandoc(cls.__doc__ or "")
    table_name = {"networks": "network", "engines": "engine", "hooks": "hooks.NAME"}.get(kind, "method")
    lines = [f"# {line}".rstrip() for line in text.split("\n\n")[0].splitlines()]
    info = getattr(cls, "info", None)
    if info is not None:
        lines += [f"# network: {info.network}; target: {info.target}; sends {info.sends}", f"# {info.paper}"]
    lines += ["", f"[{table_name}]", tomli_w.dumps({"name": _name(kind, cls)}).strip()]
    explained, example = _explained(text), dict(info.example) if info is not None else {}
    for parameter in inspect.signature(cls).parameters.values():
        if kind == "networks" and parameter.name == "clients":
            continue  # they come from the task
        lines += ["", *(f"# {line}" for line in explained.get(parameter.name, ()))]
        lines.append(_line(parameter, example))
    return "\n".join(lines) + "\n"


def _name(kind: str, cls: type) -> str:
    return next(name for name, each in registered(kind).items() if each is cls)


def _explained(text: str) -> dict[str, list[str]]:
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


def _toml(name: str, value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(tomli_w.dumps({key: each}).strip() for key, each in value.items())
        return f"{name} = {{ {inside} }}"
    try:
        return tomli_w.dumps({name: list(value) if isinstance(value, tuple) else value}).strip()
    except (TypeError, ValueError):
        return f"# {name} is {value}"
