"""Changes of each client's outer cost when a party or a group of records leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Bool, Float, PyTree

from hyperpush.base import panels
from hyperpush.base.panels import Panel
from hyperpush.base.status import AROUND, Status
from hyperpush.influence.weights import Weights
from hyperpush.task.task import Task
from hyperpush.verbs.results import Result

LARGE = 0.1  # share of the weight above which a party's curvature changes the mean Hessian too much for first order
HOW = {"newton": "a Newton step", "retrain": "retraining", "first order": "first order"}
SHOWN = 3  # groups in a printed line


@dataclass(frozen=True, repr=False)
class Effects(Result):
    """Changes of every client's outer cost F_j when a group of parties, records or both leaves.

    Attributes:
        by_site: The change of each client's F_j without each group, [groups, clients]. Above 0 the client's loss rises,
            so the group helps it. One party's result has only the row of its own leaving.
        leaves: True where a client leaves with a group, [groups, clients].
        how: Method of the prediction: `"newton"`, `"retrain"` or `"first order"`.
        baseline: F_j with all clients, [clients]. In one party's result the entries of other clients are NaN.
        params: Params without each group, groups on axis 0 and clients on axis 1; None at first order.
        baseline_params: Params with all clients, clients on axis 0.
        statuses: One status per group after retraining; empty otherwise.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.logistic(clients=3, seed=0), hp.networks.Ring(3)
        >>> leaving = [hp.influence.without(task, clients=[client]) for client in range(3)]
        >>> found = hp.influence.retrain(task, hp.TreeNewton(), network, leaving, key=0)
        >>> found.by_site.shape, found.others.shape, found.params.shape[:2]
        ((3, 3), (3,), (3, 3))
    """

    by_site: Float[np.ndarray, "k n"]
    leaves: Bool[np.ndarray, "k n"]
    how: str
    baseline: Float[np.ndarray, " n"]
    params: PyTree = None
    baseline_params: PyTree = None
    statuses: tuple[Status, ...] = ()

    def __len__(self) -> int:
        return len(self.by_site)

    @property
    def others(self) -> Float[np.ndarray, " k"]:
        """The change of the summed F_j of all clients that stay. Above 0 the group helps them, below 0 it hurts."""
        return np.sum(np.where(self.leaves, 0, self.by_site), axis=1)

    @property
    def total(self) -> Float[np.ndarray, " k"]:
        """The change of the summed F_j of all clients.

        For a party that leaves, F_j is its loss under the model of the remaining clients.
        """
        return np.sum(self.by_site, axis=1)

    @property
    def losses(self) -> Float[np.ndarray, "k n"]:
        """F_j of every client after each group has left, [groups, clients]."""
        return self.baseline + self.by_site

    def task_of(self, group: int) -> Task:
        """Return the task at the params without a group; at first order, at the params with all clients."""
        if self.params is None:
            return self.task
        return self.task.at(params=jax.tree.map(lambda leaf: leaf[group], self.params))

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the effects; an empty list if there are none."""
        return [*warn_of_status(self.status), *self.warn_of_shares()]

    def warn_of_shares(self) -> list[str]:
        """Return a warning if effects are of first order and a party has too much weight for this."""
        shares = self.task.shares
        if self.how != "first order" or shares is None:
            return []
        large = [name for name, share in zip(self.task.names, shares, strict=True) if share > LARGE]
        if not large:
            return []
        named = ", ".join(large[:SHOWN]) + (f" and {len(large) - SHOWN} more" if len(large) > SHOWN else "")
        return [
            f"Effects of parties are at first order, and {named} hold more than a tenth of the weight each: signs may "
            "be wrong. Ask for parties='newton' or parties='retrain'."
        ]

    def facts(self) -> list[str]:
        return [*super().facts(), *self.sentences()]

    def sentences(self) -> list[str]:
        """Return the name of the method, and one line on each of the largest effects."""
        order = np.argsort(-np.abs(self.others), kind="stable")
        more = [f"{len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return [f"by {HOW[self.how]}", *(self.sentence(row) for row in order[:SHOWN]), *more]

    def own_panels(self) -> list[Panel]:
        note, sites = f"Above 0: the others lose without it, so it helps. By {HOW[self.how]}.", self.task.names
        rows = [self._name(group) for group in range(len(self))]
        marks = ["helps" if change > 0 else "hurts" for change in self.others]
        title = "Change of the others' validation losses"
        labels = {"row_label": "leaves", "column_label": "is affected"}
        return [
            panels.bars(title, rows, {"": self.others}, marks=marks, note=note),
            panels.heat("Change of each site's loss, by who leaves", rows, sites, self.by_site, **labels),
        ]

    def _name(self, group: int) -> str:
        """Return the names of parties that leave with a group; the group's number if only records leave."""
        named = [self.task.names[client] for client in np.flatnonzero(self.leaves[group])]
        named = [f"client {name}" if name.isdigit() else name for name in named]
        return " and ".join(named) if named else f"group {group}"

    def sentence(self, group: int) -> str:
        """Return one line that says by how much a group helps or hurts the other clients."""
        change, who = self.others[group], self._name(group)
        if not change:
            return f"without {who} nothing changes for the others"
        goes, verdict = ("rises", "helps") if change > 0 else ("falls", "hurts")
        return f"without {who} the others' loss {goes} by {abs(change):.2g} ({who} {verdict})"


def warn_of_status(status: Status) -> list[str]:
    """Return the warning of the printed status, if it has one, and a warning if the params are not an optimum.

    Away from an optimum, effects of a removal mix with effects of further training.
    """
    said = [str(status).removeprefix("! ")] if status.converged is False else []
    if status.residual is None or status.disagreement is None or status.residual + status.disagreement <= AROUND:
        return said
    return [
        *said,
        f"The params are not an optimum: a Newton step moves them by {status.residual:.2g}, clients disagree by "
        f"{status.disagreement:.2g}. Train to the end first, for example with hp.TreeNewton().",
    ]


def leaving(weights: Sequence[Weights]) -> Bool[np.ndarray, "k n"]:
    """Return a mask that is True where a client leaves with a group."""
    return np.stack([np.asarray(each.client) == 0 for each in weights])


def join(parts: Sequence[Effects], count: int) -> Effects:
    """Join the effects of several lists of groups into one result, and keep its first `count` groups."""

    def cut(*leaves: Any) -> np.ndarray:
        return np.concatenate([np.asarray(leaf) for leaf in leaves])[:count]

    first, params = parts[0], [each.params for each in parts]
    changes: dict[str, Any] = {
        "status": Status.of_all([each.status for each in parts]),
        "costs": sum((each.costs for each in parts[1:]), first.costs),
        "by_site": cut(*(each.by_site for each in parts)),
        "leaves": cut(*(each.leaves for each in parts)),
        "params": jax.tree.map(lambda *leaves: cut(*leaves) if eqx.is_array(leaves[0]) else leaves[0], *params),
        "statuses": tuple(status for each in parts for status in each.statuses)[:count],
    }
    return replace(first, **changes)
