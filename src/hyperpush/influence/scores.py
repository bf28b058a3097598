"""What would change for everyone if a training example, a group of them or a whole client were left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer, check_nonnegative, no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import count
from hyperpush.data.sets import example_counts
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.influence.curvature import Curvature, measure_curvature, resolution
from hyperpush.influence.removal import outer_costs
from hyperpush.influence.validation import find_places, split_validation, take_weights
from hyperpush.influence.weights import Chosen, Place, Weights, check_weights, with_weights
from hyperpush.networks import Network
from hyperpush.task.problem import Cost, Penalty
from hyperpush.task.starts import PerClient
from hyperpush.task.task import Task
from hyperpush.verbs import panels
from hyperpush.verbs.hypergradient import hypergradient
from hyperpush.verbs.panels import Panel
from hyperpush.verbs.results import Estimate, Result

WORST = 10  # records in a panel
LOOK = 50  # products for a look at the curvature


@dataclass(frozen=True, repr=False)
class Influence(Result):
    """Predicted changes of Σ_k F_k, everybody's validation loss. Each client computes its own from vectors.

    One party's result holds its own alone.

    Attributes:
        examples: By client, the change if this example is removed.
        clients: The change if this client leaves: its cost, with its penalty, is gone; its F_i still counts.
        damping: What was added to the mean Hessian.
        curvature: The ends of the spectrum of the mean Hessian without it; None if not looked at.
        estimate: The hypergradient by all weights.
        validation: The validation examples that were asked for, as pairs (client, number).
        by_validation: By client, the change of the loss of each of them if this example is removed, [validation
            examples, examples].

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.logistic(clients=3, seed=0), hp.networks.FullyConnected(3)
        >>> trained = hp.train(task, hp.SGP(steps=300, step_size=0.5), network, key=0).task
        >>> found = hp.influence.scores(trained, hp.hypergradients.ImplicitCG(steps=20), network, key=0)
        >>> client, number = found.top(1)[0]
        >>> bool(abs(found.examples[client][number]) == max(abs(own).max() for own in found.examples))
        True
    """

    examples: tuple[Float[np.ndarray, " _"], ...]
    clients: Float[np.ndarray, " n"]
    damping: float
    curvature: Curvature | None
    estimate: Estimate
    validation: tuple[Place, ...] = ()
    by_validation: tuple[Float[np.ndarray, "k _"], ...] = ()

    def ranking(self, client: str | int) -> Int[np.ndarray, " m"]:
        """The client's examples, the one that hurts everyone most first: removing it lowers the loss most."""
        number = self.task.client(client)
        if number not in self._numbers:
            raise InvalidInput("client", client, f"{self.names[0]!r}, whose result this is")
        return np.argsort(self.examples[self._numbers.index(number)], kind="stable")

    def top(self, count: int) -> list[Place]:
        """The examples of all clients with the largest predicted changes, in either direction."""
        check_integer("count", count, minimum=0)
        rows = zip(self._numbers, self.examples, strict=True)
        places = [(client, number) for client, own in rows for number in range(len(own))]
        order = np.argsort(-np.abs(np.concatenate(self.examples)), kind="stable")[:count]
        return [places[place] for place in order]

    def worst(self, count: int) -> list[Place]:
        """The examples of all clients that hurt most: removing them lowers the loss most. Others are left out."""
        check_integer("count", count, minimum=0)
        rows = zip(self._numbers, self.examples, strict=True)
        hurting = [(own[number], client, int(number)) for client, own in rows for number in np.flatnonzero(own < 0)]
        return [(client, number) for _, client, number in sorted(hurting)[:count]]

    @property
    def _numbers(self) -> list[int]:
        """The clients that have scores here."""
        return list(range(self.task.clients)) if self.task.owner is None else [self.task.owner]

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the predictions: those of the status, and an indefinite mean Hessian."""
        said = super().warnings
        if self.curvature is None:
            return said
        least = resolution(jax.tree.leaves(self.estimate.value)[0].dtype) * max(map(abs, self.curvature))
        if self.curvature.smallest + self.damping >= -least:
            return said
        return [
            *said,
            f"The mean Hessian is indefinite (λ_min = {self.curvature.smallest:.2g}, damping {self.damping:.2g}): the "
            "params are no minimum, and directions of negative curvature count with the wrong sign. Damping above "
            f"{-self.curvature.smallest:.2g} makes it definite.",
        ]

    def facts(self) -> list[str]:
        count = sum(map(len, self.examples))
        hurting = sum(int(np.sum(own < 0)) for own in self.examples)
        return [*super().facts(), f"{count} examples", f"{hurting} hurt"]

    def own_panels(self) -> list[Panel]:
        note = "Below 0: the loss of all falls without the client or record, so it hurts."
        title, names = "Change of all validation losses if a client leaves", list(self.task.names)
        rows = [
            [names[client], number, self.examples[self._numbers.index(client)][number]]
            for client, number in self.worst(WORST)
        ]
        return [
            *([panels.text("Warnings", *self.warnings, tone="bad")] if self.warnings else []),
            panels.bars(title, self.names, {"": self.clients}, note=note),
            panels.table("Records that hurt most", ("client", "record", "change if removed"), rows, note=note),
        ]


@no_type_check
def scores(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    damping: float = 0.0,
    validation: Iterable[Any] | None = None,
    curvature_steps: int | None = None,
    engine: Engine = Simulate(),
    hooks: Sequence[Any] = (),
    throw: bool = False,
) -> Influence:
    """Every example's and client's influence at the task's params, which training found (`trained.task`).

    With a weight w for each example, 1 as given and 0 where it is removed, the change of Σ_k F_k is predicted by

        −n · d F̄ / dw

    (Koh and Liang, arXiv:1703.04730; equation 12 of Terashita and Hara, arXiv:2210.02129).

    **Use it** to find examples that hurt everyone, such as wrong labels. **Avoid it** for large groups, where straight
    lines fall short: `group_score` takes a Newton step. `retrain` says what is true.

    Args:
        task: A trained or solved task whose inner cost returns one loss per example (`trained.task`, `solution.task`,
            `hp.load(path, task=task).result.task`). Its hypers, whatever they are, stay as they are.
        method: An estimator with a global target. `ITDBackward` takes the task before training.
        network: Who can send to whom, and when.
        key: An integer or a JAX key.
        damping: Added to the mean Hessian, 0 or more. Where that is indefinite, `warnings` say how much is needed.
        validation: Validation examples to score for, one by one: pairs (client, number), or a client for all of its.
            With k of them the one estimate has k + 1 right-hand sides: it sends and computes k + 1 times as much in
            about as many rounds, and holds k + 1 vectors where it held one. Choose some, or take some at a time.
        curvature_steps: Products per client for a look at the curvature, for `warnings`; 0: no look. None: 50 steps,
            unless the estimator sees negative curvature itself (`Automatic`, `TreeCG`, `Dense`) and saw none.
        engine: Where the clients run; the curvature is looked at without its faults. One party does not look: among
            parties, a run is one program.
        hooks: Observers called between compiled chunks.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        An `Influence` with the changes by example and by client.

    Raises:
        InvalidInput: An argument is out of range, or the inner cost returns a scalar.

    Example:
        Three clients fit a mean. Only the second one's last number is off, and everybody pays for it.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def loss(x, hyper, numbers):
        ...     return (x - numbers) ** 2
        >>> train = jnp.array([[1.0, 1.0], [1.0, 7.0], [1.0, 1.0]])
        >>> task = hp.Task(inner=loss, outer=loss, params=2.0, hypers=0.0, train=train, validation=jnp.ones((3, 2)))
        >>> network = hp.networks.FullyConnected(3)
        >>> found = hp.influence.scores(task, hp.hypergradients.Dense(), network, key=0)
        >>> found.top(1)
        [(1, 1)]

        For the third client's first validation example alone, each of the 1s is worth as much as the others:

        >>> one = hp.influence.scores(task, hp.hypergradients.Dense(), network, key=0, validation=[(2, 0)])
        >>> [own.round(3).tolist() for own in one.by_validation]
        [[[0.333, 0.333]], [[0.333, -1.667]], [[0.333, 0.333]]]
    """
    _check(method, damping)
    check_integer("curvature_steps", curvature_steps, minimum=0, optional=True)
    made = with_weights(task).with_l2(damping)  # ½δ‖x‖² adds δ to the Hessian, and nothing to derivatives by weights
    places = [] if validation is None else find_places(task, validation)
    runs = split_validation(task, made, places) if places else made
    estimate = hypergradient(runs, method, network, key=key, engine=engine, hooks=hooks)
    costs, found = estimate.costs, None
    if curvature_steps is None:
        sees_itself = estimate.status.singular is not None and estimate.status.reason != "ill-posed"
        curvature_steps = 0 if sees_itself else LOOK
    if curvature_steps and not engine.hosts_one:
        found, more = measure_curvature(task, network, key, steps=curvature_steps, engine=engine)
        costs = costs + more
    by_run, clients = _changes(task, take_weights(estimate.value) if places else estimate.value, bool(places))
    all_of_them, each = tuple(own[0] for own in by_run), tuple(own[1:] for own in by_run)
    about = (damping, found, estimate, tuple(places), each)
    return Influence(task, estimate.status, costs, all_of_them, clients, *about).check(throw)


def _changes(
    task: Task, value: Weights, is_multi_seed: bool
) -> tuple[list[Float[np.ndarray, "runs _"]], Float[np.ndarray, " n"]]:
    """Every client's predicted changes by run and example, and in the first run that of the client itself."""
    examples, clients = (-task.clients * np.asarray(each, np.float64) for each in (value.examples, value.client))
    if not is_multi_seed:
        examples, clients = examples[..., None], clients[..., None]
    if task.owner is not None:
        examples, clients, counts = examples[None], clients[None], [int(count(task.train))]
    else:
        counts = example_counts(task.train)
    return [own[:size].T for own, size in zip(examples, counts, strict=True)], clients[:, 0]


