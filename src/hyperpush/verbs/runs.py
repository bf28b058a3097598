"""Train several problems that share data and messages in one run: `hp.train` with `runs=`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base import panels
from hyperpush.base.errors import InvalidInput
from hyperpush.base.panels import Panel
from hyperpush.base.status import Status
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.programs import Node, Runs, stack
from hyperpush.task.task import Task
from hyperpush.verbs.call import Call
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.ending import judge_growth
from hyperpush.verbs.first_costs import check_first_costs
from hyperpush.verbs.results import Result


@dataclass(frozen=True, repr=False)
class Trainings(Result):
    """Result of `hp.train` with `runs=`: several trainings that shared every message.

    Attributes:
        params: The params of all runs, with runs on axis 0 and clients on axis 1.
        errors: Relative distance of each run's params from their solution; None if the distance is unknown.
        statuses: The status of each run. The field `status` covers all runs.
        hypers: The hypers of all runs, with runs on axis 0 and clients on axis 1.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
        >>> found = hp.train(task, hp.TreeNewton(), network, key=0, runs=[task.hypers, task.hypers + 1])
        >>> found.params.shape, [status.converged for status in found.statuses]
        ((2, 3, 4), [True, True])
    """

    params: PyTree
    errors: tuple[float | None, ...]
    statuses: tuple[Status, ...]
    hypers: PyTree

    def __len__(self) -> int:
        return len(self.statuses)

    def task_of(self, run: int) -> Task:
        """Return the task at the hypers and params of one run, for the next verb."""
        return self.task.at(params=_pick(self.params, run), hypers=_pick(self.hypers, run))

    def facts(self) -> list[str]:
        return [*super().facts(), f"{len(self)} runs"]

    def own_panels(self) -> list[Panel]:
        rows = [
            [run, error, str(each)] for run, (error, each) in enumerate(zip(self.errors, self.statuses, strict=True))
        ]
        return [panels.table("Runs", ("run", "relative error", "status"), rows)]


def check_alone(**options: Any) -> None:
    """Raise InvalidInput if an option is set that `runs=` does not support."""
    for name, given in options.items():
        if given is not None:
            raise InvalidInput(name, given, "None beside runs=, which supports neither a history nor seeds per run")


def check_params(method: InnerSolver, found: Any, wanted: Any) -> None:
    """Raise InvalidInput unless a solver returned params of the task's shape; verbs cannot judge other params."""
    got, allowed = (jax.tree.map(jnp.shape, tree) for tree in (found, wanted))
    if jax.tree.structure(found) != jax.tree.structure(wanted) or got != allowed:
        raise InvalidInput(
            "method",
            f"{type(method).__name__}, which returns params of shape {got}",
            f"a method that keeps the shape of the task's params, {allowed}",
        )


def train_runs(call: Call, runs: Sequence[Any], throw: bool, certify: bool | None = True) -> Trainings:
    """Train all runs from the task's params in one program.

    With `certify=None`, the statuses are those that the solver itself reports.
    """
    task = call.task
    hypers = stack_hypers(task, runs)
    if task.privacy is not None:
        raise InvalidInput("runs", "a private task", "None: each run would be a release of its own")
    starts = [task.at(hypers=_pick(hypers, k)) for k in range(len(runs))]
    for each in starts:
        check_first_costs(each)
    axis = 0 if task.owner is not None else 1
    many = jax.tree.map(lambda leaf: jnp.repeat(jnp.expand_dims(leaf, axis), len(runs), axis), task.params)
    start = Runs.start(InnerState(many, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, axis), hypers)), axis)
    recipe = replace(call.recipe, build=_stacked_program)
    run = call.run(start, recipe=recipe)
    found: InnerState = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), run.states.state)
    check_params(call.method, _pick(found.params, 0), task.params)
    own = tuple(
        replace(
            call.adapted.status(_pick(found, k)),
            chosen=call.method.choice(call.engine, task, call.network),
        )
        for k in range(len(runs))
    )
    judged = own if certify is None else call.certifier(task).judge_runs(own, found.params, hypers, certify)
    statuses = tuple(
        judge_growth(status, before, before.at(params=_pick(found.params, k))) or status
        for k, (status, before) in enumerate(zip(judged, starts, strict=True))
    )
    costs, errors = Costs.of(run, task), tuple(status.error for status in statuses)
    params = jax.tree.map(np.asarray, task.problem.whole(found.params))
    return Trainings(task, Status.of_all(statuses), costs, params, errors, statuses, hypers).check(throw)


def _pick(tree: PyTree, run: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[run], tree)


def stack_hypers(task: Task, runs: Sequence[Any]) -> PyTree:
    """Return the hypers of all runs, stacked on axis 0; raise InvalidInput if their shapes differ from the task's."""
    if isinstance(runs, str) or not isinstance(runs, Sequence) or not len(runs):
        raise InvalidInput("runs", type(runs).__name__, "a list of hypers, one for each run")
    shapes = [jax.tree.map(jnp.shape, each) for each in (task.hypers, *runs)]
    for number, each in enumerate(shapes[1:]):
        if each != shapes[0]:
            raise InvalidInput(f"runs[{number}]", each, f"hypers like the task's: {shapes[0]}")
    return jax.tree.map(
        lambda own, *leaves: jnp.stack([jnp.asarray(leaf, own.dtype) for leaf in leaves]), task.hypers, *runs
    )


def _stacked_program(method: Any, problem: Any) -> Node:
    return stack(problem.protect(method.program(problem)))
