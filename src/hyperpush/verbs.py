"""The verbs: train, hypergradient and solve. Each takes a task, a method, a network and a key."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.checks import check_integer, no_type_check
from hyperpush.checks.verbs import check_call, check_common, check_hypers, check_key
from hyperpush.costs import Costs
from hyperpush.engines.base import Engine
from hyperpush.engines.result import Recorder, Recorders, RunResult, recorders_of
from hyperpush.engines.simulate import Simulate
from hyperpush.errors import Diverged, InvalidInput
from hyperpush.hooks import listen
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.inner_residual import estimate_recipe, inner_residual
from hyperpush.privacy.budget import Budget, budget
from hyperpush.privacy.noise_at_releases import without_data
from hyperpush.programs import InnerSolver, InnerState, LinkEstimates, Network, program_of
from hyperpush.programs.report import Report
from hyperpush.recording import Metrics, history_of, recorder, rows_apart
from hyperpush.results import Estimate, Result, Solution, Training, over_seeds
from hyperpush.runs.fingerprint import fingerprint
from hyperpush.runs.saving import describe, keep
from hyperpush.status import Status
from hyperpush.task import Point, Task


@dataclass(frozen=True)
class _Call:
    """What every verb is called with, checked, and what all verbs do with it."""

    verb: Callable[..., Any]
    task: Task
    method: Any
    network: Network
    key: PRNGKeyArray
    engine: Engine
    hooks: Sequence[Any]

    @property
    def adapted(self) -> Any:
        """The method as it runs on this network."""
        return self.method.on(self.network, self.engine, self.task)

    def status(self, states: Any) -> Status:
        """What the method says of the states that it ended with, and which estimator it took."""
        return replace(self.adapted.status(states), chosen=self.method.choice(self.engine, self.task))

    def repeat_or_keep(self, seeds: Any, save: Any, throw: bool, **own: Any) -> Any:
        """The call with `seeds=`, several runs as one result; or with `save=`, a run that is kept in a folder.

        `own` are the options of the verb that tell a call from another one; engine and hooks change no numbers.
        """

        def run(key: PRNGKeyArray, folder: Path | None = None) -> Any:
            around = {"engine": self.engine, "hooks": self.hooks, "save": folder}
            return self.verb(self.task, self.method, self.network, key=key, **own, **around)

        if seeds is not None:
            folders = (None if save is None else Path(save) / f"seed-{number}" for number in range(2**32))
            results = [run(key, folder) for key, folder in zip(run_keys(self.key, seeds), folders, strict=False)]
            return over_seeds(_after_all(self.task, results), results).check(throw)
        options = {name: each if isinstance(each, int | None) else fingerprint(each) for name, each in own.items()}
        call = describe(self.verb.__name__, self.task, self.method, self.network, self.key, **options)
        result = keep(save, call, self.task, lambda: run(self.key))
        if self.task.privacy is not None and result.task.spent is self.task.spent:  # it was read back
            result = replace(result, task=self._spend(result.task))
        return result.check(throw)

    def run(self, states: PyTree, record: Recorders | None = None, every: int = 1, step: int = 0) -> RunResult:
        """Run the method from these states; hooks see the rows that are recorded."""
        listener, adapted = listen(self.hooks), self.adapted
        recipe = program_of(adapted, self.task.problem)
        if isinstance(self.method, HypergradientEstimator):
            recipe = estimate_recipe(self.method, adapted, self.task, self.engine)
        options = {"step": step, "record": record, "every": every, "progress": listener}
        try:
            run = self.engine.run(recipe, self.network, states, self.task.data, self.key, **options)
        except Diverged as error:
            raise error.named(type(adapted).__name__) from error.__cause__
        if listener is not None:
            listener.finish(run.history, every)
        return run

    def after(self, run: RunResult, links: LinkEstimates | None, **at: Any) -> tuple[Task, Costs]:
        """The task at the point that a run reached, with what was released of its data, and what the run cost."""
        solver = next((part for part in (self.method, *self.method.parts()) if isinstance(part, InnerSolver)), None)
        before = last_point(self.task, self.network) if solver is None else None
        trained = solver.iteration if solver is not None else {} if before is None else before.iteration
        point = Point(self.network, links, run.step, trained)
        return self._spend(self.task.at(point=point, **at)), Costs.of(run, self.task)

    def _spend(self, after: Task) -> Task:
        if self.task.privacy is None:
            return after
        spent = budget(self.task, self.adapted)
        return after.replace(spent=spent if self.task.spent is None else self.task.spent + spent)


@no_type_check
def train(
    task: Task,
    method: InnerSolver,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    metrics: Metrics | None = None,
    every: int | None = None,
    engine: Engine = Simulate(),
    hooks: Sequence[Any] = (),
    seeds: int | Sequence[int] | None = None,
    save: str | Path | None = None,
    throw: bool = False,
) -> Training:
    """Solve the inner problem alone: min over x of the mean of all clients' f_i(x, λ_i), at fixed hypers.

    Args:
        task: One client's costs and start, and all clients' data.
        method: The inner solver, such as `hp.SGP(steps=600, step_size=0.1)`.
        network: Who can send to whom, and when. Its size must be the task's number of clients.
        key: An integer or a JAX key. Decides random links and mini-batches: the same key gives the same result.
        metrics: What to measure on the way: `{"accuracy": f}` on the data that the outer level fits, or
            `{"accuracy": ("test", f)}`; `f(params, hyper, batch)` gives one value per example or a scalar.
        every: Steps between two rows of the history, at least 1. Without metrics there is no history unless it is
            given. The last step has a row only if `every` divides the steps.
        engine: Where the clients run: `hp.Simulate()`, `hp.Shard()`, `hp.Threads()` or `hp.Peers(…)`. Results agree
            between engines up to rounding.
        hooks: Observers (`hp.hooks.Hook`) called between compiled chunks; they cannot change the result.
        seeds: Run several times, with keys made from `key` (a number of them) or with these keys. The result is of the
            same class, with a leading seed axis on every array, and has `mean` and `spread`.
        save: A folder to keep the run in. The same call again resumes it or returns its result.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        A `Training`; its `task` is the same task at the params reached, for `hp.hypergradient` and others.

    Raises:
        InvalidInput: Something does not fit; the message names it and what would be right.
        Diverged: A number became NaN or infinite; the message names the method and the round.
        NotConverged: With `throw=True`, the status says that the result did not converge.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(inner=lambda x, hyper, a: (x - a) ** 2, outer=lambda x, hyper, b: (x - b) ** 2 + hyper,
        ...                params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [3.0]]), validation=jnp.zeros((3, 1)))
        >>> trained = hp.train(task, hp.SGP(steps=100, step_size=0.1), hp.networks.FullyConnected(3), key=0)
        >>> print(trained.params.round(3))
        [2. 2. 2.]
    """
    key = check_call(task, method, InnerSolver, network, key, engine)
    call = _Call(train, task, method, network, key, engine, hooks)
    if seeds is not None or save is not None:
        return call.repeat_or_keep(seeds, save, throw, metrics=metrics, every=every)
    recorders = {}
    if metrics or every is not None:
        every = check_integer("every", 1 if every is None else every, minimum=1)
        recorders = {method.loop: recorder(task, metrics)}
    run = call.run(InnerState(task.params, task.hypers), recorders, every or 1)
    found: InnerState = run.states
    after, costs = call.after(run, found.links, params=found.params, hypers=found.hyper)  # some solvers set hypers, too
    history = history_of(run, method.loop, every or 1) if recorders else None
    status = replace(call.status(found), residual=inner_residual(after, method, engine))
    return Training(after, status, costs, task.problem.whole(found.params), history).check(throw)


@no_type_check
def hypergradient(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    links: LinkEstimates | None = None,
    record: Recorders | None = None,
    engine: Engine = Simulate(),
    hooks: Sequence[Any] = (),
    seeds: int | Sequence[int] | None = None,
    save: str | Path | None = None,
    throw: bool = False,
) -> Estimate:
    """Estimate how each client's own hypers move the mean outer cost.

    Client i receives d F̄ / dλ_i for F̄ = (1/n) Σ_s F_s(x*(λ), λ_s), where x*(λ) is the inner solution that all clients
    share. Nothing is trained here: the derivative is taken at `task.params`, so solve the inner problem first
    (`hp.train`) and pass `trained.task`.

    Args:
        task: One client's costs and start, and all clients' data.
        method: The estimator. `method.info` says which network it needs and what it estimates.
        network: Who can send to whom, and when.
        key: An integer or a JAX key, as in `hp.train`.
        links: What clients know of their links, for estimators that reverse them. None: what they saw when the task was
            trained on this network, or the network's true means if the estimator has `links="means"`.
        record: By loop, a function of (state, context) of one client whose results go into `history`.
        engine: Where the clients run, as in `hp.train`.
        hooks: Observers, as in `hp.train`.
        seeds: Run several times, with keys made from `key` (a number of them) or with these keys. The result is of the
            same class, with a leading seed axis on every array, and has `mean` and `spread`.
        save: A folder to keep the run in. The same call again resumes it or returns its result.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        An `Estimate` with `value`, `status` and `costs`. `status.residual` is how far the task's params are from
        solving the inner problem (`hp.Status`): 0 at the solution, about 1 or more where nothing was trained. Above 0.1
        the estimate is marked as not converged.

    Raises:
        InvalidInput: The method does not fit the task or network; methods that do are listed.
        Diverged: A number became NaN or infinite; the message names the method and the round.
        NotConverged: With `throw=True`, the status says that the result did not converge.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(inner=lambda x, rate, a: (x - a) ** 2, penalty=lambda x, rate: jnp.exp(rate) * x**2,
        ...                outer=lambda x, rate, b: (x - b) ** 2, params=0.0, hypers=0.0,
        ...                train=jnp.array([[1.0], [2.0], [3.0], [2.0]]), validation=jnp.zeros((4, 1)))
        >>> network = hp.networks.FullyConnected(4)
        >>> trained = hp.train(task, hp.SGP(steps=50, step_size=0.1), network, key=0)
        >>> hp.hypergradient(trained.task, hp.HGP(steps=30, pushes=1, step_size=0.2), network, key=0)
        Estimate(4 clients, norm 0.5; fixed length; 30 rounds, 60 floats sent per client)
    """
    key = check_call(task, method, HypergradientEstimator, network, key, engine)
    call = _Call(hypergradient, task, method, network, key, engine, hooks)
    if seeds is not None or save is not None:
        return call.repeat_or_keep(seeds, save, throw, links=links, record=record)
    check_hypers(task)
    if record is not None and not isinstance(record, Mapping):
        raise InvalidInput("record", record, 'a dict of functions by loop, such as {"HGP": f}')
    if method.trains and task.point is not None:
        name = type(method).__name__
        raise InvalidInput(
            "task", "a trained task", f"the task before training: {name} trains itself, from task.params"
        )
    point = last_point(task, network)
    if links is None:
        links = known_links(call.adapted, network, point, task)
    zeros, report = jax.tree.map(jnp.zeros_like, task.hypers), Report.none(client_axis(task))
    states = HypergradientState(task.params, task.hypers, zeros, links, report=report)
    run = call.run(states, _private_records(task, record), step=0 if point is None else point.step)
    after, costs = call.after(run, links if point is not None else None)
    status = call.status(run.states)
    if status.residual is None and (residual := inner_residual(task, method, engine)) is not None:
        status = status.at(residual)
    return Estimate(after, status, costs, run.states.value, run.history).check(throw)


@no_type_check
def solve(
    task: Task,
    method: Algorithm,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    metrics: Metrics | None = None,
    every: int | None = None,
    engine: Engine = Simulate(),
    hooks: Sequence[Any] = (),
    seeds: int | Sequence[int] | None = None,
    save: str | Path | None = None,
    throw: bool = False,
) -> Solution:
    """Lower everybody's mean outer cost with a bilevel algorithm.

    Args:
        task: One client's costs and start, and all clients' data. `common=True` asks for hypers that agree.
        method: The algorithm, such as `hp.PDBO(…)` or `hp.algorithms.MDBO(…)`.
        network: Who can send to whom, and when.
        key: An integer or a JAX key, as in `hp.train`.
        metrics: What to measure in every row of the history, as in `hp.train`.
        every: Steps between two rows, at least 1; None chooses a divisor of the steps, for about 200 rows at most. The
            last step has a row only if `every` divides the steps.
        engine: Where the clients run, as in `hp.train`.
        hooks: Observers, as in `hp.train`.
        seeds: Run several times, with keys made from `key` (a number of them) or with these keys. The result is of the
            same class, with a leading seed axis on every array, and has `mean` and `spread`.
        save: A folder to keep the run in. The same call again resumes it or returns its result.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        A `Solution` with `params`, `hypers`, `history`, `status` and `costs`. Row t of the history holds the params
        that were trained for the hypers of row t.

    Raises:
        InvalidInput: The method does not fit the task or network; methods that do are listed.
        Diverged: A number became NaN or infinite; the message names the method and the round.
        NotConverged: With `throw=True`, the status says that the result did not converge.

    Example:
        Client i's rate exp(λ_i) is too high at the start: the mean of the training data is right for everybody.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(inner=lambda x, rate, a: (x - a) ** 2, penalty=lambda x, rate: jnp.exp(rate) * x**2,
        ...                outer=lambda x, rate, b: (x - b) ** 2, params=0.0, hypers=0.0,
        ...                train=jnp.array([[1.0], [3.0]]), validation=jnp.full((2, 1), 2.0))
        >>> method = hp.PDBO(inner=hp.SGP(steps=50, step_size=0.1), steps=3, outer=hp.optimizer("sgd", learning_rate=1),
        ...                  hypergradient=hp.HGP(steps=30, pushes=1, step_size=0.2))
        >>> solution = hp.solve(task, method, hp.networks.FullyConnected(2), key=0)
        >>> print(solution.history.cost.mean(axis=1).round(2))
        [1.   0.57 0.36 0.25]
    """
    key = check_call(task, method, Algorithm, network, key, engine)
    call = _Call(solve, task, method, network, key, engine, hooks)
    if seeds is not None or save is not None:
        return call.repeat_or_keep(seeds, save, throw, metrics=metrics, every=every)
    check_hypers(task)
    check_common(task, method)
    steps = method.steps
    every = rows_apart(steps) if every is None else check_integer("every", every, minimum=1)
    links = known_links(call.adapted, network, last_point(task, network), task)
    counter = jnp.full(client_axis(task), steps, jnp.int32)
    run = call.run(
        BilevelState(task.params, task.hypers, links, counter, Report.none(client_axis(task))),
        {LOOP: recorder(task, metrics, rows=steps // every + 1)},
        every,
    )
    found: BilevelState = run.states
    seen = found.links if links is not None else None
    after, costs = call.after(run, seen, params=found.params, hypers=found.hyper)
    best = steps if found.best_step is None else int(np.asarray(found.best_step).reshape(-1)[0])
    params, history = task.problem.whole(found.params), history_of(run, LOOP, every)
    status, residual = call.status(found), inner_residual(after, method, engine)
    if residual is not None and method.nested:
        status = status.at(residual)
    personal = getattr(method, "personal", ())
    return Solution(after, status, costs, params, found.hyper, history, best, personal).check(throw)


# ------------------------------------------------------------------- keys, links, status


def run_keys(key: PRNGKeyArray, seeds: Any) -> list[PRNGKeyArray]:
    """A key for each of several runs."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str) and len(seeds):
        return [check_key(each) for each in seeds]
    return list(jax.random.split(key, check_integer("seeds", seeds, minimum=1)))


def _private_records(task: Task, record: Recorders | None) -> Recorders | None:
    """What to record; on a private task, refused where it lets data through."""
    if record is None or task.privacy is None:
        return record
    return {name: Recorder(without_data(each.f), each.entry) for name, each in recorders_of(record).items()}


def _after_all(task: Task, runs: Sequence[Result]) -> Task:
    """The task with what several runs released of its data, one after the other."""
    if task.privacy is None:
        return task
    before = Budget() if task.spent is None else task.spent
    return task.replace(spent=sum((Budget(run.privacy.parts[len(before.parts) :]) for run in runs), before))


def client_axis(task: Task) -> tuple[int, ...]:
    """The leading axis of what all clients have one number of; one party's task has none."""
    return (task.clients,) if task.owner is None else ()


def last_point(task: Task, network: Network) -> Point | None:
    """Where the last run on this network left off; what another network left is of no use."""
    return task.point if task.point is not None and task.point.network == network else None
