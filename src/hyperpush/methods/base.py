"""Base of inner solvers, hypergradient estimators and algorithms: checked options, and `info`.

A method is a frozen module whose fields are its options. Options that shape its program (lengths, names, switches) are
static: a new value compiles anew. Numbers are leaves. They are Python floats in the method, so that it can be compared,
hashed and written to TOML. Engines trace them, so a new number does not compile anew.
"""

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, cast

from hyperpush.base.errors import InvalidInput
from hyperpush.base.options import Configured
from hyperpush.base.status import Status
from hyperpush.programs import Node
from hyperpush.task.problem import Problem

NetworkKind = Literal["any", "two-way", "undirected", "server", "none"]
M = TypeVar("M", bound="Method")
Target = Literal["global", "client", "local", "direct", "inner"]


@dataclass(frozen=True)
class MethodInfo:
    """Facts for choosing a method; printed by `hyperpush list --methods`.

    Args:
        network: Demands on its links: none (`"any"`), messages both ways (`"two-way"`) or both ways at once
            (`"undirected"`), a server or an exact average (`"server"`), or no links at all (`"none"`).
        target: The cost that it lowers. `"global"`: the mean outer cost. `"client"`: each client's outer cost at the
            common inner solution; `"local"`: at its own inner solution; `"direct"`: at fixed params. `"inner"`: the
            inner cost.
        sends: Messages of each client.
        paper: Source of the method.
        note: Departure from its target, or further demands on its network; empty if there is nothing to add.
        matrices: True if it forms or sends Jacobians or Hessians.
        fixed_point: End point of a bilevel algorithm with outer consensus (see `hyperpush.algorithms.base`).
        private: True if it has a form with differential privacy.
        stable: True if its options are settled.
        lossy: True if it tolerates lost messages.
        joint: True if it takes an outer cost of all clients together.
        example: Options that make it cheap to try.

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


class _InfoByOptions:
    """`info` of a class whose facts depend on its options: the usual facts of the class, its own of each object."""

    def __init__(self, usual: MethodInfo, own: Callable[[Any, MethodInfo], MethodInfo]):
        self.usual, self.own = usual, own

    def __get__(self, made: Any, cls: type) -> MethodInfo:
        return self.usual if made is None else self.own(made, self.usual)


def info_by_options(usual: MethodInfo, own: Callable[[Any, MethodInfo], MethodInfo]) -> MethodInfo:
    """Return an `info` that depends on options.

    Args:
        usual: The facts of the class, for lists and errors before there is an object.
        own: A function of (object, usual facts) that returns the facts of the object.

    Example:
        >>> from dataclasses import replace
        >>> import hyperpush as hp
        >>> class Mine(hp.SGP):
        ...     info = hp.extend.info_by_options(
        ...         hp.SGP.info, lambda self, usual: replace(usual, lossy=usual.lossy and self.steps > 1)
        ...     )
        >>> Mine.info.lossy, Mine(1, 0.1).info.lossy
        (True, False)
    """
    return cast(MethodInfo, _InfoByOptions(usual, own))  # reading it gives a MethodInfo


class Method(Configured):
    """An inner solver, a hypergradient estimator or an algorithm.

    A subclass has `info`, fields, a `__check_init__` that checks their ranges, and `program`. The base class checks
    types, choices and nested objects by the annotations.

    Verbs read `info`, the facts below, the options of a fixed meaning (`option`), and the six hooks: `program`,
    `parts`, `bind`, `choice`, `check` and `status`.

    Example:
        >>> import hyperpush as hp
        >>> method = hp.SGP(steps=10, step_size=0.1)
        >>> method.with_options(steps=20) == hp.SGP(steps=20, step_size=0.1)
        True
    """

    info: ClassVar[MethodInfo]
    trains: ClassVar[bool] = False  # True if it trains itself from the given params
    judges: ClassVar[bool] = False  # True if its report measures how far params are from solved

    @property
    def loop(self) -> str:
        """Name of the main loop, whose states have the fields `params` and `hyper`."""
        return type(self).__name__

    @property
    def caveat(self) -> str:
        """Reason for its status why its params are not quite the solution; empty if they may be."""
        return ""

    @abc.abstractmethod
    def program(self, problem: Problem) -> Node:
        """Return one client's program on the states of this kind of method."""

    def parts(self) -> Iterator["Method"]:
        """Yield the methods that it contains."""
        yield from ()

    def bind(self: M, network: Any, engine: Any = None, task: Any = None) -> M:
        """Return the method adapted to a network and a task; an `engine` of None loses no messages."""
        return self

    def choice(self, engine: Any, task: Any, network: Any = None) -> str:
        """Return the method that it chooses, and the reason; empty if there is nothing to choose."""
        return ""

    def check(self, task: Any, network: Any = None) -> None:
        """Refuse a task that the method cannot work on, and a network beyond the demands in `info.network`.

        Checks common to all methods come before. A `network` of None checks the task alone.
        """
        if task.joint and not self.info.joint and self.info.target != "inner":
            given = f"{type(task.outer).__name__}, a cost of all clients together"
            allowed = f"a cost of each client's own for {type(self).__name__}; hp.big_fed.BiGFed takes joint costs"
            raise InvalidInput("task.outer", given, allowed)

    def status(self, states: Any) -> Status:
        """Return the status of the result, from the final states of all clients."""
        return Status()

    @classmethod
    def usage(cls) -> str:
        info = getattr(cls, "info", None)  # a class of a user may lack it
        named = ", ".join(f"{name}=…" for name in info.example) if info is not None else ""
        return f"{cls.__name__}({named})" if named else super().usage()

    @classmethod
    def example(cls: type[M]) -> M:
        """Return a cheap instance with valid options."""
        from hyperpush.methods.registry import construct  # it imports every method

        return construct(cls, dict(cls.info.example), cls.__name__)
