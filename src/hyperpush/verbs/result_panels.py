"""Make the panels that results of all verbs share: status, costs, history, hypers by client, and the network."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from hyperpush.base import panels
from hyperpush.base.panels import Panel
from hyperpush.base.status import EXPLAINED, Status
from hyperpush.networks import Network
from hyperpush.runs.models import leaf_name
from hyperpush.verbs.costs import Costs

SMALL = 64  # networks of at most this many clients are drawn
ENTRIES = 64  # an array with at most this many numbers per client is shown number by number
UNITS = {
    "rounds": "rounds of communication",
    "floats": "numbers sent by each client (a message to several receivers counts once)",
    "bytes": "bytes sent by a client, on average",
    "largest_bytes": "bytes sent by the client that sent most",
    "gradients": "gradients computed by each client",
    "hessian_products": "Hessian products computed by each client",
    "jacobian_products": "Jacobian products computed by each client",
}


def status_panel(status: Status) -> Panel:
    """Return the panel of a status: sentences with the verdict, its cause, and the numbers that led to it."""
    tone: Any = {True: "good", False: "bad", None: "plain"}[status.converged]
    return panels.text("Status", *status_words(status), tone=tone)


def status_words(status: Status) -> list[str]:
    """Return sentences on the reliability of the result, with reasons."""
    if status.converged:
        said = ["The result converged: the method met its tolerance."]
        if status.reason == "early-stopping":
            said = ["The run was stopped by its metric; its estimates converged."]
    elif status.converged is None:
        said = ["The method takes a fixed number of steps and does not measure its own error."]
    else:
        said = [f"The result did not converge: {EXPLAINED.get(status.reason, status.reason)}."]
    facts = {
        "Estimated relative error: up to {:.2g}.": status.error,
        "Distance of the params from solving the inner problem: {:.2g} of their size.": status.residual,
        "Disagreement among the clients' params: {:.2g} of their size.": status.disagreement,
        "Change of the hypergradient after one more Newton step: {:.2g}.": status.moved,
    }
    said += [sentence.format(value) for sentence, value in facts.items() if value is not None]
    if status.runs > 1:
        some = f"{status.failed} of {status.runs} solves and estimates did not converge."
        said.append(some if status.failed else f"It covers {status.runs} solves and estimates.")
    return [*said, f"Estimator: {status.chosen}."] if status.chosen else said


def costs_panel(costs: Costs) -> Panel:
    """Return a table of all counts in the costs that are not 0, each with its meaning."""
    rows = [[UNITS[each.name], getattr(costs, each.name)] for each in fields(costs) if each.name in UNITS]
    rows += [[f"of these, on the data set {name!r}", count] for name, count in costs.accesses.items()]
    return panels.table("Costs", ("quantity", "count"), [row for row in rows if row[1]])


def privacy_panel(budget: Any) -> list[Panel]:
    """Return a list with a panel on the releases of a private run; empty for a task that is not private."""
    return [] if budget is None else [panels.text("Privacy", f"{str(budget).capitalize()}.", budget.assumes)]


def history_panels(columns: Mapping[str, np.ndarray], spread: Mapping[str, np.ndarray]) -> list[Panel]:
    """Return one panel of lines for each column of a history: its mean over clients by step.

    Columns named in `spread` also get a band from the smallest to the largest value of a client.
    """
    steps = columns["step"]
    if len(steps) < 2:
        return []
    made = []
    for name, mean in columns.items():
        if name in ("step", "rounds", "floats"):
            continue
        low, high = _band(spread.get(name))
        title = {"cost": "Outer cost by step", "hypergradient_norm": "Size of the hypergradient by step"}
        mean = mean if mean.ndim == 1 else mean.mean(axis=tuple(range(1, mean.ndim)))
        log = name == "hypergradient_norm" and spans_decade(mean)
        note = "The line is the mean over clients; the band spans the clients." if low else ""
        named = {"mean over clients": mean}
        made.append(
            panels.lines(title.get(name, f"{name} by step"), steps, named, low=low, high=high, log=log, note=note)
        )
    return made


def spans_decade(values: np.ndarray) -> bool:
    """Return True if all values are positive and the largest exceeds 10 times the smallest: use a logarithmic axis."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() > 10 * known.min())


def _band(values: np.ndarray | None) -> tuple[Any, Any]:
    """Return the smallest and the largest value in every row of [rows, clients]; None for a single client."""
    if values is None or values.ndim != 2 or values.shape[1] < 2:
        return None, None
    return {"mean over clients": values.min(axis=1)}, {"mean over clients": values.max(axis=1)}


def by_client(title: str, names: Sequence[str], tree: PyTree) -> list[Panel]:
    """Return one panel for each numeric leaf of a tree with clients on axis 0.

    A leaf with one number per client becomes bars, up to 64 numbers a heat map, and more numbers a table of ranges.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "shape") or not np.issubdtype(leaf.dtype, np.number) or leaf.ndim == 0:
            continue
        name = leaf_name(path)
        found.append(leaf_panel(f"{title}: {name}" if name else title, names, np.asarray(leaf, np.float64)))
    return found


def leaf_panel(title: str, names: Sequence[str], values: np.ndarray) -> Panel:
    """Return the panel of one array [clients, …]: bars, a heat map or a table of ranges, depending on its size."""
    rows = values.reshape(len(values), -1)
    if rows.shape[1] == 1:
        return panels.bars(title, names, {"": rows[:, 0]})
    if 0 < rows.shape[1] <= ENTRIES:
        numbers = [str(number) for number in range(rows.shape[1])]
        return panels.heat(title, names, numbers, rows, row_label="client", column_label="entry")
    ranges = [
        [name, own.size, *map(float, (own.min(), own.mean(), own.max()))] if own.size else [name, 0, None, None, None]
        for name, own in zip(names, rows, strict=True)
    ]
    return panels.table(title, ("client", "numbers", "least", "mean", "largest"), ranges)


def network_panel(network: Network, names: Sequence[str]) -> Panel:
    """Return the panel of a network: a drawing that shows how often each link is up; above 64 clients a sentence."""
    kind = type(network).__name__
    title = f"Network: {kind}"
    if network.clients > SMALL:
        count = network.possible().nnz // (1 if network.directed else 2)
        return panels.text(title, f"{network.clients} clients, {count} possible links.")
    up = np.asarray(network.frequencies(), float)
    pairs = [(i, j) for i, j in zip(*np.nonzero(up), strict=True) if i != j and (network.directed or i < j)]
    names = names if len(names) == network.clients else [str(number) for number in range(network.clients)]
    links = [(int(i), int(j), round(float(up[i, j]), 4)) for i, j in pairs]
    return panels.network(title, names, links, directed=network.directed)
