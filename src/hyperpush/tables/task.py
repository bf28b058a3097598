"""Make a task from tables: split and scaled records, a linear model, and its L2 rate as the hyper."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hyperpush.base.checks import check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.networks import Network
from hyperpush.tables.heads import LinearHead
from hyperpush.tables.scaling import Scaling, constant_features, share_scaling
from hyperpush.tables.split import deal
from hyperpush.task.task import Task
from hyperpush.verbs.checks import check_key, check_network_kind

SETS = ("train", "validation", "test")
HEADS = {"softmax": "classes", "regression": "numbers"}


class TableTask(Task):
    """A task made from tables, with the `scaling` that turns features of raw rows into inputs of its model.

    Args:
        scaling: Means and deviations that all parties share.
        given: The arguments of `Task`.
    """

    def __init__(self, *, scaling: Scaling, given: dict[str, Any]):
        self.scaling = scaling
        super().__init__(**given)


class RecordLoss(eqx.Module):
    """Cost of a `TableTask`: the linear model's loss of each record, times the weight of the record."""

    head: LinearHead

    def __call__(self, params: PyTree, hyper: PyTree, batch: Any) -> Float[Array, " m"]:
        inputs, labels, weight = batch
        return weight * self.head.losses(params, inputs, labels)


class Rate(eqx.Module):
    """Penalty of a `TableTask`: the linear model's penalty at the L2 rate exp(hyper)."""

    head: LinearHead

    def __call__(self, params: PyTree, hyper: Float[Array, ""]) -> Float[Array, ""]:
        return self.head.penalty(params, jnp.exp(hyper))


def split_rows(tables: Any, split: Sequence[float], key: Any) -> list[dict[str, np.ndarray]]:
    """Return the numbers of each party's rows by data set, for a split with these shares."""
    shares = list(split) if isinstance(split, Sequence) and not isinstance(split, str) else []
    numbers = all(isinstance(each, int | float) and each >= 0 for each in shares)
    if len(shares) != 3 or not numbers or min(shares[:2]) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise InvalidInput("split", split, "training, validation and test shares: sum 1, the first two above 0")
    generator, needed = generator_of(key), sum(share > 0 for share in shares)
    found = []
    for name, labels in zip(tables.names, tables.labels, strict=True):
        if len(labels) < needed:
            raise InvalidInput(f"party {name!r}", f"{len(labels)} records", f"at least {needed}, one for each set")
        dealt = deal(labels, shares, generator)
        found.append({each: np.nonzero(dealt == k)[0] for k, each in enumerate(SETS) if shares[k] > 0})
    return found


def generator_of(key: Any) -> np.random.Generator:
    """Return the NumPy generator that a JAX key or an integer seeds."""
    return np.random.default_rng(np.asarray(jax.random.key_data(check_key(key))).tolist())


def make_task(
    tables: Any,
    sets: Sequence[dict[str, np.ndarray]],
    network: Network,
    *,
    key: Any,
    head: str | None,
    l2: float,
    weights: str,
    engine: Any,
) -> TableTask:
    """Return the task of tables whose rows are split into `sets`, by party and data set; see `Tables.task`."""
    _check(tables, network, head, weights)
    check_positive("l2", l2)
    inputs = [own[rows["train"]] for own, rows in zip(tables.inputs, sets, strict=True)]
    numbers = tables.schema.kind == "numbers"
    labels = [own[rows["train"]] for own, rows in zip(tables.labels, sets, strict=True)] if numbers else None
    scaling = share_scaling(inputs, labels, network, key, engine)
    if not scaling.kept.any():
        raise InvalidInput("tables", "only constant columns", "at least one column that varies")
    made = LinearHead.of(tables.schema, int(scaling.kept.sum()))
    given: dict[str, Any] = {
        "inner": RecordLoss(made),
        "outer": RecordLoss(made),
        "penalty": Rate(made),
        "params": made.start(),
        "hypers": jnp.asarray(np.log(l2), jnp.zeros(()).dtype),
        "names": tables.names,
        **{name: _examples(tables, sets, name, scaling, weights) for name in sets[0]},
    }
    return TableTask(scaling=scaling, given=given)


def left_out(tables: Any, scaling: Scaling) -> list[str]:
    """Return features that vary over all records and are constant in the training rows: models leave them out.

    `tables.warnings` already name features that never vary.
    """
    never = constant_features(np.concatenate(tables.inputs))
    kept = zip(tables.schema.features, scaling.kept | never, strict=True)
    return [name for name, told in kept if not told]


def _check(tables: Any, network: Any, head: str | None, weights: str) -> None:
    check_network_kind(network)
    if network.clients != len(tables.names):
        raise InvalidInput("network", f"{network.clients} clients", f"{len(tables.names)}, one per party")
    if head is not None and HEADS.get(head) != tables.schema.kind:
        fits = next(name for name, kind in HEADS.items() if kind == tables.schema.kind)
        raise InvalidInput("head", head, f"{fits!r} for {tables.schema.kind}, or None")
    if weights not in ("examples", "parties"):
        raise InvalidInput("weights", weights, "'examples' or 'parties'")


def _examples(tables: Any, sets: Any, name: str, scaling: Scaling, weights: str) -> list[Any]:
    """Return scaled inputs, labels and weights of one data set, by party."""
    counts = np.array([len(rows[name]) for rows in sets])
    factor = counts / counts.mean() if weights == "examples" else np.ones(len(counts))
    kind, found = jnp.zeros(()).dtype, []
    for k, rows in enumerate(sets):
        own = rows[name]
        made = (
            scaling.apply(tables.inputs[k][own]),
            scaling.apply_label(tables.labels[k][own]),
            np.full(len(own), factor[k]),
        )
        found.append(tuple(np.asarray(each, kind) for each in made))
    return found
