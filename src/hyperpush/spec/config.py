"""From a TOML file or a name, and `key=value` overrides, to a validated configuration."""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.extensions import PAPERS, has_papers
from hyperpush.base.imports import allow_imports_from
from hyperpush.runs.experiment import Experiment

M = TypeVar("M", bound=BaseModel)


class Config(BaseModel):
    """Base of every experiment's options: unknown keys, NaN and infinity are refused, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


def load_config(source: str, overrides: Sequence[str], known: Mapping[str, Experiment]) -> tuple[Experiment, BaseModel]:
    """The experiment that `source` (a name or a `.toml` file) asks for, and its options after the overrides.

    A file with `[task]` is a spec; one with `experiment = …` is a study.
    """
    experiment, values = read_source(source, known)
    return experiment, configure(experiment, values, overrides)


def read_source(source: str, known: Mapping[str, Experiment]) -> tuple[Experiment, dict[str, Any]]:
    """The experiment that `source` asks for, and the options that it sets."""
    if source.endswith(".toml"):
        values = read_toml(Path(source))
        name = "spec" if is_spec(values) else values.pop("experiment", None)
        allow_imports_from(Path(source).resolve().parent)
    else:
        name, values = source, {}
    return find(name, known), values


def configure(experiment: Experiment, values: dict[str, Any], overrides: Sequence[str]) -> BaseModel:
    """The options of an experiment: its defaults, then values, then overrides."""
    for override in overrides:
        set_from_text(values, override, experiment.config)
    return validate(experiment.config, values, experiment.name)


def is_spec(values: Mapping[str, Any]) -> bool:
    """Whether the content of a file is a spec, and no study's options."""
    return "task" in values and "experiment" not in values


def named_table(given: object) -> object:
    """A table of a spec, where a string alone is the name of what has no options: `network = "ring"`."""
    return {"name": given} if isinstance(given, str) else given


def find(name: object, known: Mapping[str, Experiment]) -> Experiment:
    """The experiment called `name`."""
    if not isinstance(name, str):
        raise InvalidInput("experiment", name, ", ".join(known))
    if name not in known:
        raise unknown("experiment", name, known) if has_papers() else _without_papers(name, known)
    return known[name]


def _without_papers(name: str, known: Mapping[str, Experiment]) -> InvalidInput:
    error = unknown("experiment", name, known)
    return InvalidInput(error.field, error.given, f"{error.allowed}; {PAPERS}")


def validate(model: type[M], values: dict[str, Any], name: str = "config") -> M:
    """An instance of `model`; the first thing wrong becomes one `InvalidInput` that names the dotted field."""
    _check_finite(values)
    try:
        # JSON in strict mode is TOML's own notion of types: arrays fill tuples, but "3" and true are not integers.
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise _explain(error, model, values, name) from None


def _check_finite(values: object, field: str = "") -> None:
    """Refuse NaN and infinity wherever they stand: tables of free options are not checked by a model."""
    if isinstance(values, float) and not math.isfinite(values):
        raise InvalidInput(field, values, "a finite number")
    inside = values if isinstance(values, dict) else dict(enumerate(values)) if isinstance(values, list) else {}
    for key, each in inside.items():
        _check_finite(each, f"{field}.{key}" if field else str(key))


def to_toml(experiment: str, config: BaseModel) -> str:
    """The TOML that gives this configuration again."""
    named = {} if experiment == "spec" else {"experiment": experiment}
    return tomli_w.dumps({**named, **config.model_dump(mode="json", exclude_none=True)})


