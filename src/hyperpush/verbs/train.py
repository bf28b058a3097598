"""Solve the inner problem at fixed hypers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PRNGKeyArray

from hyperpush.base.checks import check_integer, no_type_check
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.networks import Network
from hyperpush.task.task import Task
from hyperpush.verbs.ending import judge_growth
from hyperpush.verbs.first_costs import check_first_costs
from hyperpush.verbs.fit import fit
from hyperpush.verbs.recording import Metrics, history_of, recorder
from hyperpush.verbs.results import Training
from hyperpush.verbs.runs import check_alone, check_params, train_runs
from hyperpush.verbs.scales import with_hint


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
    runs: Sequence[Any] | None = None,
    save: str | Path | None = None,
    throw: bool = False,
    certify: bool = True,
) -> Any:
    """Solve the inner problem at fixed hypers.

    The params x minimize the mean over all clients i of the inner costs f_i(x, λ_i), where λ_i are the client's hypers.

    Args:
        task: One client's costs and start, and all clients' data.
        method: The inner solver, such as `hp.SGP(steps=600, step_size=0.1)`.
        network: The network: its links, and the rounds in which they are up. It has as many clients as the task.
        key: An integer or a JAX key. It determines random links and mini-batches: the same key gives the same
            result.
        metrics: Functions to measure during training, by name. `{"accuracy": f}` measures on the data of the outer
            level, and `{"accuracy": ("test", f)}` on the data set `test`. `f(params, hyper, batch)` returns one value
            per example or a scalar. None measures nothing.
        every: Steps between two rows of the history, at least 1. The last step has a row only if `every` divides the
            steps. None means 1 if `metrics` are given; otherwise `history` is None.
        engine: The engine that runs the clients: `hp.Simulate()`, `hp.Shard()`, `hp.Threads()` or `hp.Peers(…)`.
            Results agree between engines up to rounding.
        hooks: Observers (`hp.hooks.Hook`) called between compiled chunks; they cannot change the result.
        seeds: Number of runs with keys split from `key`, or a list with one key per run; None makes one run. The result
            of several runs has the same class and a leading seed axis on every array. Its `mean` and `spread` are the
            mean and standard deviation over seeds.
        runs: The hypers of several problems on the same data, a list of pytrees like `task.hypers`. All problems are
            solved side by side and share every message. The solver must use exact averages, like `hp.TreeNewton()`.
            To vary the weights of records and parties, use `hp.influence.with_weights(task)`, whose hypers are these
            weights. None solves one problem.
        save: A folder to keep the run in. The same call again resumes the run or returns its result. None keeps
            nothing.
        throw: True raises `hp.NotConverged` instead of returning a result that did not converge.
        certify: True measures the distance of the params from the solution, with up to 200 Hessian products that
            `costs` does not include.

    Returns:
        A `Training`. Its `task` is the same task at the trained params, for `hp.hypergradient` and other verbs. With
        `runs=`, the result is a `Trainings`.

    Raises:
        InvalidInput: An argument is invalid; the message names it and the allowed values.
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
    call = fit(task, method, network, engine, kind=InnerSolver, key=key, verb=train, hooks=hooks)
    if runs is not None:
        check_alone(seeds=seeds, save=save, metrics=metrics, every=every)
        return train_runs(call, runs, throw, certify)
    if seeds is not None or save is not None:
        return call.repeat_or_keep(seeds, save, throw, metrics=metrics, every=every, certify=certify)
    check_first_costs(task)
    recorded = recorder(task, metrics) if metrics or every is not None else None
    every = check_integer("every", 1 if every is None else every, minimum=1)
    recorders = {} if recorded is None else {call.adapted.loop: recorded}
    run = call.run(InnerState(task.params, task.hypers), recorders, every)
    found: InnerState = run.states
    check_params(method, found.params, task.params)
    after, costs = call.after(run, found.links, params=found.params, hypers=found.hyper)  # some solvers set hypers, too
    history = None if recorded is None else history_of(run, call.adapted.loop, recorded, every)
    own = call.status(run)
    status = judge_growth(own, task, after)
    if status is None:
        status = call.certifier(after).judge_params(own, certify)
    return Training(after, with_hint(status, task), costs, task.problem.whole(found.params), history).check(throw)
