"""Retrain without examples, for many groups at once, with the same random draws and the same network."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.base.status import Status
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.influence.effects import Effects, join, leaving
from hyperpush.influence.stacked import Summed, outer_costs, repeat_params, split_runs, stack_weights
from hyperpush.influence.weights import Weights, with_weights, without
from hyperpush.inner.base import InnerSolver
from hyperpush.networks import Network
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.fit import fit
from hyperpush.verbs.hooks import Progress
from hyperpush.verbs.runs import train_runs
from hyperpush.verbs.train import train


@no_type_check
def retrain(
    task: Task,
    method: InnerSolver,
    network: Network,
    weights: Sequence[Weights],
    *,
    key: PRNGKeyArray | int,
    at_once: int = 64,
    engine: Engine = Simulate(),
    progress: Callable[[float], None] | None = None,
) -> Effects:
    """Retrain without each group, and once with all clients, to measure the true change for each client.

    Make the weights with `without`. Up to `at_once` retrainings form one solve and share every message. With
    `hp.TreeNewton()` each retraining ends at its own solution. With `hp.TrackedSGP()` retrainings run one after
    another, because each finds its own settings. Solvers with a fixed number of steps descend on the sum of the costs
    of all retrainings. These share every mini-batch, every link and push-sum's ω. With the key of `hp.train` they
    repeat that run's draws. Only the first `at_once` runs are certified.

    **Use it** for few params, or to check a prediction. Start warm, from `hp.train(…).task`: then
    `hp.TreeNewton()` takes a few averages. **Avoid it** for many single records, which `scores` ranks by one estimate.

    Args:
        task: The task at the params that every retraining starts from: a trained task to start warm, or the task before
            training to repeat a run of fixed length.
        method: The inner solver: `hp.TreeNewton()` or `hp.TrackedSGP()`, or the solver of the training if it has a
            step size. An optimizer could mix the runs and is refused.
        network: The network: its links, and the rounds in which they are up.
        weights: The remaining weights, one set for each retraining.
        key: An integer or a JAX key; the key of `hp.train` repeats its links and mini-batches.
        at_once: Retrainings that share one solve, at least 1.
        engine: The engine that runs the clients.
        progress: Function called with the number of finished retrainings; None: no calls.

    Returns:
        `Effects` by group and client, with the params of each retraining and the baseline with all clients.

    Raises:
        InvalidInput: The weights are not a list or belong to another task, or the method has an optimizer.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.logistic(clients=3, seed=0), hp.networks.Ring(3)
        >>> one_less = [hp.influence.without(task, [(0, 2)]), hp.influence.without(task, clients=[1])]
        >>> found = hp.influence.retrain(task, hp.TreeNewton(), network, one_less, key=0)
        >>> found.losses.shape, found.status.converged
        ((2, 3), True)
    """
    if isinstance(weights, Weights) or not isinstance(weights, Sequence) or not weights:
        given = weights if isinstance(weights, list) else type(weights).__name__
        raise InvalidInput("weights", given, "a list with weights for at least one retraining")
    runs, steps, found = [without(task), *weights], method.option("steps"), []
    for part in split_runs(task, runs, at_once):
        first = sum(map(len, found))

        def tell(_: str, done: int, total: int, first: int = first, size: int = len(part)) -> None:
            if progress is not None and steps:
                progress(min(first + size * done / steps, len(weights)))

        around = {"certify": not found, "key": key, "engine": engine, "hooks": (Progress(tell),)}
        found.append(_retrain_part(task, method, network, part, **around))
    return _without_baseline(join(found, len(runs)))


def _retrain_part(task: Task, method: InnerSolver, network: Network, weights: list[Weights], **around: Any) -> Effects:
    """Retrain one part of the weights; return effects whose `by_site` holds losses instead of changes."""
    params, statuses, status, costs = _train(task, method, network, weights, **around)
    losses = outer_costs(task, eqx.filter(params, eqx.is_array))
    return Effects(
        task, status, costs, losses, leaving(weights), "retrain", np.zeros(task.clients), params, statuses=statuses
    )


def _without_baseline(found: Effects) -> Effects:
    """Return the effects of all runs except the first, which trained with all clients and is the baseline."""

    def pick(place: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[place] if eqx.is_array(leaf) else leaf, found.params)

    baseline, rest = found.by_site[0], slice(1, None)
    return replace(
        found,
        by_site=found.by_site[rest] - baseline,
        leaves=found.leaves[rest],
        baseline=baseline,
        params=pick(rest),
        baseline_params=pick(0),
        statuses=found.statuses[rest],
    )


def _train(
    task: Task, method: InnerSolver, network: Network, weights: Sequence[Weights], certify: bool, **around: Any
) -> tuple[PyTree[Float[Array, "k n ..."]], tuple[Status, ...], Status, Costs]:
    """Train with each of k weights side by side, in one solve; `around` is passed to `hp.train`.

    Return the params, the status of each run, the status of all runs together, and the costs.
    """
    made = with_weights(task)
    if method.solves and not method.bind(network, around["engine"], task).stacks:
        return _train_each(made, method, network, weights, certify, **around)
    if method.solves:
        call = fit(made, method, network, kind=InnerSolver, verb=train, **around)
        found = train_runs(call, weights, throw=False, certify=None)  # keep the solver's own verdicts
        return found.params, found.statuses, found.status, found.costs
    if method.option("optimizer") is not None:
        raise InvalidInput("method.optimizer", "an optimizer", "a step_size: an optimizer may mix the runs")
    summed = made.replace(
        inner=Summed(made.inner),
        outer=Summed(made.inner),  # training ignores it, but it must take stacked params
        outer_on="train",
        penalty=made.penalty and Summed(made.penalty),
        outer_penalty=None,
        _params=PerClient(repeat_params(task.params, len(weights), axis=1)),
        _hypers=PerClient(stack_weights(task, weights)),
    )
    ended = train(summed, method, network, certify=certify, **around)
    params = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0) if eqx.is_array(leaf) else leaf, ended.params)
    return params, (ended.status,) * len(weights), ended.status, ended.costs


def _train_each(
    made: Task, method: InnerSolver, network: Network, weights: Sequence[Weights], certify: bool, **around: Any
) -> tuple[PyTree, tuple[Status, ...], Status, Costs]:
    """Train with each of the weights in turn, and return the same values as `_train`."""
    found = [train(made.at(hypers=own), method, network, certify=certify, **around) for own in weights]
    params = jax.tree.map(
        lambda *leaves: np.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *(each.params for each in found)
    )
    statuses, costs = tuple(each.status for each in found), found[0].costs
    for each in found[1:]:
        costs += each.costs
    return params, statuses, Status.of_all(statuses), costs


def agreement(predicted: Float[np.ndarray, "..."], actual: Float[np.ndarray, "..."]) -> dict[str, float | None]:
    """Compare predictions with actual changes by R², F1, Kendall's τ and Spearman's ρ.

    R² is 1 − RSS/TSS. F1 measures predictions of the event "removal lowers the loss".

    Args:
        predicted: Predicted changes of the loss, one for each removal.
        actual: Changes of the loss by retraining.

    Returns:
        The four numbers by name. A number is None if it is undefined, for example with fewer than two predictions.

    Raises:
        InvalidInput: The numbers of predictions and of actual changes differ.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> hp.influence.agreement(np.array([-1.0, 2.0, 1.0]), np.array([-1.0, 2.0, 1.0]))
        {'r2': 1.0, 'f1': 1.0, 'kendall': 1.0, 'spearman': 1.0}
    """
    from scipy import stats  # slow to import, and used here only

    predicted, actual = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if predicted.shape != actual.shape or predicted.ndim != 1 or not len(predicted):
        raise InvalidInput("predicted", predicted.shape, f"as many numbers as there are actual ones, {actual.shape}")
    varied = len(actual) > 1 and np.ptp(actual) > 0
    ranked = varied and np.ptp(predicted) > 0
    tests: tuple[Any, ...] = stats.kendalltau, stats.spearmanr
    kendall, spearman = (float(test(predicted, actual).statistic) if ranked else None for test in tests)
    hits, named = np.sum((predicted < 0) & (actual < 0)), np.sum(predicted < 0) + np.sum(actual < 0)
    return {
        "r2": float(1 - np.sum((actual - predicted) ** 2) / np.sum((actual - actual.mean()) ** 2)) if varied else None,
        "f1": float(2 * hits / named) if named else 1.0,  # no loss falls, and none is predicted to fall
        "kendall": kendall,
        "spearman": spearman,
    }
