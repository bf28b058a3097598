"""One call of a verb such as `hp.train` or `hp.hypergradient`: checked arguments, and steps that all verbs share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.checks import check_integer
from hyperpush.base.errors import Diverged
from hyperpush.base.files import as_path
from hyperpush.base.fingerprint import fingerprint
from hyperpush.base.status import Status
from hyperpush.engines.base import Engine
from hyperpush.engines.result import Recorders, RunResult, recorders_of
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.inner.base import InnerSolver
from hyperpush.networks import Network
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.programs import ProgramRecipe, program_of
from hyperpush.task.task import LastPoint, Task
from hyperpush.verbs.budget import Budget, budget_of
from hyperpush.verbs.certify import Certifier, estimate_recipe
from hyperpush.verbs.checks import CONCRETE, branch_refused, check_key
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.recording import finite_history
from hyperpush.verbs.results import Result, over_seeds
from hyperpush.verbs.saving import describe, keep
from hyperpush.verbs.scales import large_column
from hyperpush.verbs.told import Told, as_hooks


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call of a verb, and the steps that all verbs share."""

    verb: Callable[..., Any]
    task: Task
    method: Any
    network: Network
    key: PRNGKeyArray
    engine: Engine
    hooks: Sequence[Any]

    @cached_property
    def adapted(self) -> Any:
        """The method with its settings for this network, engine and task."""
        return self.method.bind(self.network, self.engine, self.task)

    @cached_property
    def recipe(self) -> ProgramRecipe:
        """The `ProgramRecipe` from which engines build the method's program."""
        return program_of(self.adapted, self.task.problem)

    @cached_property
    def spent(self) -> Budget | None:
        """The privacy cost of one run of the method; None if the task is not private."""
        return None if self.task.privacy is None else budget_of(self.task, self.adapted, self.recipe)

    def check_releases(self) -> None:
        """Raise InvalidInput if the method sends a private task's data without noise."""
        _ = self.spent

    def status(self, run: RunResult) -> Status:
        """Return the method's status at the final states of a run.

        The status also names the chosen estimator, refused messages, and averages that reached too few parties.
        """
        found = replace(
            self.adapted.status(run.states), chosen=self.method.choice(self.engine, self.task, self.network)
        )
        return found.refusing(run.refused).with_isolation(run.isolated)

    def repeat_or_keep(self, seeds: Any, save: Any, throw: bool, **own: Any) -> Any:
        """Repeat the call for several `seeds`, or run it once and keep the result in the folder `save`.

        `own` holds the verb's own options. Together with the task, method, network and key they identify the call. The
        engine and the hooks do not, because they do not change the numbers.
        """

        def run(key: PRNGKeyArray, folder: Path | None = None) -> Any:
            around = {"engine": self.engine, "hooks": self.hooks, "save": folder}
            return self.verb(self.task, self.method, self.network, key=key, **own, **around)

        if seeds is not None:
            folders = (None if save is None else as_path("save", save) / f"seed-{number}" for number in range(2**32))
            results = [run(key, folder) for key, folder in zip(run_keys(self.key, seeds), folders, strict=False)]
            return over_seeds(after_all(self.task, results), results).check(throw)
        options = {name: each if isinstance(each, int | None) else fingerprint(each) for name, each in own.items()}
        call = describe(self.verb.__name__, self.task, self.method, self.network, self.key, **options)
        result = keep(save, call, self.task, lambda: run(self.key))
        if (
            self.task.privacy is not None and result.task.spent is self.task.spent
        ):  # the result was read from the folder
            result = replace(result, task=self._spend(result.task))
        return result.check(throw)

    def run(
        self,
        states: PyTree,
        record: Recorders | None = None,
        every: int = 1,
        step: int = 0,
        recipe: ProgramRecipe | None = None,
    ) -> RunResult:
        """Run the method's program, or the given recipe, from the given states, and pass recorded rows to the hooks."""
        hooks, told, adapted = as_hooks(self.hooks), Told(), self.adapted
        if recipe is None and isinstance(self.method, HypergradientEstimator):
            recipe = estimate_recipe(self.method, adapted, self.task, self.engine)
        recipe = self.recipe if recipe is None else recipe
        recorders = recorders_of(record)
        options = {"step": step, "record": recorders, "every": every, "hooks": (*hooks, told) if hooks else ()}
        try:
            run = self.engine.run(recipe, self.network, states, self.task.data, self.key, **options)
        except Diverged as error:
            named = error.named(type(adapted).__name__, self._advice())
            loop = adapted.loop
            if loop in recorders and named.rows is not None:
                named.history = finite_history(named.rows, loop, recorders[loop], every)
            raise named from error.__cause__
        except CONCRETE as error:
            raise branch_refused(type(adapted).__name__) from error
        told.tell_others(hooks, run, recorders, every)
        return run

    def _advice(self) -> str | None:
        """Return advice if the task itself explains a divergence; None otherwise."""
        if found := large_column(self.task):
            return f"{found[0].upper()}{found[1:]}. Or take a smaller step size."
        if isinstance(self.method, HypergradientEstimator) and self.certifier(self.task).is_ill_posed():
            return "The mean Hessian is singular or indefinite at these params: the hypergradient does not exist here."
        return None

    def after(self, run: RunResult, links: LinkEstimates | None, **at: Any) -> tuple[Task, Costs]:
        """Return the task at the end point of a run, with the privacy cost spent so far, and the run's costs."""
        solver = next((part for part in (self.method, *self.method.parts()) if isinstance(part, InnerSolver)), None)
        before = last_point(self.task, self.network) if solver is None else None
        trained = solver.iteration if solver is not None else {} if before is None else before.iteration
        point = LastPoint(self.network, links, run.step, trained, self.start_size)
        return self._spend(self.task._moved(point=point, **at)), Costs.of(run, self.task)

    @cached_property
    def start_size(self) -> float | None:
        """The root mean square over clients of the params' norm before the first training.

        None on private tasks and with several processes.
        """
        if self.task.point is not None and self.task.point.start is not None:
            return self.task.point.start
        if self.task.privacy is not None or processes.count() > 1:
            return None
        squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(self.task.params)]
        return float(np.sqrt(sum(squares) / (1 if self.task.owner is not None else self.task.clients)))

    def certifier(self, task: Task) -> Certifier:
        """Return the certifier that judges the params of `task`, the task at the end of this call."""
        return Certifier(task, self.method, self.adapted, self.network, self.engine, self.key)

    def _spend(self, after: Task) -> Task:
        if self.spent is None:
            return after
        return after.replace(spent=self.spent if self.task.spent is None else self.task.spent + self.spent)


def run_keys(key: PRNGKeyArray, seeds: Any) -> list[PRNGKeyArray]:
    """Return one random key per run: the given `seeds`, or that many keys split from `key`."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str) and len(seeds):
        return [check_key(each) for each in seeds]
    return list(jax.random.split(key, check_integer("seeds", seeds, minimum=1)))


def after_all(task: Task, runs: Sequence[Result]) -> Task:
    """Return the task with the privacy cost of several runs, one after the other, added to its budget."""
    if task.privacy is None:
        return task
    before = Budget() if task.spent is None else task.spent
    return task.replace(spent=sum((Budget(run.privacy.parts[len(before.parts) :]) for run in runs), before))


def client_axis(task: Task) -> tuple[int, ...]:
    """Return the shape of an array with one number per client; () for one party's task."""
    return (task.clients,) if task.owner is None else ()


def last_point(task: Task, network: Network) -> LastPoint | None:
    """Return the end point of the last run on this network; None if the last run used another network."""
    return task.point if task.point is not None and task.point.network == network else None
