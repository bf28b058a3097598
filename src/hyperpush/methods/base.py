"""What inner solvers, hypergradient estimators and algorithms have in common: options that are checked, and `info`.

A method is a frozen module whose fields are its options. What shapes its program (lengths, names, switches) is static:
a new value compiles anew. Numbers are leaves. They are Python floats in the method, so that it can be compared, hashed
and written to TOML. Engines trace them, so that a new number compiles nothing.
"""

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

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

    def bind(self: M, network: Any, engine: Any = None, task: Any = None) -> M:
        """The method as it runs on a network and for a task; an `engine` of None loses no messages."""
        return self

    def choice(self, engine: Any, task: Any, network: Any = None) -> str:
        """Return the method that it takes by itself, and the reason; empty if there is nothing to choose."""
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
        from hyperpush.methods.registry import construct  # it imports every method

        return construct(cls, dict(cls.info.example), cls.__name__)
