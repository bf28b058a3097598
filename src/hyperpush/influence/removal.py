"""What does change: retraining with examples removed, many at once, on the same draws and the same network."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import everything
from hyperpush.errors import InvalidInput
from hyperpush.inner.step import Solver
from hyperpush.inner.train import train
from hyperpush.networks import Network
from hyperpush.problem import Cost, Problem
from hyperpush.problems.instance import Instance
from hyperpush.problems.weighted import Weights


class _Sum(eqx.Module):
    """The sum of the costs of k runs, whose params and weights are stacked: its gradient is that of each run."""

    cost: Cost = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: Weights, batch: PyTree) -> Float[Array, ""]:
        return jnp.sum(jax.vmap(lambda x, weights: self.cost(x, weights, batch))(params, hyper))


@eqx.filter_jit
def outer_costs(problem: Problem, params: PyTree, weights: Weights, outer_data: PyTree) -> Float[Array, "n k"]:
    """Every client's F in each of k runs, whose params and weights are on axis 1."""

    def own(params: PyTree, weights: Weights, examples: PyTree) -> Float[Array, " k"]:
        return jax.vmap(lambda x, hyper: problem.outer(x, hyper, everything(examples)))(params, weights)

    return jax.vmap(own)(params, weights, outer_data)


def retrain(
    setting: Instance,
    solver: Solver,
    network: Network,
    key: PRNGKeyArray,
    weights: Sequence[Weights],
    *,
    at_once: int = 64,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Float[np.ndarray, "k n"]:
    """Every client's F after training with each of these weights (see `without`), [weights, clients].

    Up to `at_once` retrainings are one solve, of the sum of their costs: they share every mini-batch, every link and
    push-sum's ω, and with the key of `hp.train` those of that run. `progress` is told how many are done; further
    options go to `hp.train`.
    """
    whole("at_once", at_once, least=1)
    if not weights:
        raise InvalidInput("weights", weights, "at least one set of weights")
    if isinstance(getattr(solver, "rate", None), optax.GradientTransformation):
        raise InvalidInput("solver.rate", "an Optax transformation", "a number or a schedule: others may mix the runs")
    if getattr(solver, "privacy", None) is not None:
        raise InvalidInput("solver.privacy", "noise", "None: clipping would mix the runs")
    problem = Problem(_Sum(setting.problem.inner), _Sum(setting.problem.outer))
    parts = -(-len(weights) // at_once)
    size, found = -(-len(weights) // parts), []  # equal parts, so that one program serves all
    steps = getattr(solver, "steps", None)
    for first in range(0, len(weights), size):
        part = list(weights[first : first + size])
        part += part[-1:] * (size - len(part))
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows, axis=1), *part)
        params = jax.tree.map(lambda x: jnp.repeat(x[:, None], size, axis=1), setting.params)

        def tell(_: str, done: int, total: int, first: int = first) -> None:
            if progress is not None and steps:
                progress(min(first + size * done / steps, len(weights)))

        trained = train(
            problem, solver, network, params, stacked, setting.inner_data, key, progress=tell, **options
        ).params
        found.append(np.asarray(outer_costs(setting.problem, trained, stacked, setting.outer_data), np.float64).T)
    return np.concatenate(found)[: len(weights)]


def agreement(predicted: Float[np.ndarray, "..."], actual: Float[np.ndarray, "..."]) -> dict[str, float | None]:
    """How well predictions match: R² = 1 − RSS/TSS, F1 of "removal lowers the loss", Kendall's τ, Spearman's ρ.

    None where a number is not defined: fewer than two, or all the same.
    """
    from scipy import stats
    from sklearn import metrics

    predicted, actual = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if predicted.shape != actual.shape or predicted.ndim != 1 or not len(predicted):
        raise InvalidInput("predicted", predicted.shape, f"as many numbers as there are actual ones, {actual.shape}")
    varied = len(actual) > 1 and np.ptp(actual) > 0
    ranked = varied and np.ptp(predicted) > 0
    by_rank: list[Any] = [test(predicted, actual) if ranked else None for test in (stats.kendalltau, stats.spearmanr)]
    kendall, spearman = (None if found is None else float(found.statistic) for found in by_rank)
    nothing: Any = 1.0  # to find and nothing found is no mistake
    return {
        "r2": float(metrics.r2_score(actual, predicted)) if varied else None,
        "f1": float(metrics.f1_score(actual < 0, predicted < 0, zero_division=nothing)),
        "kendall": kendall,
        "spearman": spearman,
    }
