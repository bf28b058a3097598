"""Base class of engines. An engine is a frozen module with options as fields and one method, which runs a program."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.faults import Faults
from hyperpush.engines.hooks import Hook
from hyperpush.engines.result import Progress, Record, Recorder, RunResult, recorders_of
from hyperpush.networks import Network
from hyperpush.programs import Node, ProgramRecipe, as_recipe


class Request(NamedTuple):
    """The arguments of one call of `Engine.run`, in the form that `Engine.execute` takes."""

    recipe: ProgramRecipe
    network: Network
    states: PyTree
    data: PyTree
    key: PRNGKeyArray
    faults: Faults | None
    step: int = 0
    recorders: Mapping[str, Recorder] = {}
    every: int = 1
    hooks: tuple[Hook, ...] = ()

    @property
    def progress(self) -> Progress | None:
        """Function that reports the progress of a loop to all hooks; None without hooks."""

        def tell(loop: str, done: int, total: int) -> None:
            for hook in self.hooks:
                hook.advance(loop, done, total)

        return tell if self.hooks else None


class Engine(eqx.Module):
    """Abstract base of engines, which run a program for every client of a network.

    Every engine draws the same random numbers from the same key. A new engine defines `execute`.
    """

    hosts_one: ClassVar[bool] = False  # True: one client, so states, data and results lack a client axis

    @property
    def lossy(self) -> Faults | None:
        """Faults of the links; None if they are reliable."""
        return getattr(self, "faults", None)

    @property
    def no_tree(self) -> str:
        """Name, for error messages, of this engine's clients if they cannot average along a tree; else empty."""
        return ""

    def without_faults(self) -> "Engine":
        """Return the same engine with reliable links."""
        return self if self.lossy is None else replace(self, faults=None)

    def check_task(self, task: Any) -> None:
        """Raise InvalidInput for a task that this engine cannot run. The default accepts every task."""

    def run(
        self,
        program: Node | ProgramRecipe,
        network: Network,
        states: PyTree,
        data: PyTree,
        key: PRNGKeyArray,
        *,
        step: int = 0,
        record: Mapping[str, Record] | None = None,
        every: int = 1,
        hooks: Sequence[Hook] = (),
    ) -> RunResult:
        """Run a program for all clients.

        A `ProgramRecipe` is built inside the compiled function, so a new number in its parts needs no compilation.
        A program given as a finished `Node` is compiled anew whenever it changes.

        Args:
            program: The program of one client.
            network: The links between clients, and the number of clients.
            states: Every client's initial state, clients on axis 0.
            data: Every client's private data, clients on axis 0.
            key: Random key, from which all draws of the program, the network and the faults follow.
            step: Network time at the start; to continue a run, give its `RunResult.step`.
            record: Values to record in loops, by the loop's name: a `Recorder`, or a function of one client's state
                and context. None records nothing.
            every: Number of iterations between recorded rows, 1 or more.
            hooks: Observers, called between chunks.
        """
        given = (as_recipe(program), network, states, data, key, self.lossy)
        engine = ambient().engine or self
        return engine.execute(Request(*given, step, recorders_of(record), every, tuple(hooks)))

    @abc.abstractmethod
    def execute(self, request: Request) -> RunResult:
        """Run the program of a request for all clients. `run` calls this method."""

    def check_faults(self, faults: object) -> None:
        """Raise InvalidInput unless `faults` is `Faults` or None."""
        if not isinstance(faults, Faults | None):
            raise InvalidInput(f"{type(self).__name__}.faults", faults, "hp.Faults(…), or None for reliable links")

    def check_batch(self, clients: object) -> None:
        """Raise InvalidInput unless `clients` is an integer of 1 or more, or None."""
        if clients is not None:
            check_integer(f"{type(self).__name__}.clients_per_batch", clients, minimum=1)

    def check_deadline(self, seconds: object) -> None:
        """Raise InvalidInput unless `seconds` is positive."""
        check_positive(f"{type(self).__name__}.deadline", seconds)


class Ambient(NamedTuple):
    """Engine and hooks that apply to all engine calls inside a `with surround(…)` block.

    The command line needs them, because it starts user code that calls verbs itself. All other code passes engines
    and hooks as arguments.
    """

    engine: Engine | None = None  # runs requests in place of the compiled engine that is called
    hooks: tuple[Hook, ...] = ()  # hooks of every run of a compiled engine


_NOTHING = Ambient()
_ambient: ContextVar[Ambient] = ContextVar("ambient", default=_NOTHING)


def ambient() -> Ambient:
    """Return the engine and hooks set by the innermost enclosing `surround` block."""
    return _ambient.get()


@contextmanager
def surround(engine: Engine | None = None, hooks: Sequence[Hook] = ()) -> Iterator[None]:
    """Apply `engine` and `hooks` to engine calls in the block, instead of those set by enclosing blocks."""
    before = _ambient.set(Ambient(engine, tuple(hooks)))
    try:
        yield
    finally:
        _ambient.reset(before)
