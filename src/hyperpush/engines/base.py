"""What every engine is: a frozen module whose fields are its options, and one method that runs a program."""

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
from hyperpush.engines.result import Progress, Record, Recorder, RunResult, recorders_of
from hyperpush.engines.run_hooks import RunHook
from hyperpush.networks import Network
from hyperpush.programs import Node, ProgramRecipe, as_recipe


class Request(NamedTuple):
    """A call of `Engine.run`."""

    recipe: ProgramRecipe
    network: Network
    states: PyTree
    data: PyTree
    key: PRNGKeyArray
    faults: Faults | None
    step: int = 0
    recorders: Mapping[str, Recorder] = {}
    every: int = 1
    progress: Progress | None = None


class Engine(eqx.Module):
    """Hosts clients and interprets programs. Every engine draws the same random numbers from the same key.

    A new one defines `execute`.
    """

    hosts_one: ClassVar[bool] = False  # whether it hosts one client: then states, data and results have no client axis

    @property
    def lossy(self) -> Faults | None:
        """What its links do to messages; None: nothing."""
        return getattr(self, "faults", None)

    @property
    def no_tree(self) -> str:
        """Where clients cannot average along a tree: what they are, to say why. Empty where they can."""
        return ""

    def without_faults(self) -> "Engine":
        """The same engine on links that lose nothing."""
        return self if self.lossy is None else replace(self, faults=None)

    def check_task(self, task: Any) -> None:
        """Refuse a task that this engine cannot host; those that host all clients take any that is not one party's."""

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
        progress: Progress | None = None,
    ) -> RunResult:
        """Run a program for all clients.

        A `ProgramRecipe` is built inside what is compiled, so that a new number in its parts compiles nothing.
        A finished program is compiled for every one that is made.

        Args:
            program: What one client does.
            network: Who hears whom. It also says how many clients there are.
            states: What every client starts from, clients on axis 0.
            data: Every client's private data, clients on axis 0.
            key: Decides every draw: the program's, the network's and the faults'.
            step: Network time at the start; `RunResult.step` of the run before continues it.
            record: By name of a loop, a `Recorder` or a function of one client's state and context.
            every: Rows are recorded after every so many iterations.
            progress: Called between chunks with a loop's name, the iterations done and those at most.
        """
        given = (as_recipe(program), network, states, data, key, self.lossy)
        engine = ambient().engine or self
        return engine.execute(Request(*given, step, recorders_of(record), every, progress))

    @abc.abstractmethod
    def execute(self, request: Request) -> RunResult:
        """What `run` does."""

    def check_faults(self, faults: object) -> None:
        """Refuse what is not `Faults`."""
        if not isinstance(faults, Faults | None):
            raise InvalidInput(f"{type(self).__name__}.faults", faults, "hp.Faults(…), or None for reliable links")

    def check_batch(self, clients: object) -> None:
        """Refuse what is not a number of clients."""
        if clients is not None:
            check_integer(f"{type(self).__name__}.clients_per_batch", clients, minimum=1)

    def check_deadline(self, seconds: object) -> None:
        """Refuse what is not a duration."""
        check_positive(f"{type(self).__name__}.deadline", seconds)


class Ambient(NamedTuple):
    """What surrounds calls of engines without being passed on.

    It is for code that starts runs inside of which others call verbs, such as the command line. Everything else passes
    engines and hooks as arguments.
    """

    engine: Engine | None = None  # answers in place of the compiled engine that is called
    hooks: tuple[RunHook, ...] = ()  # of every run of a compiled engine


_NOTHING = Ambient()
_ambient: ContextVar[Ambient] = ContextVar("ambient", default=_NOTHING)


def ambient() -> Ambient:
    """What surrounds the caller."""
    return _ambient.get()


@contextmanager
def surround(engine: Engine | None = None, hooks: Sequence[RunHook] = ()) -> Iterator[None]:
    """Surround the block with this, and with nothing else."""
    before = _ambient.set(Ambient(engine, tuple(hooks)))
    try:
        yield
    finally:
        _ambient.reset(before)
