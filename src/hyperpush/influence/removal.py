"""What does change: retraining with examples removed, many at once, on the same draws and the same network."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer, no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import full_batch
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.influence.weights import Weights, check_weights, with_weights
from hyperpush.inner.base import InnerSolver
from hyperpush.networks import Network
from hyperpush.task.problem import Cost, Penalty, Problem
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task
from hyperpush.verbs.hooks import Progress
from hyperpush.verbs.train import train


def over_runs(
    function: Callable[..., Float[Array, "..."]], params: PyTree, *own: Array, axes: tuple[int, ...] = ()
) -> Float[Array, "k ..."]:
    """A function of params in each of k runs, whose params are on axis 0; each may take something of its own."""
    arrays, rest = eqx.partition(params, eqx.is_array)  # a module has other leaves, too

    def one(x: PyTree, *own: Array) -> Float[Array, "..."]:
        return function(eqx.combine(x, rest), *own)

    return jax.vmap(one, in_axes=(0, *axes))(arrays, *own)


class Summed(eqx.Module):
    """The sum of a cost or penalty over k runs, whose params and weights are stacked: its gradient is that of each run.

    Of a cost it is one number per example, as the library takes the mean over them.
    """

    function: Cost | Penalty

    def __call__(self, params: PyTree, hyper: Weights, *batch: PyTree) -> Float[Array, "..."]:
        def one(x: PyTree, examples: Array, client: Array) -> Float[Array, "..."]:
            return self.function(x, Weights(examples, client, hyper.own), *batch)

        return jnp.sum(over_runs(one, params, hyper.examples, hyper.client, axes=(1, 0)), axis=0)


def repeat_params(params: PyTree, runs: int, axis: int) -> PyTree:
    """The same params in each of several runs, which are on this axis."""
    return jax.tree.map(lambda leaf: jnp.repeat(jnp.expand_dims(leaf, axis), runs, axis=axis), params)


def outer_costs(task: Task, params: PyTree) -> Float[Array, "n k"]:
    """Every client's F in each of k runs, whose params are on axis 1."""
    return _outer_costs(task.problem, params, task.hypers, task.data.outer)


@eqx.filter_jit
def _outer_costs(problem: Problem, params: PyTree, hypers: PyTree, outer: PyTree) -> Float[Array, "n k"]:
    def own(params: PyTree, hyper: PyTree, examples: PyTree) -> Float[Array, " k"]:
        return jax.vmap(lambda x: problem.outer_cost(x, hyper, full_batch(examples)))(params)

    return jax.vmap(own)(params, hypers, outer)


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
) -> Float[np.ndarray, "k n"]:
    """Every client's F after training with each of these weights (see `without`), [weights, clients].

    Up to `at_once` retrainings are one solve and share every message. With `hp.TreeNewton()` each of them ends at its
    own solution. Solvers of fixed length descend on the sum of the costs: they share every mini-batch, every link and
    push-sum's ω, and with the key of `hp.train` those of that run.

    Args:
        task: The task before training, at the params that every retraining starts from.
        method: The inner solver that trained: `hp.TreeNewton()`, or one with a step size; an optimizer could mix the
            runs.
        network: The network that it trained on.
        weights: What counts in each retraining.
        key: That of `hp.train`.
        at_once: How many retrainings are one solve.
        engine: Where the clients run.
        progress: Is told how many are done.

    Returns:
        F of every client after each retraining, [weights, clients].

    Raises:
        InvalidInput: The weights are no list, or those of another task; or the method has an optimizer.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.logistic(clients=3, seed=0), hp.networks.Ring(3)
        >>> all_of_them, one_less = hp.influence.without(task), hp.influence.without(task, [(0, 2)])
        >>> hp.influence.retrain(task, hp.SGP(steps=9, step_size=0.5), network, [all_of_them, one_less], key=0).shape
        (2, 3)
    """
    check_integer("at_once", at_once, minimum=1)
    if isinstance(weights, Weights) or not isinstance(weights, Sequence):
        raise InvalidInput("weights", type(weights).__name__, "a list of weights: one for each retraining")
    if not weights:
        raise InvalidInput("weights", weights, "at least one set of weights")
    parts = -(-len(weights) // at_once)
    size, found = -(-len(weights) // parts), []  # equal parts, so that one program serves all
    steps = getattr(method, "steps", None)
    for first in range(0, len(weights), size):
        part = list(weights[first : first + size])
        part += part[-1:] * (size - len(part))

        def tell(_: str, done: int, total: int, first: int = first) -> None:
            if progress is not None and steps:
                progress(min(first + size * done / steps, len(weights)))

        params = train_runs(task, method, network, part, key=key, engine=engine, hooks=(Progress(tell),))
        found.append(np.asarray(outer_costs(task, params), np.float64).T)
    return np.concatenate(found)[: len(weights)]


def train_runs(
    task: Task, method: InnerSolver, network: Network, weights: Sequence[Weights], **around: Any
) -> PyTree[Float[Array, "n k ..."]]:
    """The params after training with each of k weights side by side, in one solve; `around` is for `hp.train`."""
    made = with_weights(task)
    check_weights(task, weights)
    if method.solves:
        found = train(made, method, network, runs=weights, **around)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), found.params)
    if getattr(method, "optimizer", None) is not None:
        raise InvalidInput("method.optimizer", "an optimizer", "a step_size: an optimizer may mix the runs")
    stacked = Weights(
        jnp.stack([each.examples for each in weights], axis=2),  # by example first, as it is looked up
        jnp.stack([each.client for each in weights], axis=1),
        task.hypers,
    )
    summed = made.replace(
        inner=Summed(made.inner),
        outer=Summed(made.inner),  # whatever it is, training does not look at it
        outer_on="train",
        penalty=made.penalty and Summed(made.penalty),
        outer_penalty=None,
        _params=PerClient(repeat_params(task.params, len(weights), axis=1)),
        _hypers=PerClient(stacked),
    )
    return train(summed, method, network, **around).params


def agreement(predicted: Float[np.ndarray, "..."], actual: Float[np.ndarray, "..."]) -> dict[str, float | None]:
    """How well predictions match: R² = 1 − RSS/TSS, F1 of "removal lowers the loss", Kendall's τ, Spearman's ρ.

    Args:
        predicted: Predicted changes of the loss, one for each removal.
        actual: What retraining changed.

    Returns:
        The four by name. None where a number is not defined: fewer than two predictions, or all the same.

    Raises:
        InvalidInput: There are not as many predictions as actual changes.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> hp.influence.agreement(np.array([-1.0, 2.0, 1.0]), np.array([-1.0, 2.0, 1.0]))
        {'r2': 1.0, 'f1': 1.0, 'kendall': 1.0, 'spearman': 1.0}
    """
    from scipy import stats  # takes long to import, and only this needs it

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
        "f1": float(2 * hits / named) if named else 1.0,  # nothing to find and nothing found is no mistake
        "kendall": kendall,
        "spearman": spearman,
    }
