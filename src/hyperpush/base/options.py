"""Frozen modules whose fields are options, checked against their annotations before one is made."""

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import equinox as eqx
import numpy as np
from jaxtyping import Array

from hyperpush.base.checks import check_arguments, is_jax_number, is_number
from hyperpush.base.errors import InvalidInput, unknown

C = TypeVar("C", bound="Configured")


class Configured(eqx.Module):
    """A frozen module whose fields are options, checked against their annotations before it is made."""

    sample: ClassVar[str] = ""  # how to make one of an abstract kind, for errors

    def __new__(cls, *args: Any, **options: Any):
        # Not in __check_init__: type checkers that wrap __init__ would answer first, in words of their own.
        check_arguments(cls.label(), _signature(cls), args, options)
        for name, given in _signature(cls).bind_partial(*args, **options).arguments.items():
            if name in _annotations(cls):
                check_option(f"{cls.label()}.{name}", _annotations(cls)[name], given)
            for check in _range_checks(cls).get(name, ()):
                check(f"{cls.label()}.{name}", given)
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles: `__new__` would ask for the options, which are set again below.
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return _restore, (type(self), fields)

    @classmethod
    def label(cls) -> str:
        """What errors call it: the part before the option's name."""
        return cls.__name__

    @classmethod
    def usage(cls) -> str:
        """How to make one, for errors: `HGP(steps=…, pushes=…, step_size=…)`."""
        if cls.sample and inspect.isabstract(cls):
            return cls.sample
        needed = [each.name for each in dataclasses.fields(cls) if each.init and _has_no_default(each)]
        return f"{cls.__name__}({', '.join(f'{name}=…' for name in needed)})"

    def options(self) -> dict[str, Any]:
        """Its options by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init}

    def with_options(self: C, **changes: Any) -> C:
        """The same with other options."""
        return dataclasses.replace(self, **changes)


def _restore(cls: type[C], fields: Mapping[str, Any]) -> C:
    """An object with these fields, which another one of its class has passed the checks with."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def check_option(label: str, annotation: Any, given: Any) -> None:
    """Refuse what an option's annotation does not allow, and say what would be right."""
    allowed = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if any(_fits(each, given) for each in allowed):
        return
    choices = [choice for each in allowed if get_origin(each) is Literal for choice in get_args(each)]
    if choices and isinstance(given, str):
        raise unknown(label, given, choices)
    described = " or ".join(dict.fromkeys(map(_describe, allowed)))
    if isinstance(given, type):
        objects = [each for each in allowed if isinstance(each, type) and issubclass(given, each)]
        usage = given.usage() if issubclass(given, Configured) else f"{given.__name__}(…)"
        if objects:
            raise InvalidInput(label, given, f"an object such as {usage}, not the class {given.__name__}")
    raise InvalidInput(label, given, described)


def _fits(annotation: Any, given: Any) -> bool:
    """Whether `given` is what an annotation, not a union, asks for; annotations that are not known fit all."""
    if annotation is None or annotation is type(None):
        return given is None
    if annotation is float or _is_scalar_array(annotation):
        return is_jax_number(given) or (is_number(given) and bool(np.isfinite(given)))
    if annotation is int:
        return isinstance(given, int | np.integer) and not isinstance(given, bool)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(type(given) is type(choice) and given == choice for choice in parts)
    if origin is tuple:
        return _fits_tuple(parts, given)
    if origin is not None and isinstance(origin, type):
        annotation = origin
    if annotation is Callable or annotation is get_origin(Callable[..., Any]):
        return callable(given) and not isinstance(given, type)
    return _is_instance(given, annotation) if isinstance(annotation, type) else True


def _fits_tuple(parts: tuple[Any, ...], given: Any) -> bool:
    if not isinstance(given, tuple | list):
        return False
    if len(parts) == 2 and parts[1] is Ellipsis:
        parts = (parts[0],) * len(given)
    return len(parts) == len(given) and all(map(_fits, parts, given))


def _is_instance(given: Any, kind: type) -> bool:
    try:
        return isinstance(given, kind)
    except TypeError:  # a protocol that is not for checking at run time
        return True


def _is_scalar_array(annotation: Any) -> bool:
    return getattr(annotation, "dim_str", None) == "" and getattr(annotation, "array_type", None) is Array


def _describe(annotation: Any) -> str:
    """What an annotation, not a union, asks for, in words."""
    known = {None: "None", type(None): "None", int: "a whole number", bool: "true or false", str: "a text"}
    known |= {tuple: "a tuple", list: "a list"}
    if annotation in known:
        return known[annotation]
    if annotation is float or _is_scalar_array(annotation):
        return "a finite number"
    if get_origin(annotation) is Literal:
        return ", ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) is tuple:
        each = [_describe(part) for part in get_args(annotation) if part is not Ellipsis]
        return f"({', '.join(each)})" if Ellipsis not in get_args(annotation) else f"a tuple, each {each[0]}"
    if isinstance(annotation, type) and issubclass(annotation, Configured):
        return f"an object such as {annotation.usage()}"
    if isinstance(annotation, type) and get_origin(annotation) is None:
        library = annotation.__module__.partition(".")[0]
        return f"an object of {annotation.__name__}" + ("" if library == "hyperpush" else f" of {library}")
    return "a function" if get_origin(annotation) is get_origin(Callable[..., Any]) else str(annotation)


@cache
def _annotations(cls: type) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(cls)}
    return {name: hint for name, hint in get_type_hints(cls).items() if name in names}


@cache
def _range_checks(cls: type) -> dict[str, list[Callable[[str, Any], Any]]]:
    """The checks that annotations name, as those of `hyperpush.base.ranges` do."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: [each for each in getattr(hint, "__metadata__", ()) if callable(each)] for name, hint in hints.items()
    }


@cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls)


def _has_no_default(each: dataclasses.Field) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