class _Pulled(eqx.Module):
    """A penalty with pullᵀx added, whose derivative by the pull is the solution of the estimator's system."""

    penalty: Penalty | None

    def __call__(self, params: PyTree, hyper: tuple[Weights, PyTree]) -> Float[Array, ""]:
        numbers = eqx.filter(params, eqx.is_inexact_array)  # a module has other leaves, too
        pull = jnp.asarray(optax.tree.vdot(hyper[1], numbers))
        return pull if self.penalty is None else self.penalty(params, hyper[0]) + pull


class _Gone(eqx.Module):
    """What weights other than 1 change of an inner cost or penalty."""

    function: Cost | Penalty

    def __call__(self, params: PyTree, hyper: Weights, *batch: PyTree) -> Float[Array, "..."]:
        ones = Weights(jnp.ones_like(hyper.examples), jnp.ones_like(hyper.client), hyper.own)
        return self.function(params, hyper, *batch) - self.function(params, ones, *batch)


@no_type_check
def group_score(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    weights: Weights,
    *,
    key: PRNGKeyArray | int,
    damping: float = 0.0,
    engine: Engine = Simulate(),
) -> float:
    """The predicted change of Σ_k F_k when all `weights` together go from 1 to what they are here (see `without`).

        Σ_k F_k(x + Δ) − F_k(x),   (Σ_k H_k(w)) Δ = −Σ_k ∂_x[f_k(x, w_k) − f_k(x, 1)]

    Params move by a Newton step of what is left, and each client looks at its F there. The sum of single scores takes
    the Hessians of everything and straight lines, and falls short for large groups (Koh, Ang, Teo and Liang,
    arXiv:1905.13289).

    **Use it** for groups and whole clients. **Avoid it** for every single example: each call takes one estimate.
    Clients with nothing left have no curvature: take `TrackedHGP(acceleration=0)` for them.

    Args:
        task: A trained task whose inner cost returns one loss per example.
        method: An estimator with a global target.
        network: Who can send to whom, and when.
        weights: What is left, such as `hp.influence.without(task, [(0, 3), (1, 2)])`.
        key: An integer or a JAX key.
        damping: Added to the mean Hessian, 0 or more.
        engine: Where the clients run.

    Returns:
        The predicted change; below 0 if the group hurts everyone.

    Raises:
        InvalidInput: An argument is out of range, or the weights belong to another task or leave nobody.
        NotConverged: What is left has a singular or indefinite Hessian, and the estimator sees it.

    Example:
        Removing the number 7 moves the mean from 2 to 1, where the loss of all three clients is 0 instead of 1.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def loss(x, hyper, numbers):
        ...     return (x - numbers) ** 2
        >>> train = jnp.array([[1.0, 1.0], [1.0, 7.0], [1.0, 1.0]])
        >>> task = hp.Task(inner=loss, outer=loss, params=2.0, hypers=0.0, train=train, validation=jnp.ones((3, 2)))
        >>> network, weights = hp.networks.FullyConnected(3), hp.influence.without(task, [(1, 1)])
        >>> round(hp.influence.group_score(task, hp.hypergradients.Dense(), network, weights, key=0), 3)
        -3.0
    """
    _check(method, damping)
    made = with_weights(task)
    check_weights(task, [weights])
    if not np.any(weights.client):
        raise InvalidInput("weights", "no client is left", "weights that leave at least one client")
    damped = made.with_l2(damping)
    pull = jax.tree.map(jnp.zeros_like, task.params)
    moved_task = damped.replace(
        inner=Chosen(damped.inner, take_weights),
        penalty=_Pulled(damped.penalty),
        outer=Chosen(_Gone(made.inner), take_weights),
        outer_penalty=made.penalty and Chosen(_Gone(made.penalty), take_weights),
        _hypers=PerClient((weights, pull)),
        by_example=(*made.by_example, *(False for _ in jax.tree.leaves(pull))),
        outer_on="train",
    )
    step = hypergradient(moved_task, method, network, key=key, engine=engine)
    step.check(throw=step.status.reason == "ill-posed")
    moved = jax.tree.map(lambda x, d: x + network.clients * d, task.params, step.value[1])
    both = jax.tree.map(lambda *x: jnp.stack(x, axis=1), task.params, moved)
    before, after = np.asarray(outer_costs(task, both), np.float64).T
    return float(np.sum(after - before))


def _check(method: Any, damping: float) -> None:
    if isinstance(method, HypergradientEstimator) and method.info.target != "global":
        allowed = "an estimator whose target is global: everybody's outer cost"
        raise InvalidInput("method", type(method).__name__, allowed)
    check_nonnegative("damping", damping)
    if damping and getattr(method, "trains", False):
        raise InvalidInput("damping", damping, f"0 for {type(method).__name__}: it would train another problem")
