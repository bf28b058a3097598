"""Define options of studies, TOML files and deployments as frozen dataclasses. This module does not import JAX."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_args, get_origin

from hyperpush.base.annotations import (
    HELP,
    NONE,
    check_option,
    construct,
    dotted,
    options_of,
    read_option,
)
from hyperpush.base.checks import check_arguments

C = TypeVar("C", bound="Config")


def option(default: Any = MISSING, help: str = "") -> Any:
    """Return a field of a `Config` with this default and a help text of one line. Without a default, it is required."""
    if isinstance(default, dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata={HELP: help})
    return field(default=default, metadata={HELP: help})


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of options, which checks names, and values by their annotations; lists become tuples.

    A subclass becomes a frozen dataclass without a decorator. It may define `check` for options that depend on each
    other. `given` holds the names of the options that were passed.
    """

    given: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __new__(cls, **given: Any):
        """Raise InvalidInput for unknown or missing options, and store the names of the given options in `given`."""
        check_arguments(cls.__name__, inspect.signature(cls), (), given)
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(given))
        return made

    def __post_init__(self) -> None:
        for name, each in options_of(type(self)).items():
            label = f"{type(self).__name__}.{name}"
            value = read_option(each.annotation, getattr(self, name), label, read_tables)
            check_option(label, each.annotation, value)
            object.__setattr__(self, name, value)
        self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), {each.name: getattr(self, each.name) for each in fields(self)})

    def check(self) -> None:
        """Raise InvalidInput if options do not fit each other; the error names the field without the class."""

    @classmethod
    def usage(cls) -> str:
        """Return a description of a table with these options, for error messages."""
        return f"a table with {', '.join(each.name for each in fields(cls))}"


def _remake(kind: type[C], options: dict[str, Any]) -> C:
    return kind(**options)


def read_tables(allowed: tuple[Any, ...], given: Mapping[str, Any], field: str) -> Any:
    """Read a nested table of options.

    The table becomes a `Config`, or a dict whose values are read one by one, according to the allowed types. Any other
    table stays as it is.
    """
    for each in allowed:
        if isinstance(each, type) and issubclass(each, Config):
            return read_config(each, given, field)
        if get_origin(each) in (Mapping, dict) and get_args(each)[1] is not Any:
            kind = get_args(each)[1]
            return {key: read_option(kind, value, dotted(field, key), read_tables) for key, value in given.items()}
    return given


def read_config(kind: type[C], values: Mapping[str, Any], field: str = "") -> C:
    """Return the options of class `kind` that a table of a file describes.

    Raises:
        InvalidInput: The table is invalid; the message names the dotted key, the given value and the allowed ones.
    """
    return construct(kind, values, field, read_tables)


def as_table(config: Config) -> dict[str, Any]:
    """Return the options as a table, from which `read_config` can make them again."""
    found: dict[str, Any] = {}
    for name, each in options_of(type(config)).items():
        value = getattr(config, name)
        if value is not None:
            found[name] = _plain(value)
        elif each.default is not None:
            found[name] = NONE
    return found


def _plain(value: Any) -> Any:
    """Return a value in a form that TOML can hold."""
    if isinstance(value, Config):
        return as_table(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
