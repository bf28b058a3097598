"""Read and check options by their annotations, in one way for Python arguments, TOML files, `-s` and `show`.

The annotation of an option holds its type and range, and the assignment its default. The help text is in `option` or
under `Args:` of the docstring. This module does not import JAX.
"""

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from hyperpush.base.checks import check_arguments, is_jax_number, is_number
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.imports import load_function
from hyperpush.base.limits import Range

NONE = "none"  # stands for None in TOML, which lacks null
HELP = "help"  # key of the help text in a field's metadata
# Function that makes an object from a nested table: its arguments are the allowed types, the table, and the dotted key.
Tables = Callable[[tuple[Any, ...], Mapping[str, Any], str], Any]


@dataclass(frozen=True)
class Option:
    """An option of a class or function: its name, annotation, default and help text."""

    name: str
    annotation: Any
    default: Any  # `inspect.Parameter.empty` if the option has no default
    help: tuple[str, ...]  # lines of text

    @property
    def notes(self) -> list[str]:
        """Descriptions of the allowed choices and ranges."""
        kind, found = split(self.annotation)
        members = [(kind, found), *map(split, members_of(kind))] if len(members_of(kind)) > 1 else [(kind, found)]
        ranges = [each.words for _, checks in members for each in checks if isinstance(each, Range)]
        choices = [str(choice) for each, _ in members if get_origin(each) is Literal for choice in get_args(each)]
        return list(dict.fromkeys([*([", ".join(choices)] if choices else []), *ranges]))


@dataclass(frozen=True)
class Before:
    """Metadata of an annotation: a function that converts a value read from a file before it is checked."""

    convert: Callable[[Any], Any]


class Split(NamedTuple):
    """An annotation split into the type (`kind`) and the metadata of `Annotated`."""

    kind: Any
    metadata: tuple[Any, ...]


@cache
def split(annotation: Any) -> Split:
    """Split an annotation into its type and its metadata, which is empty unless the annotation is `Annotated[…]`."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        return Split(kind, tuple(metadata))
    return Split(annotation, ())


@cache
def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union type; for any other type, a tuple that contains only this type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


@cache
def options_of(make: Any) -> Mapping[str, Option]:
    """Return the options of a class or function by name, in the order of its parameters."""
    documented = documented_options(inspect.cleandoc(make.__doc__ or ""))
    cls: Any = make
    fields = {each.name: each for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    hints, found = _hints(make), {}
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        help = tuple(fields[name].metadata[HELP].splitlines()) if HELP in _metadata(fields, name) else ()
        factory: Any = fields[name].default_factory if name in fields else dataclasses.MISSING
        default = parameter.default if factory is dataclasses.MISSING else factory()
        found[name] = Option(name, hints.get(name, Any), default, help or tuple(documented.get(name, ())))
    return types.MappingProxyType(found)


def _metadata(fields: Mapping[str, dataclasses.Field], name: str) -> Mapping[str, Any]:
    return fields[name].metadata if name in fields else {}


def _hints(make: Any) -> dict[str, Any]:
    """Return the annotations of a class's fields and of its `__init__`, or of a function."""
    if not isinstance(make, type):
        return inspect.get_annotations(make, eval_str=True)  # get_type_hints is empty under no_type_check
    by_field = get_type_hints(make, include_extras=True) if dataclasses.is_dataclass(make) else {}
    # A generated `__init__` belongs to the module of the class, but its annotations to the modules of base classes.
    names = {key: each for cls in reversed(make.__mro__) for key, each in vars(sys.modules[cls.__module__]).items()}
    own = get_type_hints(make.__init__, names, include_extras=True)
    return by_field | {name: hint for name, hint in own.items() if hint is not Any}


def documented_options(text: str) -> dict[str, list[str]]:
    """Return the lines of help for each option, by name, from the section `Args:` of a docstring."""
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


