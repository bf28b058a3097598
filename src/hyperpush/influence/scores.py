"""What would change for everyone if a training example, a group of them or a whole client were left out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import Ragged, capacity
from hyperpush.errors import InvalidInput
from hyperpush.estimators.estimate import Estimate, Estimator, hypergradient
from hyperpush.estimators.itd_backward import ITDBackward
from hyperpush.estimators.itd_forward import ITDForward
from hyperpush.estimators.tracked import TrackedHGP
from hyperpush.influence.curvature import Curvature, measured, resolution
from hyperpush.influence.removal import outer_costs
from hyperpush.networks import Network
from hyperpush.problem import Cost, Problem
from hyperpush.problems.instance import Instance
from hyperpush.problems.weighted import Weights

Place = tuple[int, int]  # (client, its example)


@dataclass(frozen=True)
class Influence:
    """Predicted changes of Σ_k F_k, everybody's validation loss. Each client computes its own from vectors."""

    examples: tuple[Float[np.ndarray, " _"], ...]  # by client: if this example is removed
    clients: Float[np.ndarray, " n"]  # if this client leaves: its cost, with its L2 term, is gone; its F_i still counts
    damping: float  # that was added to the mean Hessian
    curvature: Curvature | None  # of the mean Hessian without it; None if not looked at
    estimate: Estimate  # of the hyper-gradient, and what all cost, the look at the curvature included

    def ranking(self, client: int) -> Int[np.ndarray, " m"]:
        """The client's examples, the one that hurts everyone most first: removing it lowers the loss most."""
        client = whole("client", client, least=0, most=len(self.examples) - 1)
        return np.argsort(self.examples[client], kind="stable")

    def top(self, count: int) -> list[Place]:
        """The examples of all clients with the largest predicted changes, in either direction."""
        whole("count", count, least=0)
        places = [(client, number) for client, own in enumerate(self.examples) for number in range(len(own))]
        order = np.argsort(-np.abs(np.concatenate(self.examples)), kind="stable")[:count]
        return [places[place] for place in order]

    @property
    def warnings(self) -> list[str]:
        """What makes the predictions doubtful."""
        if self.curvature is None:
            return []
        least = resolution(jax.tree.leaves(self.estimate.value)[0].dtype) * max(map(abs, self.curvature))
        if self.curvature.smallest + self.damping >= -least:
            return []
        return [
            f"The mean Hessian is indefinite (λ_min = {self.curvature.smallest:.2g}, damping {self.damping:.2g}): the "
            "params are no minimum, and directions of negative curvature count with the wrong sign. Damping above "
            f"{-self.curvature.smallest:.2g} makes it definite."
        ]


def without(setting: Instance, places: Iterable[Place] = (), clients: Iterable[int] = ()) -> Weights:
    """The weights with these examples and these clients removed."""
    n, counts = len(setting.hypers.client), example_counts(setting)
    examples, client = np.array(setting.hypers.examples), np.array(setting.hypers.client)
    for each in clients:
        if not 0 <= each < n:
            raise InvalidInput("clients", each, f"from 0 to {n - 1}")
        client[each] = 0
    for owner, number in places:
        if not (0 <= owner < n and 0 <= number < counts[owner]):
            owned = counts[owner] if 0 <= owner < n else "its"
            raise InvalidInput("places", (owner, number), f"clients from 0 to {n - 1}, with {owned} examples from 0")
        examples[owner, number] = 0
    return Weights(jnp.asarray(examples), jnp.asarray(client))


def example_counts(setting: Instance) -> Int[np.ndarray, " n"]:
    """How many training examples each client owns."""
    data, n = setting.inner_data, len(setting.hypers.client)
    if isinstance(data, Ragged):
        return np.asarray(data.counts)
    return np.full(n, capacity(jax.tree.map(lambda leaf: leaf[0], data)))


