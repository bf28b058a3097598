"""Estimate the hypergradient at the task's params."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.base import Engine
from hyperpush.engines.result import Recorder, Recorders, recorders_of
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.networks import Network
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.privacy.noise_at_releases import without_data
from hyperpush.programs.report import Report
from hyperpush.task.task import Task
from hyperpush.verbs.call import client_axis, last_point
from hyperpush.verbs.certify import start_of
from hyperpush.verbs.ending import judge_estimate_growth
from hyperpush.verbs.first_costs import check_first_costs
from hyperpush.verbs.fit import fit
from hyperpush.verbs.results import Estimate
from hyperpush.verbs.scales import with_hint


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
    certify: bool = True,
) -> Estimate:
    """Estimate the hypergradient of each client: the gradient of the mean outer cost by the client's own hypers.

    Client i receives d F̄ / dλ_i for the mean outer cost F̄ = (1/n) Σ_s F_s(x*(λ), λ_s). Here n is the number of
    clients, F_s the outer cost of client s, and x*(λ) the inner solution that all clients share. The derivative is
    taken at `task.params`, which are not trained here. Solve the inner problem first with `hp.train`, and pass
    `trained.task`.

    Args:
        task: One client's costs and start, and all clients' data.
        method: The estimator. `method.info` names its network and its target.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key, as in `hp.train`.
        links: The clients' estimates of how often their links are up, for estimators that send along reversed links.
            None takes the estimates from training on this network. With the estimator's option `links="means"`, None
            takes the network's true means.
        record: For each loop, by name, a function of one client's (state, context). Its values go into `history`.
            None records nothing.
        engine: The engine that runs the clients, as in `hp.train`.
        hooks: Observers, as in `hp.train`.
        seeds: Number of runs with keys split from `key`, or a list with one key per run; None makes one run. The result
            of several runs has the same class and a leading seed axis on every array. Its `mean` and `spread` are the
            mean and standard deviation over seeds.
        save: A folder to keep the run in. The same call again resumes the run or returns its result. None keeps
            nothing.
        throw: True raises `hp.NotConverged` instead of returning a result that did not converge.
        certify: True checks that the params solve the inner problem. A Newton step is taken from the params, and a
            second estimate after this step shows the error of the first. The check about doubles the cost of `TreeCG`.
            For other estimators, one machine computes the check, and `costs` does not include it.

    Returns:
        An `Estimate` with `value`, `status` and `costs`. The fields `residual` and `disagreement` of the status
        measure the distance of the task's params from solving the inner problem. The field `moved` estimates how much
        the value would change at the solution (`hp.Status`).

    Raises:
        InvalidInput: The method does not fit the task or the network. The message lists methods that fit.
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
    call = fit(task, method, network, engine, kind=HypergradientEstimator, key=key, verb=hypergradient, hooks=hooks)
    if seeds is not None or save is not None:
        return call.repeat_or_keep(seeds, save, throw, links=links, record=record, certify=certify)
    check_first_costs(task)
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
    states = HypergradientState(task.params, task.hypers, zeros, links, report=report, start=start_of(task))
    if not certify:
        states = replace(states, certify=jnp.zeros(client_axis(task), bool))
    run = call.run(states, _private_records(task, record), step=0 if point is None else point.step)
    after, costs = call.after(run, links if point is not None else None)
    own = judge_estimate_growth(call.status(run), task, run.states.value)
    status = call.certifier(task).judge_estimate(own, certify, value=run.states.value)
    return Estimate(after, with_hint(status, task), costs, run.states.value, run.history).check(throw)


def _private_records(task: Task, record: Recorders | None) -> Recorders | None:
    """Return the recorders; on a private task, raise InvalidInput if one passes data on without noise."""
    if record is None or task.privacy is None:
        return record
    return {name: Recorder(without_data(each.f), each.entry) for name, each in recorders_of(record).items()}
