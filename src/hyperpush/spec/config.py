"""Read the options of an experiment from a TOML file or a study's name, apply `key=value` overrides, and check them."""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from hyperpush.base.annotations import Option, options_of
from hyperpush.base.config import Config, as_table, read_config
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.extensions import PAPERS, has_papers
from hyperpush.base.imports import allow_imports_from
from hyperpush.runs.experiment import Experiment

C = TypeVar("C", bound=Config)


def load_config(source: str, overrides: Sequence[str], known: Mapping[str, Experiment]) -> tuple[Experiment, Config]:
    """Return the experiment of `source` (a name or a `.toml` file), and its options after the overrides.

    A file with a table `[task]` is a spec. A file with `experiment = …` holds the options of a study.
    """
    experiment, values = read_source(source, known)
    return experiment, configure(experiment, values, overrides)


def read_source(source: str, known: Mapping[str, Experiment]) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment of `source` (a name or a `.toml` file), and the options that this file sets."""
    if source.endswith(".toml"):
        values = read_toml(Path(source))
        name = "spec" if is_spec(values) else values.pop("experiment", None)
        allow_imports_from(Path(source).resolve().parent)
    else:
        name, values = source, {}
    return find(name, known), values


def configure(experiment: Experiment, values: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Return the options of an experiment: its defaults, replaced by `values`, which are replaced by `overrides`."""
    for override in overrides:
        set_from_text(values, override, experiment.config)
    return validate(experiment.config, values)


def is_spec(values: Mapping[str, Any]) -> bool:
    """Return True if the content of a file is a spec, and False if it holds the options of a study."""
    return "task" in values and "experiment" not in values


def named_table(given: object) -> object:
    """Return a table of a spec. A string such as `network = "ring"` becomes a table with this name and no options."""
    return {"name": given} if isinstance(given, str) else given


def find(name: object, known: Mapping[str, Experiment]) -> Experiment:
    """Return the experiment with this name; raise InvalidInput if it does not exist."""
    if not isinstance(name, str):
        raise InvalidInput("experiment", name, ", ".join(known))
    if name not in known:
        raise unknown("experiment", name, known) if has_papers() else _without_papers(name, known)
    return known[name]


def _without_papers(name: str, known: Mapping[str, Experiment]) -> InvalidInput:
    error = unknown("experiment", name, known)
    return InvalidInput(error.field, error.given, f"{error.allowed}; {PAPERS}")


def validate(kind: type[C], values: dict[str, Any]) -> C:
    """Return the options in the tables of a file; raise InvalidInput with the dotted key at the first error."""
    _check_finite(values)
    return read_config(kind, values)


def _check_finite(values: object, field: str = "") -> None:
    """Raise InvalidInput for NaN and infinity at all levels, because no other check covers tables of free options."""
    if isinstance(values, float) and not math.isfinite(values):
        raise InvalidInput(field, values, "a finite number")
    inside = values if isinstance(values, dict) else dict(enumerate(values)) if isinstance(values, list) else {}
    for key, each in inside.items():
        _check_finite(each, f"{field}.{key}" if field else str(key))


def to_toml(experiment: str, config: Config) -> str:
    """Return the TOML text from which these options of an experiment can be read again."""
    named = {} if experiment == "spec" else {"experiment": experiment}
    return tomli_w.dumps({**named, **as_table(config)})


def default_toml(experiment: Experiment) -> str:
    """Return the defaults of an experiment as TOML, with a comment that explains each field."""
    lines = [f"# {experiment.summary}", *tomli_w.dumps({"experiment": experiment.name}).splitlines()]
    return "\n".join([*lines, *_document(experiment.config(), ())]) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raise InvalidInput if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput("file", str(path), f"a TOML file that can be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("file", str(path), f"well-formed TOML ({error})") from None


def set_from_text(values: dict[str, Any], override: str, kind: type[Config]) -> None:
    """Set one option from a text `dotted.key=value`; a value that is not valid TOML is taken as a string."""
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InvalidInput("-s", override, "key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text.strip()
    field = options_of(kind).get(path[0])
    if len(path) > 1 and path[0] not in values and field is not None and isinstance(field.default, Config):
        values[path[0]] = as_table(field.default)  # all other options of this table keep the experiment's defaults
    set_option(values, key.strip(), value)


def set_option(values: dict[str, Any], name: str, value: object) -> None:
    """Set the option with a dotted name in nested tables; create missing tables."""
    *parents, last = name.split(".")
    for part in parents:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise InvalidInput(name, value, f"{part} is a single value, not a table")
    values[last] = value


def option_names(config: Config, prefix: str = "") -> list[str]:
    """Return the dotted names of all options, including those in nested tables."""
    found: list[str] = []
    for name in options_of(type(config)):
        value = getattr(config, name)
        found += option_names(value, f"{prefix}{name}.") if isinstance(value, Config) else [f"{prefix}{name}"]
    return found


def _document(config: Config, prefix: tuple[str, ...]) -> Iterator[str]:
    dumped, described = as_table(config), options_of(type(config))
    # Plain values come first: in TOML, all lines after a [table] belong to it.
    for name in sorted(described, key=lambda name: isinstance(getattr(config, name), Config | dict)):
        yield ""
        note = _note(described[name])
        if note:
            yield f"# {note}"
        value = getattr(config, name)
        if isinstance(value, Config):
            yield f"[{'.'.join((*prefix, name))}]"
            yield from _document(value, (*prefix, name))
        elif isinstance(value, dict):
            yield f"[{'.'.join((*prefix, name))}]"
            yield from tomli_w.dumps(dumped[name]).splitlines()
        elif value is None:
            yield f"# {name} is not set"
        else:
            yield tomli_w.dumps({name: dumped[name]}).rstrip()


def _note(option: Option) -> str:
    """Return the first line of an option's help, followed by its allowed values."""
    return "; ".join([*(line.rstrip(".") for line in option.help[:1]), *option.notes])
