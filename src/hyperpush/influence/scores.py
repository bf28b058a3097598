"""Predict how the losses of all clients change if a training example, or a whole client, is left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from hyperpush.base import panels
from hyperpush.base.checks import check_integer, no_type_check
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.panels import Panel
from hyperpush.base.status import Status
from hyperpush.data.batches import count, full_batch
from hyperpush.data.sets import example_counts
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.influence.curvature import Curvature, measure_curvature, resolution
from hyperpush.influence.effects import Effects, warn_of_status
from hyperpush.influence.groups import check_estimator, step_groups
from hyperpush.influence.removal import retrain
from hyperpush.influence.stacked import outer_costs, take_weights
from hyperpush.influence.validation import damped_task, find_places, split_outer
from hyperpush.influence.weights import Place, Weights, with_weights, without
from hyperpush.inner.tree_newton import TreeNewton
from hyperpush.networks import Network
from hyperpush.task.task import Task
from hyperpush.verbs.checks import check_task
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.hypergradient import hypergradient
from hyperpush.verbs.results import Estimate, Result

WORST = 10  # records in a panel
LOOK = 50  # Lanczos steps of the curvature check
FEW = 32  # most clients for which parties="auto" computes effects of parties, with one linear system per client
WAYS = ("newton", "retrain", "first order")


@dataclass(frozen=True, repr=False)
class Influence(Result):
    """Predicted changes of validation losses when records or parties leave.

    Each client computes the changes by its own records from vectors, not from records of others. One party's result
    holds only the changes by its own records and by its own leaving.

    Attributes:
        examples: One array per client. It holds, for each training example, the change at first order of Σ_k F_k if
            this example is removed.
        totals: For each client, the change of Σ_k F_k if its cost and penalty are removed. The sum still includes its
            own F_i. The change is of first order, so with few parties its sign is often wrong: see `clients`.
        parties: The effects of whole parties on each client; None without `parties`.
        damping: The number added to the diagonal of the mean Hessian.
        curvature: The ends of the spectrum of the mean Hessian without damping; None if it was not checked.
        estimate: The hypergradient by all weights.
        validation: The requested validation examples, as pairs (client, number).
        by_validation: One array per client, [validation examples, training examples]. It holds the change of the loss
            of each requested validation example if a training example is removed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.logistic(clients=3, seed=0), hp.networks.FullyConnected(3)
        >>> trained = hp.train(task, hp.TreeNewton(), network, key=0).task
        >>> found = hp.influence.scores(trained, hp.hypergradients.ImplicitCG(steps=20), network, key=0)
        >>> client, number = found.top(1)[0]
        >>> bool(abs(found.examples[client][number]) == max(abs(own).max() for own in found.examples))
        True
    """

    examples: tuple[Float[np.ndarray, " _"], ...]
    totals: Float[np.ndarray, " n"]
    parties: Effects | None
    damping: float
    curvature: Curvature | None
    estimate: Estimate
    validation: tuple[Place, ...] = ()
    by_validation: tuple[Float[np.ndarray, "k _"], ...] = ()

    @property
    def clients(self) -> Float[np.ndarray, " n"]:
        """For each client, the change of the *other* clients' summed F if it leaves.

        Above 0 the client helps the others, below 0 it hurts them.
        """
        return self._parties.others

    @property
    def by_site(self) -> Float[np.ndarray, "n n"]:
        """The change of each client's F if a client leaves, [leaving client, affected client]."""
        return self._parties.by_site

    @property
    def _parties(self) -> Effects:
        if self.parties is None:
            raise InvalidInput("parties", None, f"scores(…, parties='newton'), one of {', '.join(WAYS)}")
        return self.parties

    def ranking(self, client: str | int) -> Int[np.ndarray, " m"]:
        """Return the numbers of the client's examples, the most harmful first.

        Removing the most harmful example lowers the summed loss of all clients most.
        """
        number = self.task.client(client)
        if number not in self._numbers:
            raise InvalidInput("client", client, f"{self.names[0]!r}: the result holds only this client")
        return np.argsort(self.examples[self._numbers.index(number)], kind="stable")

    def top(self, count: int) -> list[Place]:
        """Return the `count` examples of all clients with the largest predicted changes, in either direction."""
        check_integer("count", count, minimum=0)
        rows = zip(self._numbers, self.examples, strict=True)
        places = [(client, number) for client, own in rows for number in range(len(own))]
        order = np.argsort(-np.abs(np.concatenate(self.examples)), kind="stable")[:count]
        return [places[place] for place in order]

    def worst(self, count: int) -> list[Place]:
        """Return the `count` examples of all clients whose removal lowers the loss most, without helpful examples."""
        check_integer("count", count, minimum=0)
        rows = zip(self._numbers, self.examples, strict=True)
        hurting = [(own[number], client, int(number)) for client, own in rows for number in np.flatnonzero(own < 0)]
        return [(client, number) for _, client, number in sorted(hurting)[:count]]

    @property
    def _numbers(self) -> list[int]:
        """Return the numbers of the clients that have scores in this result."""
        return list(range(self.task.clients)) if self.task.owner is None else [self.task.owner]

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the predictions, including those in the printed status; an empty list if there are none."""
        said = warn_of_status(self.status) + self._warn_of_curvature()
        if self.parties is None:
            return said
        return said + (self.parties.warn_of_shares() if said else self.parties.warnings)

    def _warn_of_curvature(self) -> list[str]:
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

    def facts(self) -> list[str]:
        count = sum(map(len, self.examples))
        hurting = sum(int(np.sum(own < 0)) for own in self.examples)
        parties = [] if self.parties is None else self.parties.sentences()
        return [*super().facts(), f"{count} examples", f"{hurting} hurt everyone", *parties]

    def own_panels(self) -> list[Panel]:
        note = "Below 0: the loss of all falls without the record, so it hurts."
        names = list(self.task.names)
        rows = [
            [names[client], number, self.examples[self._numbers.index(client)][number]]
            for client, number in self.worst(WORST)
        ]
        return [
            *([panels.text("Warnings", *self.warnings, tone="bad")] if self.warnings else []),
            *([] if self.parties is None else self.parties.own_panels()),
            panels.table("Records that hurt most", ("client", "record", "change if removed"), rows, note=note),
            *([self._validation_panel()] if self.validation else []),
        ]

    def _validation_panel(self) -> Panel:
        """Return a table with the record that changes each requested validation loss most, largest changes first."""
        changes = np.concatenate(self.by_validation, axis=1)
        sizes = map(len, self.examples)
        places = [(client, number) for client, size in zip(self._numbers, sizes, strict=True) for number in range(size)]
        most, names = np.argmax(np.abs(changes), axis=1), self.task.names
        found = np.take_along_axis(changes, most[:, None], axis=1)[:, 0]
        rows = []
        for row in np.argsort(-np.abs(found), kind="stable")[:WORST]:
            (asked, example), (client, record) = self.validation[row], places[most[row]]
            rows.append([names[asked], example, names[client], record, found[row]])
        columns = ("validation client", "validation example", "client", "record", "change if removed")
        note = "The change of the loss of the validation example alone; below 0 the record hurts it."
        more = len(self.validation) - len(rows)
        note += f" {more} more examples with smaller changes are not shown." if more else ""
        return panels.table("Records that change single validation losses most", columns, rows, note=note)


@no_type_check
def scores(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    damping: float = 0.0,
    parties: Literal["auto", "newton", "retrain", "first order"] | None = "auto",
    validation: Iterable[Any] | None = None,
    curvature_steps: int | None = None,
    engine: Engine = Simulate(),
    hooks: Sequence[Any] = (),
    throw: bool = False,
) -> Influence:
    """Predict how validation losses change if a record or a party leaves, at the params of a trained task.

    Every training example gets a weight w: 1 keeps the example, 0 removes it. With n clients and the mean outer cost
    F̄, the predicted change of Σ_k F_k by the removal is

        −n · d F̄ / dw

    (Koh and Liang, arXiv:1703.04730; equation 12 of Terashita and Hara, arXiv:2210.02129).

    The prediction is of first order, which falls short for whole parties. `parties` therefore chooses how to find their
    effects on each other client: by a Newton step without the party, or by retraining.

    **Use it** to find examples that hurt all clients, such as wrong labels, and the effect of each party on each other
    one. **Avoid it** for large groups of records: `group_score` takes a Newton step. `retrain` gives the true effect.

    Args:
        task: A trained or solved task whose inner cost returns one loss per example (`trained.task`, `solution.task`,
            `hp.load(path, task=task).result.task`). Its hypers, of any kind, stay fixed.
        method: An estimator with a global target. `ITDBackward` needs the task before training.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key.
        damping: Number added to the diagonal of the mean Hessian, 0 or more. If the mean Hessian is indefinite,
            `warnings` name the necessary damping.
        parties: Method for the effects of whole parties on each other client. `"newton"`: a Newton step without each
            party. All steps take one more estimate, which sends and computes n times as much for n clients.
            `"retrain"`: `hp.TreeNewton()` without each party, from these params; exact, and best for few params.
            `"first order"`: n more right-hand sides in the estimate for the records; wrong for parties with much of the
            weight. None: no effects of parties. `"auto"`: `"newton"` for up to 32 clients, all hosted here; else None.
        validation: Validation examples whose single losses are predicted, too: pairs (client, number), or a client for
            all of its examples; None: none. With k examples the estimate has k + 1 right-hand sides. It sends and
            computes k + 1 times as much, in about as many rounds. It holds k + 1 vectors in place of each one. Choose a
            few, or a few at a time.
        curvature_steps: Lanczos steps that check the curvature for `warnings`, each with one product per client; 0: no
            check. None: 50, or 0 if the estimator detects negative curvature itself (`Automatic`, `TreeCG`, `Dense`)
            and found none.
        engine: The engine that runs the clients; the curvature is checked without its faults. A single party skips this
            check, because a run among parties is one program.
        hooks: Observers called between compiled chunks.
        throw: Raise `hp.NotConverged` instead of returning a result that did not converge.

    Returns:
        An `Influence` with the changes by example and by client.

    Raises:
        InvalidInput: An argument is out of range, or the inner cost returns a scalar.

    Example:
        Three clients fit a mean. Only the second client's last number is wrong, which raises the loss of all clients.

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

        For the loss of the third client's first validation example alone, all training numbers 1 have equal scores:

        >>> one = hp.influence.scores(task, hp.hypergradients.Dense(), network, key=0, validation=[(2, 0)])
        >>> [own.round(3).tolist() for own in one.by_validation]
        [[[0.333, 0.333]], [[0.333, -1.667]], [[0.333, 0.333]]]
    """
    check_task(task)
    check_estimator(method, damping)
    how = _way(parties, task, method, engine)
    check_integer("curvature_steps", curvature_steps, minimum=0, optional=True)
    made, places = with_weights(task), [] if validation is None else find_places(task, validation)
    sites = how == "first order"
    several = bool(places) or sites
    runs = split_outer(task, made, damping, places, sites) if several else damped_task(made, damping)
    estimate = hypergradient(runs, method, network, key=key, engine=engine, hooks=hooks)
    estimate = replace(estimate, value=take_weights(estimate.value))
    by_run, of_clients = _changes(task, estimate.value, several)
    found = _look(task, estimate, network, key, curvature_steps, engine)
    costs = estimate.costs if found is None else estimate.costs + found[1]
    if sites:
        by_site = of_clients[:, 1 + len(places) :]
        effects = Effects(task, estimate.status, Costs(), by_site, _own_rows(task), "first order", _baseline(task))
    else:
        effects = _party_effects(task, method, network, how, estimate.status, damping=damping, key=key, engine=engine)
    costs = costs if effects is None else costs + effects.costs
    examples = tuple(own[0] for own in by_run)
    each = tuple(own[1 : 1 + len(places)] for own in by_run)
    about = (effects, damping, found and found[0], estimate, tuple(places), each)
    return Influence(task, estimate.status, costs, examples, of_clients[:, 0], *about).check(throw)


def _look(
    task: Task, estimate: Estimate, network: Network, key: Any, steps: int | None, engine: Engine
) -> tuple[Curvature, Costs] | None:
    """Return the curvature and its costs; None if the check is skipped (see `curvature_steps` and `engine`)."""
    if steps is None:
        sees_itself = estimate.status.singular is not None and estimate.status.reason != "ill-posed"
        steps = 0 if sees_itself else LOOK
    return measure_curvature(task, network, key, steps=steps, engine=engine) if steps and not engine.hosts_one else None


def _way(parties: Any, task: Task, method: HypergradientEstimator, engine: Engine) -> str | None:
    """Return the method for effects of parties, None for no effects; raise `InvalidInput` for an unsuitable one."""
    if parties not in (*WAYS, "auto", None):
        raise unknown("parties", str(parties), (*WAYS, "auto"))
    cannot = engine.hosts_one or method.trains
    if parties == "auto":
        return None if cannot or task.clients > FEW else "newton"
    if parties in ("newton", "retrain") and cannot:
        where = "among parties, whose run is one program" if engine.hosts_one else f"with {type(method).__name__}"
        raise InvalidInput("parties", f"{parties!r} {where}", "'first order' or None")
    return parties


def _party_effects(
    task: Task, method: HypergradientEstimator, network: Network, how: str | None, judged: Status, **options: Any
) -> Effects | None:
    """Return the effects of each party by a Newton step or retraining; None if not requested or for one client."""
    if how is None or task.clients < 2:
        return None
    weights = [without(task, clients=[client]) for client in range(task.clients)]
    if how == "retrain":
        options.pop("damping")
        return retrain(task, TreeNewton(), network, weights, **options)
    found = step_groups(task, method, network, weights, certify=False, **options)
    # The estimate for the records has already judged the same params and the estimator.
    uncertified = found.status.reason == "not certified"
    status = replace(judged, error=found.status.error) if uncertified else found.status.judged(judged)
    return replace(found, status=status)


def _baseline(task: Task) -> Float[np.ndarray, " n"]:
    """Return F_j of every client at the task's params; in one party's task, NaN for all other clients."""
    if task.owner is None:
        return outer_costs(task, jax.tree.map(lambda leaf: leaf[None], task.params))[0]
    found = np.full(task.clients, np.nan)
    found[task.owner] = task.problem.outer_cost(task.params, task.hypers, full_batch(task.data.outer))
    return found


def _own_rows(task: Task) -> Bool[np.ndarray, "k n"]:
    """Return the mask of groups that hold one client each; one party's task has only the row of its own leaving."""
    rows = np.eye(task.clients, dtype=bool)
    return rows if task.owner is None else rows[task.owner : task.owner + 1]


def _changes(
    task: Task, value: Weights, several: bool
) -> tuple[list[Float[np.ndarray, "runs _"]], Float[np.ndarray, "n runs"]]:
    """Return the predicted changes by records, one array [runs, examples] per client, and by clients, [clients, runs].

    A run is one right-hand side of the estimate.
    """
    examples, clients = (-task.clients * np.asarray(each, np.float64) for each in (value.examples, value.client))
    if not several:
        examples, clients = examples[..., None], clients[..., None]
    if task.owner is not None:
        examples, clients, counts = examples[None], clients[None], [int(count(task.train))]
    else:
        counts = example_counts(task.train)
    return [own[:size].T for own, size in zip(examples, counts, strict=True)], clients
