"""Start values of params and hypers: the same for all clients, one per client, or one hyper per training example."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data import sets


@dataclass(frozen=True)
class PerClient:
    """Start values that differ between clients, with clients on axis 0; made by `hp.per_client`."""

    tree: PyTree


@dataclass(frozen=True)
class PerExample:
    """Start of hypers with one number per training example; made by `hp.per_example`."""

    start: float
    counts: tuple[int, ...] | None = None  # number of examples of each client; None if only a loader knows it


def per_client(tree: PyTree) -> PerClient:
    """Mark starts that differ between clients: a pytree whose leaves have the clients on axis 0.

    Args:
        tree: Params or hypers of all clients, in the form that `hp.Task` takes for one.

    Returns:
        A value for `params` or `hypers` of `hp.Task`, which checks that there is one row per client.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> rows, starts = jnp.ones((3, 8)), hp.per_client(jnp.array([0.0, 1.0, 2.0]))
        >>> task = hp.Task(inner=lambda x, h, a: (x - a) ** 2, outer=lambda x, h, a: (x - h - a) ** 2,
        ...                params=starts, hypers=0.0, train=rows, validation=rows)
        >>> task.params.tolist()
        [0.0, 1.0, 2.0]
    """
    return PerClient(tree)


def per_example(train: PyTree, start: float = 0.0) -> PerExample:
    """Make hypers with one number per training example, which all start at `start`.

    Costs get the hypers of the batch's examples, one for each loss. A client with fewer examples than others has
    padding: zeros after its own hypers, which costs do not use. Penalties get the padding, too. So they should be sums
    of terms whose value and derivative are 0 at 0, such as Σ h².

    Args:
        train: The training examples of the task.
        start: The start value of all hypers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs, targets = jnp.ones((3, 7, 2)), jnp.ones((3, 7))
        >>> def weighted(x, weight, batch):
        ...     return jax.nn.sigmoid(weight) * (batch[0] @ x - batch[1]) ** 2
        >>> def plain(x, weight, batch):
        ...     return (batch[0] @ x - batch[1]) ** 2
        >>> train = (inputs, targets)
        >>> task = hp.Task(inner=weighted, outer=plain, params=jnp.zeros(2), hypers=hp.per_example(train),
        ...                train=train, validation=train)
        >>> task.hypers.shape
        (3, 7)
    """
    if not jax.tree.leaves(train) and not isinstance(train, sets.Clients):
        raise InvalidInput("per_example.train", train, "the training examples")
    if not isinstance(start, int | float) or isinstance(start, bool) or not np.isfinite(start):
        raise InvalidInput("per_example.start", start, "a finite number")
    return PerExample(float(start), sets.given_counts(train))


def tree_of(start: Any) -> PyTree:
    """Return the pytree of start values; a `PerClient` start is unwrapped."""
    return start.tree if isinstance(start, PerClient) else start


def is_per_example(leaf: Any) -> bool:
    """Return True if a leaf of a start stands for one hyper per training example."""
    return isinstance(leaf, PerExample)


def split_start(field: str, given: Any) -> tuple[Any, Any]:
    """Return the numbers of a start as arrays, and the tree of its other leaves, or None without other leaves."""
    tree = tree_of(given)
    leaves = jax.tree.leaves(tree, is_leaf=is_per_example)
    if not leaves:
        raise InvalidInput(field, given, "at least one number")
    if isinstance(tree, type) or (callable(tree) and not isinstance(tree, eqx.Module)):
        raise InvalidInput(field, tree, f"{field} to start from, not a function that makes them")
    as_module = any(not _is_number(leaf) for leaf in leaves)  # plain numbers in modules are settings, as in Equinox
    wanted = eqx.is_inexact_array if as_module else _is_number
    numbers, other = eqx.partition(tree, wanted, is_leaf=is_per_example)
    if as_module and not jax.tree.leaves(numbers):
        raise InvalidInput(field, given, "a pytree of floating-point numbers")
    numbers = jax.tree.map(
        lambda leaf: leaf if is_per_example(leaf) else jnp.array(leaf), numbers, is_leaf=is_per_example
    )
    rest = other if jax.tree.leaves(other) else None
    return (PerClient(numbers) if isinstance(given, PerClient) else numbers), rest


def _is_number(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) or isinstance(leaf, np.ndarray | PerExample)
