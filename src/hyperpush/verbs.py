"""The verbs: train, hypergradient and solve. Each takes a task, a method, a network and a key."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush import processes
from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.arguments import check_batch_size, check_engine, check_key, check_method, check_network, check_task
from hyperpush.checks import check_integer, no_type_check
from hyperpush.data.batches import everything
from hyperpush.engines.base import Engine
from hyperpush.engines.result import Recorder, Recorders, RunResult, recorders_of
from hyperpush.engines.simulate import Simulate
from hyperpush.errors import InvalidInput
from hyperpush.hooks import listen
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, reverses_links
from hyperpush.inner.base import InnerSolver, InnerState, LinkEstimates
from hyperpush.method import Method
from hyperpush.networks import Network
from hyperpush.privacy.budget import Budget, budget
from hyperpush.privacy.noising import without_data
from hyperpush.problem import Cost, Problem
from hyperpush.programs import Context, program_of
from hyperpush.results import AnyResult, Costs, Estimate, History, Result, Solution, Training, over_seeds
from hyperpush.runs.fingerprint import fingerprint
from hyperpush.runs.saving import describe, keep
from hyperpush.settings import keep_compiled_code
from hyperpush.status import Status
from hyperpush.task import Point, Task

Metrics = Mapping[str, Cost | tuple[str, Cost]]
ROWS = 200  # rows of a history, about, if nobody says how many
RESERVED = ("step", "rounds", "floats", "cost", "hypergradient_norm", "watched")  # columns of a history
TRACED = 10_000_000  # numbers of all clients' hypers over all rows that a history holds


class Measured(eqx.Module):
    """What is measured of one client after a step: its outer cost, its metrics, its hypers."""

    problem: Problem
    metrics: tuple[tuple[str, str, Cost], ...]  # (name, data set, metric)
    cost: bool = eqx.field(static=True)
    hypers: bool = eqx.field(static=True)

    def __call__(self, state: Any, ctx: Context) -> dict[str, Any]:
        at = state.params, state.hyper
        row: dict[str, Any] = {
            "metrics": {
                name: self.problem.measure(metric, *at, everything(ctx.data.sets[on]))
                for name, on, metric in self.metrics
            }
        }
        if self.cost:
            row["cost"] = self.problem.outer_cost(*at, everything(ctx.data.outer))
        if self.hypers:
            row["hypers"] = state.hyper
        if hasattr(state, "hypergradient"):
            row["norm"] = jnp.asarray(optax.tree.norm(state.hypergradient), jnp.zeros(()).dtype)
        if getattr(state, "watch", None) is not None:
            row["watched"] = state.watch.mean
        return row


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
        every: Steps between two rows of the history. Without metrics there is no history unless it is given.
        engine: Where the clients run. Results agree between engines up to rounding.
        hooks: Observers called between compiled chunks; they cannot change the result.
        seeds: Run several times, with keys made from `key` (a number of them) or with these keys. The result is of the
            same class, with a leading seed axis on every array, and has `mean` and `spread`.
        save: A folder to keep the run in. The same call again resumes it or returns its result.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        A `Training`; its `task` is the same task at the params reached, for `hp.hypergradient` and others.

    Raises:
        InvalidInput: Something does not fit; the message names it and what would be right.
        Diverged: A number became NaN or infinite; the message names the loop and the round.

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
    if seeds is not None or save is not None:
        own = {"metrics": metrics, "every": every}
        around = {"engine": engine, "hooks": hooks}
        return _repeated_or_kept(train, task, method, network, key, seeds, save, own, around).checked(throw)
    wanted = _metrics(task, metrics)
    recorders: Recorders = {}
    if wanted or every is not None:
        every = check_integer("every", 1 if every is None else every, minimum=1)
        measured = Measured(task.problem, wanted, task.privacy is None and not task.joint, False)
        recorders = {method.loop: Recorder(measured, entry=True)}
    method = method.on(network, engine.lossy)
    states = InnerState(task.params, task.hypers)
    listener = listen(hooks)
    run = engine.run(
        program_of(method, task.problem),
        network,
        states,
        task.data,
        key,
        record=recorders,
        every=every or 1,
        progress=listener,
    )
    if listener is not None:
        listener.finish(run.history, every or 1)
    found: InnerState = run.states
    point = Point(network, found.links, run.step)
    history = _history(run, method.loop, every or 1) if recorders else None
    return Training(
        _reached(task, method, params=found.params, hypers=found.hyper, point=point),  # some solvers set hypers, too
        method.status(found),
        Costs.of(run, task),
        task.problem.whole(found.params),
        history,
    ).checked(throw)


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
        links: What clients know of their links, for estimators that reverse them. None: what training with
            `SGP(observe=True)` on this network saw, else the network's true means.
        record: By loop, a function of (state, context) of one client whose results go into `history`.
        engine: Where the clients run.
        hooks: Observers called between compiled chunks.
        seeds: Run several times, with keys made from `key` (a number of them) or with these keys. The result is of the
            same class, with a leading seed axis on every array, and has `mean` and `spread`.
        save: A folder to keep the run in. The same call again resumes it or returns its result.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        An `Estimate` with `value`, `status` and `costs`. `status.residual` is how far the task's params are from
        solving the inner problem: the norm of the mean of all clients' inner gradients, relative to the mean of their
        norms. It is 0 at the solution, and about 1 where nothing was trained; above 0.1 the estimate says so.

    Raises:
        InvalidInput: The method does not fit the task or network; methods that do are listed.
        Diverged: A number became NaN or infinite; the message names the loop and the round.

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
    if seeds is not None or save is not None:
        own = {"links": links, "record": record}
        around = {"engine": engine, "hooks": hooks}
        return _repeated_or_kept(hypergradient, task, method, network, key, seeds, save, own, around).checked(throw)
    _check_hypers(task)
    if record is not None and not isinstance(record, Mapping):
        raise InvalidInput("record", record, 'a dict of functions by loop, such as {"HGP": f}')
    point = last_point(task, network)
    if method.trains and task.point is not None:
        name = type(method).__name__
        given = "a trained task"
        raise InvalidInput("task", given, f"the task before training: {name} trains itself, from task.params")
    method = method.on(network, engine.lossy)
    if links is None:
        links = known_links(method, network, point, task)
    states = HypergradientState(task.params, task.hypers, jax.tree.map(jnp.zeros_like, task.hypers), links)
    listener = listen(hooks)
    run = engine.run(
        program_of(method, task.problem),
        network,
        states,
        task.data,
        key,
        step=_step(point),
        record=_private_records(task, record),
        progress=listener,
    )
    if listener is not None:
        listener.finish(run.history, 1)
    found: HypergradientState = run.states
    after = _reached(task, method, point=Point(network, links if point is not None else None, run.step))
    status = _with_inner_residual(method.status(found), task, method)
    return Estimate(after, status, Costs.of(run, task), found.value, run.history).checked(throw)


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
        every: Steps between two rows; None chooses so that there are about 200 rows at most.
        engine: Where the clients run.
        hooks: Observers called between compiled chunks.
        seeds: Run several times, with keys made from `key` (a number of them) or with these keys. The result is of the
            same class, with a leading seed axis on every array, and has `mean` and `spread`.
        save: A folder to keep the run in. The same call again resumes it or returns its result.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        A `Solution` with `params`, `hypers`, `history`, `status` and `costs`. Row t of the history holds the params
        that were trained for the hypers of row t.

    Raises:
        InvalidInput: The method does not fit the task or network; methods that do are listed.
        Diverged: A number became NaN or infinite; the message names the loop and the round.
    """
    key = check_call(task, method, Algorithm, network, key, engine)
    if seeds is not None or save is not None:
        own = {"metrics": metrics, "every": every}
        around = {"engine": engine, "hooks": hooks}
        return _repeated_or_kept(solve, task, method, network, key, seeds, save, own, around).checked(throw)
    _check_hypers(task)
    _check_common(task, method)
    wanted, steps = _metrics(task, metrics), method.steps
    every = _rows_apart(steps) if every is None else check_integer("every", every, minimum=1)
    numbers = (steps // every + 1) * sum(leaf.size for leaf in jax.tree.leaves(task.hypers))
    measured = Measured(task.problem, wanted, task.privacy is None and not task.joint, numbers <= TRACED)
    method = method.on(network, engine.lossy)
    links = known_links(method, network, last_point(task, network), task)
    states = BilevelState(task.params, task.hypers, links, jnp.full(_clients(task), steps, jnp.int32))
    recorders = {LOOP: Recorder(measured, entry=True)}
    listener = listen(hooks)
    run = engine.run(
        program_of(method, task.problem),
        network,
        states,
        task.data,
        key,
        record=recorders,
        every=every,
        progress=listener,
    )
    if listener is not None:
        listener.finish(run.history, every)
    found: BilevelState = run.states
    history = _history(run, LOOP, every)
    point = Point(network, found.links if links is not None else None, run.step)
    after = _reached(task, method, params=found.params, hypers=found.hyper, point=point)
    best = steps if found.best_step is None else int(np.asarray(found.best_step).reshape(-1)[0])
    params = task.problem.whole(found.params)
    return Solution(after, method.status(found), Costs.of(run, task), params, found.hyper, history, best).checked(throw)


# ------------------------------------------------------------------------------- checks


def check_call(task: Any, method: Any, kind: type, network: Any, key: Any, engine: Any = Simulate()) -> PRNGKeyArray:
    """Refuse arguments of the wrong kind, and those that do not fit each other; returns the key."""
    keep_compiled_code()
    check_task(task)
    check_method(method, kind)
    check_engine(engine, task)
    check_network(network, task, method)
    task.check()
    method.check_task(task)
    for part in (method, *method.parts()):
        check_batch_size(part, task)
    if task.privacy is not None:
        budget(task, method.on(network, engine.lossy))  # refuses what lets data out
    return check_key(key)


def _repeated_or_kept(
    verb: Callable[..., Any],
    task: Task,
    method: Method,
    network: Network,
    key: PRNGKeyArray,
    seeds: Any,
    save: Any,
    own: dict[str, Any],
    around: dict[str, Any],
) -> Any:
    """A call with `seeds=`, several runs as one result; or with `save=`, a run that is kept in a folder.

    `own` are the options of the verb that tell a call from another one, `around` those that change no numbers.
    """
    if seeds is not None:
        runs = [
            verb(task, method, network, key=each, save=_own_folder(save, number), **own, **around)
            for number, each in enumerate(_keys(key, seeds))
        ]
        return over_seeds(_after_all(task, runs), runs)
    options = {name: _described(given) for name, given in own.items()}
    call = describe(verb.__name__, task, method, network, key, **options)
    return _kept(task, method, keep(save, call, task, lambda: verb(task, method, network, key=key, **own, **around)))


def _described(given: Any) -> Any:
    """What tells metrics, records or links from others in a saved call."""
    return given if isinstance(given, int | None) else fingerprint(given)


def _keys(key: PRNGKeyArray, seeds: Any) -> list[PRNGKeyArray]:
    """A key for each of several runs."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str) and len(seeds):
        return [check_key(each) for each in seeds]
    return list(jax.random.split(key, check_integer("seeds", seeds, minimum=1)))


def _own_folder(save: str | Path | None, number: int) -> Path | None:
    """The folder of one of several runs."""
    return None if save is None else Path(save) / f"seed-{number}"


def _check_hypers(task: Task) -> None:
    if not task.uses_hypers and not task.joint:
        given = "hypers that no cost or penalty contains"
        raise InvalidInput("task.hypers", given, "an inner cost, outer cost or penalty that depends on its hyper")


def _check_common(task: Task, method: Algorithm) -> None:
    """Refuse an algorithm whose hypers agree for a task whose hypers are personal, and the reverse."""
    from hyperpush.registry import registered  # the registry imports every method

    agree = bool(method.info.fixed_point)
    if agree == task.common:
        return
    fits = [name for name, each in registered("algorithms").items() if bool(each.info.fixed_point) == task.common]
    name = type(method).__name__
    what = "makes all hypers agree" if agree else "gives every client hypers of its own"
    ask = "hp.Task(…, common=True)" if agree else "common=False"
    raise InvalidInput("task.common", task.common, f"{ask} for {name}, which {what}; or one of {', '.join(fits)}")


def _metrics(task: Task, metrics: Any) -> tuple[tuple[str, str, Cost], ...]:
    if metrics is None:
        return ()
    if not isinstance(metrics, Mapping):
        raise InvalidInput("metrics", metrics, 'a dict such as {"accuracy": f} or {"accuracy": ("test", f)}')
    found = []
    for name, given in metrics.items():
        pair: Any = given if isinstance(given, tuple) and len(given) == 2 else (task.outer_on, given)
        on, metric = pair
        if not isinstance(name, str) or name in RESERVED:
            raise InvalidInput("metrics", name, f"names other than {', '.join(RESERVED)}, which histories have already")
        if not callable(metric) or not isinstance(on, str):
            raise InvalidInput(f"metrics.{name}", given, 'a function of (params, hyper, batch), or ("test", function)')
        if task.privacy is not None:
            allowed = "no metrics on a private task: what they measure on data would leave a client without noise"
            raise InvalidInput(f"metrics.{name}", "a metric", allowed)
        task.check_metric(f"metrics.{name}", cast(Cost, metric), on)
        found.append((str(name), on, metric))
    return tuple(found)


# ---------------------------------------------------------------------- starts and rows


def _rows_apart(steps: int) -> int:
    """Steps between two rows such that the last step has one, and that there are about `ROWS` of them at most."""
    if steps <= ROWS:
        return 1
    return next((every for every in range(-(-steps // ROWS), steps // 20 + 1) if steps % every == 0), 1)


def _clients(task: Task) -> tuple[int, ...]:
    return () if task.owner is not None else (task.clients,)


def _private_records(task: Task, record: Recorders | None) -> Recorders | None:
    """What to record; on a private task, refused where it lets data through."""
    if record is None or task.privacy is None:
        return record
    return {name: Recorder(without_data(each.f), each.entry) for name, each in recorders_of(record).items()}


def _reached(task: Task, method: Method, **at: Any) -> Task:
    """The task at the point reached, with what was released of its data on the way."""
    return _spend(task, method, task.at(**at))


def _kept(task: Task, method: Method, result: AnyResult) -> AnyResult:
    """A result that may have been read back from a folder, with what was released of the task's data."""
    if task.privacy is None or result.task.spent is not task.spent:
        return result
    return replace(result, task=_spend(task, method, result.task))


def _spend(task: Task, method: Method, after: Task) -> Task:
    if task.privacy is None:
        return after
    run = budget(task, method)
    return after.replace(spent=run if task.spent is None else task.spent + run)


def _after_all(task: Task, runs: Sequence[Result]) -> Task:
    """The task with what several runs released of its data, one after the other."""
    if task.privacy is None:
        return task
    before = Budget() if task.spent is None else task.spent
    return task.replace(spent=sum((Budget(run.privacy.parts[len(before.parts) :]) for run in runs), before))


def _with_inner_residual(status: Status, task: Task, method: HypergradientEstimator) -> Status:
    """The status with how far the task's params are from solving the inner problem that all share.

    Nothing is measured where data must not be looked at, where nobody sees all clients, or where it does not matter.
    """
    matters = method.info.target in ("global", "client") and not method.trains
    if not matters or task.privacy is not None or task.owner is not None or processes.count() > 1:
        return status
    problem = program_of(method, task.problem).traceable().parts[1]
    residual = float(_inner_residual(problem, task.params, task.hypers, task.train))
    return status if status.residual is not None else replace(status, residual=residual)


@eqx.filter_jit
def _inner_residual(problem: Problem, params: PyTree, hypers: PyTree, train: PyTree) -> Float[Array, ""]:
    """‖mean of the clients' inner gradients‖ / mean of their norms: 0 at the solution, about 1 far from it."""

    def one(x: PyTree, hyper: PyTree, examples: PyTree) -> PyTree:
        return problem.inner_gradient(x, hyper, everything(examples))

    gradients = jax.vmap(one)(params, hypers, train)
    mean = optax.tree.norm(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), gradients))
    sizes = jnp.mean(jax.vmap(optax.tree.norm)(gradients))
    return jnp.asarray(mean / jnp.where(sizes > 0, sizes, 1))


