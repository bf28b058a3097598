"""Base class of inner solvers, hypergradient estimators and algorithms: checked options, and `info`.

A method is a frozen module whose fields are its options. Options that shape its program (numbers of steps, names,
switches) are static: a new value compiles a new program. Other numbers are leaves. They are Python floats in the
method, so that methods can be compared, hashed and written to TOML. Engines trace these numbers, so a new number needs
no compilation.
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
    """Facts about a method that help to choose one; `hyperpush list --methods` prints them.

    Args:
        network: Requirements on the network. `"any"`: any directed links. `"two-way"`: each link can carry messages in
            both directions. `"undirected"`: each link carries messages in both directions in the same round.
            `"server"`: a server or an exact average. `"none"`: no links at all.
        target: The cost that the method minimizes or differentiates. `"global"`: the mean outer cost. `"client"`: each
            client's outer cost at the common inner solution. `"local"`: each client's outer cost at its own inner
            solution. `"direct"`: each client's outer cost at fixed params. `"inner"`: the inner cost.
        sends: The messages that each client sends.
        paper: The publication that the method comes from.
        note: Departure from the target, or further requirements on the network; empty if there is nothing to add.
        matrices: True if the method forms or sends Jacobians or Hessians.
        fixed_point: End point of a bilevel algorithm with outer consensus (see `hyperpush.algorithms.base`); empty for
            other methods.
        private: True if the method has a form with differential privacy.
        stable: True if the method's options are not expected to change.
        lossy: True if the method tolerates lost messages.
        joint: True if the method takes an outer cost of all clients together.
        example: Options with which the method is cheap to try.

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
    """Descriptor for `info` of a class whose facts depend on options.

    Reading it from the class gives the usual facts; reading it from an object gives the facts for the object's options.
    """

    def __init__(self, usual: MethodInfo, own: Callable[[Any, MethodInfo], MethodInfo]):
        self.usual, self.own = usual, own

    def __get__(self, made: Any, cls: type) -> MethodInfo:
        return self.usual if made is None else self.own(made, self.usual)


def info_by_options(usual: MethodInfo, own: Callable[[Any, MethodInfo], MethodInfo]) -> MethodInfo:
    """Return an `info` for a class of methods whose facts depend on the options of an object.

    Args:
        usual: The facts of the class, for lists, and for errors that are raised before an object exists.
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
    """Base class of inner solvers, hypergradient estimators and algorithms.

    A subclass defines `info`, fields for its options, a `__check_init__` that checks their ranges, and `program`. The
    base class checks types, choices and nested objects by the fields' annotations.

    Verbs read `info`, `trains`, `judges`, `loop` and `caveat`. They read options whose names have a fixed meaning, such
    as `batch_size`, with `option`. They call the methods `program`, `parts`, `bind`, `choice`, `check` and `status`.

    Example:
        >>> import hyperpush as hp
        >>> method = hp.SGP(steps=10, step_size=0.1)
        >>> method.with_options(steps=20) == hp.SGP(steps=20, step_size=0.1)
        True
    """

    info: ClassVar[MethodInfo]
    trains: ClassVar[bool] = False  # True for an estimator that also trains the params, from the given ones
    judges: ClassVar[bool] = False  # True if the method's report measures how far params are from an inner solution

    @property
    def loop(self) -> str:
        """Name of the main loop, whose states have the fields `params` and `hyper`."""
        return type(self).__name__

    @property
    def caveat(self) -> str:
        """Reason, shown in the status, why the params stay off the exact solution; empty without such a bias."""
        return ""

    @abc.abstractmethod
    def program(self, problem: Problem) -> Node:
        """Return the program that each client runs on its state, such as `InnerState` for inner solvers."""

    def parts(self) -> Iterator["Method"]:
        """Yield the methods that this method contains, such as the inner solver of an algorithm."""
        yield from ()

    def bind(self: M, network: Any, engine: Any = None, task: Any = None) -> M:
        """Return the method with settings for this network, engine and task.

        With `engine=None`, no message is assumed to be lost.
        """
        return self

    def choice(self, engine: Any, task: Any, network: Any = None) -> str:
        """Return a text with the method that an automatic method chooses, and the reason; empty for other methods."""
        return ""

    def check(self, task: Any, network: Any = None) -> None:
        """Raise InvalidInput if the method cannot work on a task or a network.

        Verbs have checked before that the network fits `info.network`. With `network=None`, only the task is checked.
        """
        if task.joint and not self.info.joint and self.info.target != "inner":
            given = f"{type(task.outer).__name__}, a cost of all clients together"
            allowed = f"a cost of each client's own for {type(self).__name__}; hp.big_fed.BiGFed takes joint costs"
            raise InvalidInput("task.outer", given, allowed)

    def status(self, states: Any) -> Status:
        """Return the status of the result, computed from the final states of all clients."""
        return Status()

    @classmethod
    def usage(cls) -> str:
        info = getattr(cls, "info", None)  # a user's class may lack `info`
        named = ", ".join(f"{name}=…" for name in info.example) if info is not None else ""
        return f"{cls.__name__}({named})" if named else super().usage()

    @classmethod
    def example(cls: type[M]) -> M:
        """Return an instance with valid options that is cheap to run."""
        from hyperpush.methods.registry import construct  # the registry imports every method

        return construct(cls, dict(cls.info.example), cls.__name__)
