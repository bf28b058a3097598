"""Choose the estimator from data, privacy, trust and engine."""

from typing import Any, ClassVar

import equinox as eqx

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.tracked import TrackedHGP
from hyperpush.hypergradients.tree_cg import TreeCG
from hyperpush.methods.base import MethodInfo
from hyperpush.networks.expected import LOSSY_STEPS
from hyperpush.programs import Node
from hyperpush.solving.choice import situation
from hyperpush.task.private_problem import Noise
from hyperpush.task.problem import Problem

PRIVATE_STEPS = 10  # few, because each step of a private run is a release
STEPS = LOSSY_STEPS  # number of steps if clients cannot vote on ending


class Automatic(HypergradientEstimator):
    """The best estimator for the data, privacy, trust and engine. The status names the choice and the reason.

    | situation | choice |
    |---|---|
    | all examples, members that trust each other | `TreeCG`; it resends lost messages |
    | random links that are seldom up, such as those of `KOut` | `TrackedHGP`, if waiting in a tree would take longer |
    | mini-batches | `TrackedHGP` with a step size found before |
    | a private task | `TrackedHGP` with ten steps of a size that the bound of curvature and the penalty allow |
    | members that distrust each other (`trust=False`) | `TrackedHGP`: no member forwards another's sum |
    | asynchronous peers | `TrackedHGP` with 200 steps, without waiting for a tree or a vote |

    **Use it** unless you compare estimators.

    Args:
        batch_size: Training examples per mini-batch; None uses all.
        tolerance: Largest accepted relative error of any client's result, above 0; None: the estimator's default.
        trust: True if members trust each other with their vectors. In a tree, a parent sees its children's vectors and
            can falsify a sum.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> hp.hypergradient(task, hp.Automatic(), network, key=0).status.chosen
        'TreeCG: all examples, members that trust each other'
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="what the chosen estimator sends",
        paper="here",
        private=True,
        lossy=True,
    )

    batch_size: int | None = eqx.field(static=True, default=None)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)
    trust: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        check_integer("Automatic.batch_size", self.batch_size, minimum=1, optional=True)
        check_positive("Automatic.tolerance", self.tolerance, optional=True)
        if self.batch_size is not None and self.tolerance is not None:
            raise InvalidInput(
                "Automatic.tolerance", self.tolerance, "None with mini-batches, whose error is not measured"
            )

    def bind(self, network: Any, engine: Any = None, task: Any = None) -> Any:
        noise = None if task is None else task.privacy
        return self._choose(noise, engine, network, task)[0].bind(network, engine, task)

    def choice(self, engine: Any, task: Any, network: Any = None) -> str:
        estimator, why = self._choose(task.privacy, engine, network, task)
        return f"{type(estimator).__name__}: {why}"

    def program(self, problem: Problem) -> Node:
        return self._choose(getattr(problem, "noise", None))[0].program(problem)

    def _choose(
        self, noise: Noise | None, engine: Any = None, network: Any = None, task: Any = None
    ) -> tuple[HypergradientEstimator, str]:
        """Return the chosen estimator and the reason; `noise` is the task's privacy noise, None without privacy."""
        kind, why, votes = situation(noise is not None, self.batch_size, self.trust, engine, network, task)
        if kind == "tree":
            return TreeCG(tolerance=self.tolerance), why
        if kind == "private":
            return TrackedHGP(PRIVATE_STEPS, batch_size=self.batch_size, tolerance=None), why
        tracked = TrackedHGP() if votes else TrackedHGP(STEPS)
        if kind == "mini-batches":
            return tracked.with_options(batch_size=self.batch_size), why
        return tracked.with_options(tolerance=tracked.tolerance if self.tolerance is None else self.tolerance), why