def last_point(task: Task, network: Network) -> Point | None:
    """Where the last run on this network left off; what another network left is of no use."""
    return task.point if task.point is not None and task.point.network == network else None


def _step(point: Point | None) -> int:
    return 0 if point is None else point.step


def known_links(
    method: HypergradientEstimator | Algorithm, network: Network, point: Point | None, task: Task
) -> LinkEstimates | None:
    """What clients know of their links: what they saw in training, else the network's true means."""
    if not reverses_links(method):
        return None
    if point is not None and point.links is not None:
        return point.links
    means, dtype = network.means(), jnp.zeros(()).dtype
    links = LinkEstimates(*(jnp.asarray(part, dtype) for part in (means.push, means.up.T, means.stationary())))
    return links if task.owner is None else jax.tree.map(lambda leaf: leaf[task.owner], links)


def _history(run: RunResult, loop: str, every: int) -> History:
    rows, clock = run.history.get(loop), run.clocks.get(loop)
    if rows is None or clock is None:
        none = np.zeros(0, np.int64)
        return History(none, none, none)

    def on_host(values: Float[Array, "..."]) -> np.ndarray:
        return np.array(values, np.float64)  # a copy: what JAX holds cannot be written

    norm = on_host(rows["norm"]) if "norm" in rows else None
    if norm is not None and len(norm):
        norm[0] = np.nan  # no hypergradient led to the start
    return History(
        every * np.arange(len(clock.step)),
        clock.rounds,
        clock.floats,
        on_host(rows["cost"]) if "cost" in rows else None,
        {name: on_host(values) for name, values in rows["metrics"].items()},
        rows.get("hypers"),
        norm,
        on_host(rows["watched"]) if "watched" in rows else None,
    )