def construct(make: Callable[..., Any], values: Mapping[str, Any], field: str, tables: Tables) -> Any:
    """Make an object from a table of a file: `make` is called with the table's options.

    Errors name the option by its dotted key in the table `field`. `tables` makes objects from nested tables.
    """
    check_names(make, values, field)
    options = options_of(make)
    read = {
        name: read_option(options[name].annotation, given, dotted(field, name), tables)
        for name, given in values.items()
    }
    try:
        return make(**read)
    except InvalidInput as error:
        name = getattr(make, "label", None)
        label = name() if name else getattr(make, "__name__", "")
        option = error.field.removeprefix(f"{field}.").removeprefix(f"{label}.")
        raise InvalidInput(dotted(field, option), error.given, error.allowed) from None


def check_names(make: Callable[..., Any], values: Mapping[str, Any], field: str) -> None:
    """Raise InvalidInput for unknown options, with the nearest known name.

    In a nested table (`field` is not empty), missing options without a default also raise InvalidInput.
    """
    if field:
        check_arguments(field, inspect.signature(make), (), values)
        return
    for name in values:
        if name not in options_of(make):
            raise unknown(name, name, options_of(make))


def dotted(field: str, name: str) -> str:
    """Return the dotted key of an option in the table `field`."""
    return f"{field}.{name}" if field else name


def read_option(annotation: Any, given: Any, field: str, tables: Tables) -> Any:
    """Convert a value from a file to the type of its option.

    Lists become tuples, tables become objects, and the text `"none"` becomes None.
    """
    kind, metadata = split(annotation)
    members = [split(each) for each in members_of(kind)]
    for each in (*metadata, *(extra for member in members for extra in member.metadata)):
        given = each.convert(given) if isinstance(each, Before) else given
    allowed = tuple(each.kind for each in members)
    if isinstance(given, str):
        return _read_text(allowed, given, field)
    if isinstance(given, list | tuple):
        return _read_list(members_of(kind), given, field, tables)
    if isinstance(given, Mapping):
        return tables(allowed, given, field)
    if float in allowed and int not in allowed and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    return given


def _read_text(allowed: tuple[Any, ...], given: str, field: str) -> Any:
    if given == NONE and type(None) in allowed:
        return None
    if ":" in given and any(is_callable(each) for each in allowed):
        return load_function(field, given)
    return given


def _read_list(members: tuple[Any, ...], given: list[Any] | tuple[Any, ...], field: str, tables: Tables) -> Any:
    if type(given) is not list and type(given) is not tuple:
        return given  # a named tuple stays as it is
    kind = next((split(each).kind for each in members if get_origin(split(each).kind) is tuple), tuple[Any, ...])
    parts = list(_parts(kind, given)) if len(_elements(kind, given)) == len(given) else [(Any, each) for each in given]
    return tuple(read_option(part, each, f"{field}[{number}]", tables) for number, (part, each) in enumerate(parts))


def is_callable(hint: Any) -> bool:
    """Return True if an annotation asks for a function."""
    return get_origin(hint) is get_origin(Callable[..., Any])


def check_option(label: str, annotation: Any, given: Any) -> None:
    """Raise InvalidInput with the allowed values unless a value has the type and range of an annotation."""
    kind, checks = split(annotation)
    members = [split(each) for each in members_of(kind)]
    fitting = next((each for each in members if _fits(each.kind, given)), None)
    if fitting is None:  # `given` may be a list of the right length with an element of a wrong type
        fitting = next((each for each in members if _is_list_for(each.kind, given)), None)
    if fitting is None:
        raise _refusal(label, tuple(each.kind for each in members), given)
    if get_origin(fitting.kind) is tuple:
        for number, (part, each) in enumerate(_parts(fitting.kind, given)):
            check_option(f"{label}[{number}]", part, each)
    for check in (*fitting.metadata, *checks):
        if callable(check):
            check(label, given)


