"""Predict the effects of groups and whole parties by a Newton step of the remaining cost."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_nonnegative, no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import full_batch
from hyperpush.engines.base import Engine
from hyperpush.engines.compiled.compile import call
from hyperpush.engines.compiled.effort import level_of_one_run
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.influence.effects import Effects, join, leaving
from hyperpush.influence.stacked import (
    Pulled,
    Summed,
    hold_weights,
    outer_costs,
    repeat_params,
    split_runs,
    stack_weights,
)
from hyperpush.influence.weights import Chosen, Weights, with_weights
from hyperpush.networks import Network
from hyperpush.task.problem import L2, Cost, Penalty, Problem
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task
from hyperpush.verbs.hypergradient import hypergradient


class _Gone(eqx.Module):
    """Change of an inner cost or penalty when weights differ from 1."""

    function: Cost | Penalty

    def __call__(self, params: PyTree, hyper: Weights, *batch: PyTree) -> Float[Array, "..."]:
        ones = Weights(jnp.ones_like(hyper.examples), jnp.ones_like(hyper.client), hyper.own)
        return self.function(params, hyper, *batch) - self.function(params, ones, *batch)


@no_type_check
def group_score(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    weights: Weights | Sequence[Weights],
    *,
    key: PRNGKeyArray | int,
    damping: float = 0.0,
    at_once: int = 64,
    engine: Engine = Simulate(),
    certify: bool = True,
) -> Effects:
    """Predict the change of each client's outer cost when groups leave, by a Newton step of the remaining cost.

    The weights w without a group (see `without`) change the inner costs f_k and their Hessians H_k. The Newton step Δ
    from the params x, and the total change of the outer costs F_k, are

        (Σ_k H_k(w)) Δ = −Σ_k ∂_x[f_k(x, w_k) − f_k(x, 1)],   Σ_k F_k(x + Δ) − F_k(x)

    Each client evaluates its own F at the moved params. The sum of single scores is linear and uses the Hessian with
    all records. So it falls short for large groups (Koh, Ang, Teo and Liang, arXiv:1905.13289).

    **Use it** for groups and whole parties with more than a few dozen params. **Avoid it** for single records, because
    `scores` needs one estimate for all of them. Avoid it also for few params, because `retrain` is exact at little more
    cost. Parties without any remaining records lack curvature: use `TrackedHGP(acceleration=0)` for them.

    Args:
        task: A trained task whose inner cost returns one loss per example.
        method: An estimator with a global target. Its system holds all groups at once.
        network: The network: its links, and the rounds in which they are up.
        weights: The remaining weights without each group, such as `hp.influence.without(task, [(0, 3), (1, 2)])`, or a
            list.
        key: An integer or a JAX key.
        damping: Number added to the diagonal of the mean Hessian, 0 or more.
        at_once: Number of groups that share one estimate, at least 1. A larger number takes more memory and fewer
            rounds.
        engine: The engine that runs the clients.
        certify: True judges the params, as `hp.hypergradient` does. False skips this, for params that were judged
            before.

    Returns:
        `Effects` by group and client, with the moved params.

    Raises:
        InvalidInput: An argument is out of range, or the weights belong to another task or remove all clients.
        NotConverged: The remaining cost has a singular or indefinite Hessian, and the estimator detects it.

    Example:
        Removing the number 7 moves the mean from 2 to 1, where the loss of each of three clients is 0 instead of 1.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def loss(x, hyper, numbers):
        ...     return (x - numbers) ** 2
        >>> train = jnp.array([[1.0, 1.0], [1.0, 7.0], [1.0, 1.0]])
        >>> task = hp.Task(inner=loss, outer=loss, params=2.0, hypers=0.0, train=train, validation=jnp.ones((3, 2)))
        >>> network, weights = hp.networks.FullyConnected(3), hp.influence.without(task, [(1, 1)])
        >>> found = hp.influence.group_score(task, hp.hypergradients.Dense(), network, weights, key=0)
        >>> found.by_site.round(3).tolist(), found.params.round(3).tolist()
        ([[-1.0, -1.0, -1.0]], [[1.0, 1.0, 1.0]])
    """
    groups = [weights] if isinstance(weights, Weights) else weights
    options: dict[str, Any] = {"damping": damping, "at_once": at_once, "engine": engine, "certify": certify}
    found = step_groups(task, method, network, groups, key=key, **options)
    return found.check(throw=found.status.reason == "ill-posed")


def step_groups(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    groups: Sequence[Weights],
    *,
    damping: float,
    at_once: int = 64,
    certify: bool,
    **around: Any,
) -> Effects:
    """Return the effects of groups by Newton steps, also if they failed; `around` is passed to `hp.hypergradient`."""
    check_estimator(method, damping)
    made, parts = with_weights(task), split_runs(task, groups, at_once)
    if any(not np.any(each.client) for each in groups):
        raise InvalidInput("weights", "no client is left", "weights that leave at least one client")
    found = [
        _move(task, made, part, damping, method, network, certify=certify and not number, **around)
        for number, part in enumerate(parts)
    ]
    return join(found, len(groups))


def _move(task: Task, made: Task, weights: list[Weights], damping: float, *given: Any, **around: Any) -> Effects:
    """Return the effects of some groups by one estimate; `given` and `around` are passed to `hp.hypergradient`."""
    moved_task = _step_task(task, made, weights, damping)
    step = hypergradient(moved_task, *given, **around)
    moves = jax.tree.map(lambda d: task.clients * np.moveaxis(np.asarray(d), 1, 0), step.value[1])
    moved = jax.tree.map(lambda x, d: jnp.asarray(np.asarray(x)[None] + d), task.params, moves)
    both = jax.tree.map(lambda x, m: np.concatenate([np.asarray(x)[None], m]), task.params, moved)
    baseline, *costs = outer_costs(task, both)  # one program for the params before and after
    by_site, whole = np.stack(costs) - baseline, task.problem.whole
    return Effects(
        task, step.status, step.costs, by_site, leaving(weights), "newton", baseline, whole(moved), whole(task.params)
    )


def _step_task(task: Task, made: Task, weights: list[Weights], damping: float) -> Task:
    """Return the task whose hypergradient by the pull of `Pulled` holds the Newton steps of all groups.

    The pull starts at the gradient that leaves with the groups. So the params of `task` solve the returned task, too.
    """
    hypers, params = stack_weights(task, weights), repeat_params(task.params, len(weights), axis=1)
    gone, penalty = Summed(_Gone(made.inner)), made.penalty and Summed(_Gone(made.penalty))
    changed = Problem(gone, gone, penalty, None, made.fixed, made.by_example)
    pull = call(_missing_gradient, (changed, params, hypers, made.data.train), level=level_of_one_run)
    pull = jax.tree.map(lambda own, x: own - damping * x, pull, params)
    return made.replace(
        inner=Chosen(Summed(made.inner), hold_weights),
        penalty=Pulled(L2(damping, made.penalty and Summed(made.penalty)), asked=True),
        outer=Chosen(gone, hold_weights),
        outer_penalty=penalty and Chosen(penalty, hold_weights),
        _params=PerClient(params),
        _hypers=PerClient((hypers, pull)),
        by_example=(*made.by_example, *(False for _ in jax.tree.leaves(pull))),
        outer_on="train",
    )


def _missing_gradient(given: tuple[Problem, PyTree, Weights, PyTree], donated: None) -> PyTree:
    """Return each client's negative gradient, by the params, of the change of its inner cost by the weights."""
    problem, params, hypers, train = given

    def own(params: PyTree, hyper: Weights, examples: PyTree) -> PyTree:
        batch = full_batch(examples)
        return jax.tree.map(jnp.negative, jax.grad(problem.inner_cost)(params, hyper, batch))

    return jax.vmap(own)(params, hypers, train)


def check_estimator(method: Any, damping: float) -> None:
    """Raise `InvalidInput` if the estimator's target is not global, or if damping would change its training."""
    if isinstance(method, HypergradientEstimator) and method.info.target != "global":
        allowed = "an estimator whose target is global: the mean outer cost of all clients"
        raise InvalidInput("method", type(method).__name__, allowed)
    check_nonnegative("damping", damping)
    if damping and method.trains:
        raise InvalidInput("damping", damping, f"0 for {type(method).__name__}: it would train another problem")
