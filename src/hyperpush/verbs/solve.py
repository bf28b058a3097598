"""Minimize the mean outer cost over the hypers with a bilevel algorithm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.base.arrays import filled
from hyperpush.base.checks import check_integer, no_type_check
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.networks import Network
from hyperpush.programs.report import Report
from hyperpush.task.task import Task
from hyperpush.verbs.call import client_axis, last_point
from hyperpush.verbs.ending import judge_ending
from hyperpush.verbs.first_costs import check_first_costs
from hyperpush.verbs.fit import fit
from hyperpush.verbs.recording import Metrics, history_of, recorder, rows_apart
from hyperpush.verbs.results import Solution
from hyperpush.verbs.scales import with_hint


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
    certify: bool = True,
) -> Solution:
    """Minimize the mean outer cost of all clients over their hypers with a bilevel algorithm.

    Args:
        task: One client's costs and start, and all clients' data. `common=True` asks for one common hyper.
        method: The algorithm, such as `hp.PDBO(…)` or `hp.algorithms.MDBO(…)`.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key, as in `hp.train`.
        metrics: Functions to measure in every row of the history, as in `hp.train`; None measures only the cost.
        every: Steps between two rows of the history, at least 1. The last step then has a row only if `every` divides
            the steps. None chooses a value that gives at most about 200 rows, and the last step has a row.
        engine: The engine that runs the clients, as in `hp.train`.
        hooks: Observers, as in `hp.train`.
        seeds: Number of runs with keys split from `key`, or a list with one key per run; None makes one run. The result
            of several runs has the same class and a leading seed axis on every array. Its `mean` and `spread` are the
            mean and standard deviation over seeds.
        save: A folder to keep the run in. The same call again resumes the run or returns its result. None keeps
            nothing.
        throw: True raises `hp.NotConverged` instead of returning a result that did not converge.
        certify: True checks the result. Nested algorithms are checked at their first and last step, as in
            `hp.hypergradient`. After other algorithms, the inner problem is solved from the start and from the end,
            and TreeCG compares the hypergradients at both solutions; `costs` includes this work. False skips the check.

    Returns:
        A `Solution` with `params`, `hypers`, `history`, `status` and `costs`. Each row of the history measures the
        params together with the hypers for which these params were trained.

    Raises:
        InvalidInput: The method does not fit the task or the network. The message lists methods that fit.
        Diverged: A number became NaN or infinite; the message names the method and the round.
        NotConverged: With `throw=True`, the status says that the result did not converge.

    Example:
        Client i has the L2 rate exp(λ_i), which is too high at the start: the best params are the mean of the training
        data, without shrinkage.

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
    call = fit(task, method, network, engine, kind=Algorithm, key=key, verb=solve, hooks=hooks)
    if seeds is not None or save is not None:
        return call.repeat_or_keep(seeds, save, throw, metrics=metrics, every=every, certify=certify)
    check_first_costs(task)
    steps = method.steps
    last = steps if every is None else 0
    every = rows_apart(steps) if every is None else check_integer("every", every, minimum=1)
    recorded = recorder(task, metrics, rows=steps // every + 1, last=last)
    links = known_links(call.adapted, network, last_point(task, network), task)
    counter = filled(client_axis(task), steps, np.int32)
    judge = filled(client_axis(task), certify, bool) if method.nested else None
    run = call.run(
        BilevelState(task.params, task.hypers, links, counter, Report.none(client_axis(task)), judge=judge),
        {LOOP: recorded},
        every,
    )
    found: BilevelState = run.states
    seen = found.links if links is not None else None
    after, costs = call.after(run, seen, params=found.params, hypers=found.hyper)
    best = steps if found.best_step is None else int(np.asarray(found.best_step).reshape(-1)[0])
    params, history = task.problem.whole(found.params), history_of(run, LOOP, recorded, every)
    status, more = judge_ending(call, call.status(run), after, found, certify)
    personal = method.option("personal") or ()
    return Solution(after, with_hint(status, task), costs + more, params, found.hyper, history, best, personal).check(
        throw
    )