def _refusal(label: str, allowed: tuple[Any, ...], given: Any) -> InvalidInput:
    others = [describe(each) for each in allowed if get_origin(each) is not Literal]
    choices = [choice for each in allowed if get_origin(each) is Literal for choice in get_args(each)]
    if choices and isinstance(given, str):
        error = unknown(label, given, choices)
        found = dict.fromkeys([*others, error.allowed])
        return InvalidInput(label, given, " or ".join(found))
    if isinstance(given, type) and any(isinstance(each, type) and issubclass(given, each) for each in allowed):
        usage = given.usage() if hasattr(given, "usage") else f"{given.__name__}(…)"
        return InvalidInput(label, given, f"an object such as {usage}, not the class {given.__name__}")
    return InvalidInput(label, given, " or ".join(dict.fromkeys(map(describe, allowed))))


def _fits(annotation: Any, given: Any) -> bool:
    """Return True if a value has the type of an annotation; annotations of an unknown kind fit all values."""
    kind = split(annotation).kind
    if len(members_of(kind)) > 1:
        return any(_fits(each, given) for each in members_of(kind))
    if kind is None or kind is type(None):
        return given is None
    if kind is float or _is_scalar_array(kind):
        return is_jax_number(given) or (is_number(given) and bool(np.isfinite(given)))
    if kind is int:
        return isinstance(given, int | np.integer) and not isinstance(given, bool)
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(given) is type(choice) and given == choice for choice in get_args(kind))
    if origin is tuple:
        return _is_list_for(kind, given) and all(_fits(part, each) for part, each in _parts(kind, given))
    if is_callable(kind) or kind is Callable:
        return callable(given) and not isinstance(given, type)
    kind = origin if isinstance(origin, type) else kind
    return _is_instance(given, kind) if isinstance(kind, type) else True


def _is_list_for(kind: Any, given: Any) -> bool:
    """Return True if the annotation is a tuple type and the value a list or tuple of this length."""
    if get_origin(kind) is not tuple or not isinstance(given, tuple | list):
        return False
    return len(_elements(kind, given)) == len(given)


def _elements(kind: Any, given: Any) -> tuple[Any, ...]:
    """Return the annotations of the elements of the tuple `given`, whose annotation is `kind`."""
    parts = get_args(kind)
    return (parts[0],) * len(given) if len(parts) == 2 and parts[1] is Ellipsis else parts


def _parts(kind: Any, given: Any) -> Iterator[tuple[Any, Any]]:
    """Return the elements of a list or tuple as pairs (annotation, element)."""
    return zip(_elements(kind, given), given, strict=True)


def _is_instance(given: Any, kind: type) -> bool:
    try:
        return isinstance(given, kind)
    except TypeError:  # a protocol that cannot be checked at run time
        return True


def _is_scalar_array(annotation: Any) -> bool:
    # The test reads attributes, because importing JAX in this module would slow down the command line.
    kind = getattr(annotation, "array_type", None)
    return getattr(annotation, "dim_str", None) == "" and getattr(kind, "__module__", "").startswith("jax")


def describe(annotation: Any) -> str:
    """Return a description of an annotation in words, for error messages, such as `a whole number`."""
    kind = split(annotation).kind
    known = {None: "None", type(None): "None", int: "a whole number", bool: "true or false", str: "a text"}
    known |= {tuple: "a tuple", list: "a list", dict: "a table"}
    if kind in known:
        return known[kind]
    if len(members_of(kind)) > 1:
        return " or ".join(dict.fromkeys(map(describe, members_of(kind))))
    if kind is float or _is_scalar_array(kind):
        return "a finite number"
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        each = [describe(part) for part in get_args(kind) if part is not Ellipsis]
        return f"({', '.join(each)})" if Ellipsis not in get_args(kind) else f"a tuple, each {each[0]}"
    if get_origin(kind) in (dict, Mapping):
        return "a table"
    if isinstance(kind, type) and get_origin(kind) is None:
        return _describe_class(kind)
    return "a function" if is_callable(kind) else str(kind)


def _describe_class(kind: type) -> str:
    if hasattr(kind, "usage"):
        return f"an object such as {kind.usage()}"
    library = kind.__module__.partition(".")[0]
    return f"an object of {kind.__name__}" + ("" if library == "hyperpush" else f" of {library}")