def scores(
    setting: Instance,
    network: Network,
    params: PyTree,
    key: PRNGKeyArray,
    *,
    estimator: Estimator | None = None,
    damping: float = 0.0,
    curvature_steps: int = 50,
    **options: Any,
) -> Influence:
    """Every example's and client's influence at `params`, the solution that training found (clients on axis 0).

    `setting` comes from `weighted`. The change of Σ_k F_k when a weight goes from 1 to 0 is predicted by −n·d F̄/dw
    (Koh, Liang 2017; Terashita, Hara). `estimator` is any with a global target, `TrackedHGP()` by default. `damping` is
    added to the mean Hessian; where that is indefinite, `warnings` say so (`curvature_steps=0`: not looked at). Further
    options go to `hypergradient`; the curvature is looked at on the same engine, without its faults.

    For `ITDForward` and `ITDBackward` `params` is the start of the run that they differentiate, and damping is refused:
    it would train another problem.
    """
    estimator = _checked(TrackedHGP() if estimator is None else estimator, damping)
    # ½δ‖x‖² adds δ to the Hessian and nothing to the derivatives by weights.
    problem, data = setting.problem.with_l2(damping), (setting.inner_data, setting.outer_data)
    estimate = hypergradient(problem, estimator, network, params, setting.hypers, *data, key, **options)
    found = None
    if curvature_steps:
        engine = {name: options[name] for name in ("run", "batch") if name in options}
        found, costs = measured(setting, network, params, key, steps=curvature_steps, step=estimate.step, **engine)
        spent = {name: getattr(estimate, name) + cost for name, cost in costs.items() if name != "step"}
        estimate = replace(estimate, **spent, step=costs["step"])
    changes = jax.tree.map(lambda v: -network.clients * np.asarray(v, np.float64), estimate.value)
    examples = tuple(own[:count] for own, count in zip(changes.examples, example_counts(setting), strict=True))
    return Influence(examples, changes.client, damping, found, estimate)


class _Pulled(eqx.Module):
    """An inner cost with pullᵀx added, whose derivative by the pull is the solution of the estimator's system."""

    cost: Cost = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: tuple[Weights, PyTree], batch: PyTree) -> Float[Array, ""]:
        return self.cost(params, hyper[0], batch) + optax.tree.vdot(hyper[1], params)


class _Gone(eqx.Module):
    """What weights other than 1 change of an inner cost."""

    cost: Cost = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: tuple[Weights, PyTree], batch: PyTree) -> Float[Array, ""]:
        everything_counts = jax.tree.map(jnp.ones_like, hyper[0])
        return self.cost(params, hyper[0], batch) - self.cost(params, everything_counts, batch)


def group_score(
    setting: Instance,
    network: Network,
    params: PyTree,
    key: PRNGKeyArray,
    weights: Weights,
    *,
    estimator: Estimator | None = None,
    damping: float = 0.0,
    **options: Any,
) -> float:
    """The predicted change of Σ_k F_k when all `weights` together go from 1 to what they are here (see `without`).

        Σ_k F_k(x + Δ) − F_k(x),   (Σ_k H_k(w)) Δ = −Σ_k ∂_x[f_k(x, w_k) − f_k(x, 1)]

    Params move by a Newton step of what is left, and each client looks at its F there. The sum of single scores takes
    the Hessians of everything and straight lines, and falls short for large groups (Koh, Ang, Teo, Liang 2019). One
    more estimate per group; `TrackedHGP(acceleration=0)` by default, as clients with nothing left have no curvature.
    """
    estimator = _checked(TrackedHGP(acceleration=0) if estimator is None else estimator, damping)
    inner, data = setting.problem.with_l2(damping).inner, setting.inner_data
    problem = Problem(_Pulled(inner), _Gone(setting.problem.inner))
    pull = jax.tree.map(jnp.zeros_like, params)
    step = hypergradient(problem, estimator, network, params, (weights, pull), data, data, key, **options).value[1]
    moved = jax.tree.map(lambda x, d: x + network.clients * d, params, step)
    both = jax.tree.map(lambda *x: jnp.stack(x, axis=1), params, moved)
    twice = jax.tree.map(lambda w: jnp.stack([w, w], axis=1), weights)
    before, after = np.asarray(outer_costs(setting.problem, both, twice, setting.outer_data), np.float64).T
    return float(np.sum(after - before))


def _checked(estimator: Estimator, damping: float) -> Estimator:
    if estimator.declares.aim != "global":
        raise InvalidInput("estimator", type(estimator).__name__, "one whose target is global: everybody's outer cost")
    if not 0 <= damping < float("inf"):
        raise InvalidInput("damping", damping, "a finite number, 0 or more")
    if damping and isinstance(estimator, ITDForward | ITDBackward):
        raise InvalidInput("damping", damping, f"0 for {type(estimator).__name__}: it would train another problem")
    return estimator