def default_toml(experiment: Experiment) -> str:
    """The defaults of an experiment as TOML to start from, each field under a comment that explains it."""
    lines = [f"# {experiment.summary}", *tomli_w.dumps({"experiment": experiment.name}).splitlines()]
    return "\n".join([*lines, *_document(experiment.config(), ())]) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput("file", str(path), f"a TOML file that can be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("file", str(path), f"well-formed TOML ({error})") from None


def set_from_text(values: dict[str, Any], override: str, model: type[BaseModel]) -> None:
    """Set one `dotted.key=value`; a value that is not TOML is taken as a bare string."""
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InvalidInput("-s", override, "key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text.strip()
    field = model.model_fields.get(path[0])
    if len(path) > 1 and path[0] not in values and field is not None and not field.is_required():
        # Only the named value changes: the rest of its table keeps the experiment's defaults.
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            values[path[0]] = default.model_dump(mode="json", exclude_none=True)
    set_option(values, key.strip(), value)


def set_option(values: dict[str, Any], name: str, value: object) -> None:
    """Set the option of a dotted name, in tables that are made where they are missing."""
    *parents, last = name.split(".")
    for part in parents:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise InvalidInput(name, value, f"{part} is a single value, not a table")
    values[last] = value


def _explain(error: ValidationError, model: type[BaseModel], values: dict[str, Any], name: str) -> InvalidInput:
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(_path(first["loc"], values, first["type"])) or name
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInput):
        return cause
    if first["type"] == "extra_forbidden":
        siblings = _names(model, [part for part in first["loc"][:-1] if isinstance(part, str)])
        given = str(first["loc"][-1])
        return unknown(field, given, siblings)
    if first["type"] == "missing":
        return InvalidInput(field, None, "a value; it has no default")
    if first["type"] == "too_short":
        return InvalidInput(field, first["input"], f"a list of {first.get('ctx', {})['min_length']} or more")
    if first["type"] in ("tuple_type", "list_type"):
        return InvalidInput(field, first["input"], f"a list, such as [{first['input']}]")
    choices = [each for each in re.findall(r"'([^']*)'", first.get("ctx", {}).get("expected", "")) if each]
    if choices and isinstance(first["input"], str):
        return unknown(field, first["input"], choices)
    # A field that takes several types fails once for each of them.
    same = [each for each in details if ".".join(_path(each["loc"], values, each["type"])) == field]
    rules = dict.fromkeys(re.sub(r"^(Input should be|Value error,) ", "", each["msg"]) for each in same)
    return InvalidInput(field, first["input"], " or ".join(rules))


def _path(loc: tuple[int | str, ...], values: Any, kind: str) -> Iterator[str]:
    """The parts of a pydantic location that are in the data, without the names of union members between them."""
    for part in loc:
        inside: Any = dict(enumerate(values)) if isinstance(values, list) else values
        if isinstance(inside, dict) and part in inside:
            values = inside[part]
            yield str(part)
        elif kind == "missing" and part == loc[-1]:
            yield str(part)


def _names(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The field names of the models found under `path`."""
    models = [model]
    for part in path:
        fields = [each.model_fields[part].annotation for each in models if part in each.model_fields]
        models = [found for annotation in fields for found in _models(annotation)] or models
    return [name for each in models for name in each.model_fields]


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _document(config: BaseModel, prefix: tuple[str, ...]) -> Iterator[str]:
    properties = type(config).model_json_schema()["properties"]
    dumped = config.model_dump(mode="json", exclude_none=True)
    # Plain values come first: in TOML, whatever follows a [table] belongs to it.
    names = sorted(type(config).model_fields, key=lambda name: isinstance(getattr(config, name), BaseModel | dict))
    for name in names:
        yield ""
        note = _note(properties[name])
        if note:
            yield f"# {note}"
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield f"[{'.'.join((*prefix, name))}]"
            yield from _document(value, (*prefix, name))
        elif isinstance(value, dict):
            yield f"[{'.'.join((*prefix, name))}]"
            yield from tomli_w.dumps(dumped[name]).splitlines()
        elif value is None:
            yield f"# {name} is not set"
        else:
            yield tomli_w.dumps({name: dumped[name]}).rstrip()


def _note(schema: dict[str, Any]) -> str:
    """What a field means and what it allows, from its JSON schema."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    choices = [", ".join(str(choice) for choice in schema["enum"])] if "enum" in schema else []
    meaning = [line.rstrip(".") for line in schema.get("description", "").splitlines()[:1]]
    return "; ".join([*meaning, *choices, *limits])
