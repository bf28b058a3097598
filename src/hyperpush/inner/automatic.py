"""Choose the inner solver from data, privacy, trust and engine."""

from typing import Any, ClassVar

import equinox as eqx

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.schedules import StepSize
from hyperpush.inner.base import InnerSolver
from hyperpush.inner.sgp import SGP
from hyperpush.inner.tracked_sgp import TrackedSGP
from hyperpush.inner.tree_newton import TreeNewton
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Node
from hyperpush.solving.choice import situation
from hyperpush.task.problem import Problem

ROUNDS = 1000  # rounds of `TrackedSGP` if clients cannot vote on ending


class AutomaticInner(InnerSolver):
    """Choice of the inner solver from data, privacy, trust and engine. The status names the choice and the reason.

    | where | chosen solver |
    |---|---|
    | all examples, members that trust each other | `TreeNewton`; it resends messages that get lost |
    | random links that are seldom up, such as those of `KOut` | `TrackedSGP`, where waiting in a tree would take more |
    | members that distrust each other (`trust=False`) | `TrackedSGP`: members do not forward each other's sums |
    | asynchronous peers, peers that lose messages | `TrackedSGP` with 1,000 rounds: no waiting for a tree or a vote |
    | mini-batches, private tasks | `SGP`, which stops near the solution: it needs a `step_size` |

    `hp.Automatic` follows the same rule. **Use it** unless you compare solvers. Nested algorithms use it by default.

    Args:
        batch_size: Training examples per mini-batch; None uses all.
        tolerance: The largest accepted distance to the solution, relative to it, above 0; None takes the solver's
            default. Leave it None with mini-batches and on private tasks: `SGP` does not measure the distance.
        trust: True if members trust each other with their vectors. In a tree, a member that forwards sees its
            children's vectors and can falsify a sum.
        steps: Steps of `SGP`, 0 or more; other solvers ignore it.
        step_size: Step size of `SGP`: a number, or `hp.schedule(…)`, which ends closer to the solution. Take one below
            2 / λ_max of the Hessians. Other solvers ignore it.

    Raises:
        InvalidInput: An option is out of range, or `SGP` has no `step_size`.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> found = hp.train(task, hp.AutomaticInner(), network, key=0)
        >>> print(found.status, found.status.chosen, sep="; ")
        converged (tolerance); TreeNewton: all examples, members that trust each other
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="inner",
        sends="the messages of the chosen solver",
        paper="here",
        private=True,
        lossy=True,
    )

    batch_size: int | None = eqx.field(static=True, default=None)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)
    trust: bool = eqx.field(static=True, default=True)
    steps: int = eqx.field(static=True, default=1000)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)

    def __check_init__(self):
        check_integer("AutomaticInner.batch_size", self.batch_size, minimum=1, optional=True)
        check_positive("AutomaticInner.tolerance", self.tolerance, optional=True)
        check_integer("AutomaticInner.steps", self.steps, minimum=0)
        if not callable(self.step_size):
            check_positive("AutomaticInner.step_size", self.step_size, optional=True)
        if self.batch_size is not None and self.tolerance is not None:
            allowed = "None with mini-batches, whose distance to the solution is not measured"
            raise InvalidInput("AutomaticInner.tolerance", self.tolerance, allowed)

    @property
    def solves(self) -> bool:
        return self.batch_size is None

    @property
    def loop(self) -> str:
        return self._choose(False)[0].loop

    def bind(self, network: Any, engine: Any = None, task: Any = None) -> InnerSolver:
        private = task is not None and task.privacy is not None
        return self._choose(private, engine, network, task)[0].bind(network, engine, task)

    def choice(self, engine: Any, task: Any, network: Any = None) -> str:
        solver, why = self._choose(task.privacy is not None, engine, network, task)
        return f"{type(solver).__name__}: {why}"

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        self._choose(task.privacy is not None)[0].check(task, network)

    def program(self, problem: Problem) -> Node:
        return self._choose(problem.private)[0].program(problem)

    def _choose(
        self, private: bool, engine: Any = None, network: Any = None, task: Any = None
    ) -> tuple[InnerSolver, str]:
        """Return the chosen solver and the reason; `private` is True for private tasks."""
        kind, why, votes = situation(private, self.batch_size, self.trust, engine, network, task)
        if kind == "tree":
            return TreeNewton(tolerance=self.tolerance), why
        if kind == "no tree":
            rounds = TrackedSGP.__dataclass_fields__["rounds"].default if votes else ROUNDS
            return TrackedSGP(rounds, self.tolerance), why
        if self.step_size is None:
            where = "on a private task" if private else "with mini-batches"
            allowed = f"a number above 0 or hp.schedule(…) for SGP, which it takes {where}"
            raise InvalidInput("AutomaticInner.step_size", None, allowed)
        return SGP(self.steps, self.step_size, batch_size=self.batch_size), why
