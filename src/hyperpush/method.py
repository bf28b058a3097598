"""What inner solvers, hypergradient estimators and algorithms have in common: options that are checked, and `info`.

A method is a frozen module whose fields are its options. What shapes its program (lengths, names, switches) is static:
a new value compiles anew. Numbers are leaves. They are Python floats in the method, so that it can be compared, hashed
and written to TOML. Engines trace them, so that a new number compiles nothing.
"""

import abc
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from hyperpush.checks import check_arguments, is_jax_number, is_number
from hyperpush.errors import InvalidInput, unknown
from hyperpush.problem import Problem
from hyperpush.programs import Node
from hyperpush.status import Status

Number = float | Float[Array, ""]  # a Python float in the method; traced where an engine compiles it
NetworkKind = Literal["any", "two-way", "undirected", "server", "none"]
C = TypeVar("C", bound="Configured")
M = TypeVar("M", bound="Method")
Target = Literal["global", "client", "local", "direct", "inner"]


@dataclass(frozen=True)
class MethodInfo:
    """What a user should know before choosing a method; printed by `hyperpush list --methods`.

    Args:
        network: What its links must be able to do: nothing special (`"any"`), carry messages both ways (`"two-way"`),
            both ways at once (`"undirected"`), reach a server or an exact average (`"server"`), nothing (`"none"`).
        target: What it works on: everybody's mean outer cost (`"global"`), the client's own outer cost at the inner
            solution that all share (`"client"`) or at its own (`"local"`), with fixed params (`"direct"`), or the inner
            cost (`"inner"`).
        sends: What each client sends.
        paper: Where it comes from.
        note: How it departs from its target, or what else its network must do; empty if there is nothing to add.
        matrices: Whether it forms or sends Jacobians or Hessians.
        fixed_point: Where a bilevel algorithm with outer consensus ends (see `hyperpush.algorithms.base`).
        private: Whether it has a form with differential privacy.
        stable: Whether its options are settled.
        lossy: Whether it tolerates lost messages.
        joint: Whether it takes an outer cost of all clients together.
        example: Options with which it is cheap to try.

    Example:
        >>> import hyperpush as hp
        >>> hp.HGP.info.network, hp.HGP.info.target
        ('any', 'global')
    """

    network: NetworkKind
    target: Target
    sends: str
    paper: str
    note: str = ""
    matrices: bool = False
    fixed_point: Literal["", "x_G", "x_L", "x_M"] = ""
    private: bool = False
    stable: bool = True
    lossy: bool = False
    joint: bool = False
    example: Mapping[str, Any] = field(default_factory=dict, hash=False)


def as_number(given: Any) -> Any:
    """The converter of fields that are numbers: whole ones become floats; what is traced, or no number, stays."""
    return float(given) if is_number(given) else given


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


class Method(Configured):
    """An inner solver, a hypergradient estimator or an algorithm.

    A subclass has `info`, fields, a `__check_init__` that checks their ranges, and `program`. Types, choices and
    nested objects are checked here, by the annotations.

    Example:
        >>> import hyperpush as hp
        >>> method = hp.SGP(steps=10, step_size=0.1)
        >>> method.with_options(steps=20) == hp.SGP(steps=20, step_size=0.1)
        True
    """

    info: ClassVar[MethodInfo]

    @abc.abstractmethod
    def program(self, problem: Problem) -> Node:
        """What one client does: a program on the states of this kind of method."""

    def parts(self) -> Iterator["Method"]:
        """The methods that it is made of."""
        yield from ()

    def on(self: M, network: Any, engine: Any = None, task: Any = None) -> M:
        """The method as it runs on a network and for a task; an `engine` of None loses no messages."""
        return self

    def choice(self, engine: Any, task: Any) -> str:
        """Which estimator it takes by itself, and why; empty if there is nothing to choose."""
        return ""

    def check_task(self, task: Any) -> None:
        """Refuse a task that it cannot work on; what all refuse is checked before."""
        if task.joint and not self.info.joint and self.info.target != "inner":
            given = f"{type(task.outer).__name__}, a cost of all clients together"
            allowed = f"a cost of each client's own for {type(self).__name__}; hp.big_fed.BiGFed takes joint costs"
            raise InvalidInput("task.outer", given, allowed)

    def check_network(self, network: Any, task: Any) -> None:
        """Refuse a network that it cannot use for a task, beyond what `info.network` says."""

    def status(self, states: Any) -> Status:
        """Whether the result that all clients ended with is to be believed."""
        return Status()

    @classmethod
    def usage(cls) -> str:
        info = getattr(cls, "info", None)
        named = ", ".join(f"{name}=…" for name in info.example) if info is not None else ""
        return f"{cls.__name__}({named})" if named else super().usage()

    @classmethod
    def example(cls: type[M]) -> M:
        """A cheap one with valid options."""
        from hyperpush.registry import construct  # it imports every method

        return construct(cls, dict(cls.info.example), cls.__name__)


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
    """The checks that annotations name, as those of `hyperpush.checks.ranges` do."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: [each for each in getattr(hint, "__metadata__", ()) if callable(each)] for name, hint in hints.items()
    }


@cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls)


def _has_no_default(each: dataclasses.Field) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
