"""A client's examples, and mini-batches of them.

A client's data are a pytree whose leaves have the examples on axis 0 (one client's view; stacked data have the client
axis before it). `ragged` stacks clients with different numbers of examples: it pads their arrays, and counts the real
examples. Costs are computed on a batch: the examples themselves, or a `Batch` with a mask of the real examples.
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data.promise import promise_single

# Largest size s of a mini-batch that is drawn by a loop, which makes s² comparisons. For larger mini-batches, sorting
# all of a client's rows takes less time.
MOST_DRAWN = 1024


class Data(eqx.Module):
    """A client's data sets by name, with properties for the data of the inner and of the outer level.

    The inner cost uses `train`, and the outer level fits `outer`.

    Args:
        sets: Examples by the name of the data set; `train` is one of them.
        outer_on: The data set that the outer level fits.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> data = hp.extend.Data.pair(train=jnp.ones(5), validation=jnp.zeros(3))
        >>> data.train.shape, data.outer.shape
        ((5,), (3,))
    """

    sets: dict[str, PyTree]
    outer_on: str = eqx.field(static=True, default="validation")

    @property
    def train(self) -> PyTree:
        return self.sets["train"]

    @property
    def outer(self) -> PyTree:
        return self.sets[self.outer_on]

    @staticmethod
    def pair(train: PyTree, validation: PyTree) -> "Data":
        """Return `Data` with training examples, and with examples that the outer level fits."""
        return Data({"train": train, "validation": validation})


class Ragged(eqx.Module):
    """Padded examples of clients that own different numbers of them, and each client's number of real examples.

    `hp.extend.ragged` makes it; a task makes it from a list of clients.

    Args:
        examples: A pytree whose leaves have the clients on axis 0 and the examples on axis 1, padded with zeros.
        counts: Number of real examples of each client.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.extend.ragged([jnp.ones(2), jnp.ones(3)]).examples.tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """

    examples: PyTree
    counts: Int[Array, "..."]


class Numbered(eqx.Module):
    """Examples with their numbers in the client's data, by which a mini-batch finds the hypers of its examples.

    `weight` is the factor of the client's cost, the same for all its examples; None if all clients have equal weight.
    """

    number: Int[Array, "*clients m"]
    examples: PyTree
    weight: Float[Array, "*clients m"] | None = None


class Batch(eqx.Module):
    """Examples with a mask, which is 1 for real examples and 0 for padding.

    Costs that return one loss per example never see the mask. A cost that is not a mean over examples requests it with
    `hp.Batch.cost(function)`. Then the function is called as `function(params, hyper, batch)` with a `Batch`.

    Args:
        examples: A pytree of examples, on axis 0.
        mask: 1 for real examples, 0 for padding.

    Example:
        The largest loss is not a mean, so this cost has to leave padding out by itself.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def largest(x, hyper, batch):
        ...     return jnp.max(batch.mask * (batch.examples - x) ** 2)
        >>> rows = [jnp.ones(4), 3 * jnp.ones(2)]  # two clients
        >>> task = hp.Task(inner=hp.Batch.cost(largest), outer=lambda x, h, a: (x - h - a) ** 2, params=0.0, hypers=0.0,
        ...                train=rows, validation=rows)
        >>> hp.train(task, hp.LocalSGD(steps=30, step_size=0.4), hp.networks.Ring(2), key=0).params.round(2).tolist()
        [1.0, 3.0]
    """

    examples: PyTree
    mask: Float[Array, " b"]

    def mean(self, values: Float[Array, " b"]) -> Float[Array, ""]:
        """Return the mean over real examples of one value per example."""
        return jnp.sum(self.mask * values) / jnp.maximum(jnp.sum(self.mask), 1)

    @staticmethod
    def cost(function: Callable[..., Float[Array, ""]]) -> "BatchCost":
        """Mark a cost that takes a `Batch` and returns a scalar."""
        return BatchCost(function)


class BatchCost(eqx.Module):
    """A cost that takes a `Batch`, because it is not a mean over examples."""

    function: Callable[..., Float[Array, ""]]

    def __call__(self, params: PyTree, hyper: PyTree, batch: Batch) -> Float[Array, ""]:
        return self.function(params, hyper, batch)


def open_batch(batch: PyTree) -> tuple[PyTree, Float[Array, " b"] | None, Int[Array, " b"] | None]:
    """Return the examples of a batch, the mask of real examples, and the numbers of the examples.

    The mask is None if all examples are real. The numbers are None if examples are not numbered.
    """
    mask = None
    if isinstance(batch, Batch):
        batch, mask = batch.examples, batch.mask
    if isinstance(batch, Numbered):
        return batch.examples, mask, batch.number
    return batch, mask, None


def weight_of(batch: PyTree) -> Float[Array, ""] | None:
    """Return the factor of the client's cost in a batch; None if all clients have equal weight."""
    inside = batch.examples if isinstance(batch, Batch) else batch
    return None if not isinstance(inside, Numbered) or inside.weight is None else inside.weight[0]


def number_examples(data: PyTree, *, one: bool = False, weights: Float[Array, "*clients"] | None = None) -> PyTree:
    """Give each example its number and its client's weight; data of `one` client lack the client axis."""
    inside = data.examples if isinstance(data, Ragged) else data
    shape = jax.tree.leaves(inside)[0].shape[: 1 if one else 2]
    repeated = None if weights is None else jnp.broadcast_to(weights[..., None], shape)
    numbered = Numbered(jnp.broadcast_to(jnp.arange(shape[-1]), shape), inside, repeated)
    return Ragged(numbered, data.counts) if isinstance(data, Ragged) else numbered


def ragged(clients: Sequence[PyTree], field: str = "data") -> Ragged:
    """Stack one pytree of examples per client; clients may have different numbers of examples.

    Args:
        clients: The examples of each client, on axis 0 of every leaf.
        field: Name of the data in error messages.

    Raises:
        InvalidInput: A client is without examples, or has examples of another structure or shape than client 0.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> made = hp.extend.ragged([np.ones((2, 3)), np.ones((5, 3))])
        >>> made.examples.shape, made.counts.tolist()
        ((2, 5, 3), [2, 5])
    """
    if not clients:
        raise InvalidInput(field, clients, "at least one client's examples")
    first, structure = jax.tree.flatten(clients[0])
    leaves, shapes = [], [np.shape(leaf)[1:] for leaf in first]
    for number, client in enumerate(clients):
        own, found = jax.tree.flatten(client)
        if found != structure:
            raise InvalidInput(f"{field} of client {number}", found, f"the structure {structure}")
        leaves.append([np.asarray(leaf) for leaf in own])
        _check_own(f"{field} of client {number}", leaves[-1], shapes)
    counts = np.array([len(own[0]) for own in leaves])
    stacked = [jnp.asarray(_stack_padded(parts, int(counts.max()))) for parts in zip(*leaves, strict=True)]
    return Ragged(structure.unflatten(stacked), jnp.asarray(counts))


def _stack_padded(parts: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Copy arrays into the rows of one array, padded with zeros to `most` examples each."""
    dtype = np.result_type(*{part.dtype for part in parts})
    stacked = np.zeros((len(parts), most, *parts[0].shape[1:]), dtype)
    for row, part in zip(stacked, parts, strict=True):
        row[: len(part)] = part
    return stacked


def _check_own(where: str, leaves: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise `InvalidInput` for a client without examples, or with examples of other shapes than those of client 0."""
    sizes = [leaf.shape[0] for leaf in leaves]
    if sizes[0] == 0:
        raise InvalidInput(where, "0 examples", "at least 1 example per client")
    if len(set(sizes)) > 1:
        raise InvalidInput(where, sizes, "the same number of examples in each leaf")
    for leaf, shape in zip(leaves, shapes, strict=True):
        if leaf.shape[1:] != shape:
            allowed = f"examples of shape {shape}, as at client 0; arrays of all clients are a tuple, not a list"
            raise InvalidInput(where, f"examples of shape {leaf.shape[1:]}", allowed)


def capacity(data: PyTree) -> int:
    """Return the number of rows of one client's examples, including padding."""
    return jax.tree.leaves(data.examples if isinstance(data, Ragged) else data)[0].shape[0]


def count(data: PyTree) -> Int[Array, ""] | int:
    """Return the number of one client's examples."""
    return data.counts if isinstance(data, Ragged) else capacity(data)


def full_batch(data: PyTree) -> PyTree:
    """Return one client's full batch.

    Args:
        data: One client's examples, or its part of `Ragged` data.

    Returns:
        The examples; a `Batch` for `Ragged` data, which may have padding.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.extend.full_batch(jnp.arange(3)).tolist()
        [0, 1, 2]
    """
    if isinstance(data, Ragged):
        real = jnp.arange(capacity(data)) < data.counts
        return Batch(data.examples, real.astype(jnp.zeros(()).dtype))
    return data


def shuffle(data: PyTree, key: PRNGKeyArray) -> Int[Array, " m"]:
    """Return the numbers of one client's examples in random order, with padding last."""
    order = jax.random.uniform(key, (capacity(data),))
    if isinstance(data, Ragged):
        order = jnp.where(jnp.arange(order.shape[0]) < data.counts, order, jnp.inf)
    return jnp.argsort(order)


def rows(data: PyTree, order: Int[Array, " b"], start: Int[Array, ""] | int = 0) -> PyTree:
    """Return the examples with the numbers in `order`, which are distinct.

    `order` is a slice, which begins at position `start`, of a permutation of all rows with padding last, such as
    `shuffle` returns.
    """
    if isinstance(data, Ragged):
        real = start + jnp.arange(order.shape[0]) < data.counts
        return Batch(_pick(data.examples, order), real.astype(jnp.zeros(()).dtype))
    return _pick(data, order)


def _pick(examples: PyTree, order: Int[Array, " b"]) -> PyTree:
    return promise_single(jax.tree.map(lambda leaf: leaf[order], examples))  # the numbers in `order` are distinct


def minibatch(data: PyTree, size: int | None, key: PRNGKeyArray) -> PyTree:
    """Draw `size` of one client's examples, uniformly without replacement; None takes all.

    A client with fewer examples gives all of them. Only the drawn rows are gathered; the data stay where they are.
    Every set of `size` examples is equally likely, but their order in the batch is not random.

    Args:
        data: One client's examples, or its part of `Ragged` data.
        size: Examples of the mini-batch, at least 1; None takes all.
        key: Random key of the draw.

    Raises:
        InvalidInput: The leaves have different numbers of examples.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.extend.minibatch(jnp.arange(10), 4, jax.random.key(0)).shape
        (4,)
    """
    if size is None:
        return full_batch(data)
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(getattr(data, "examples", data))}
    if len(lengths) != 1:
        raise InvalidInput("batch", size, "None: these data lack a common axis of examples to draw from")
    if size >= capacity(data):
        return full_batch(data)
    return rows(data, _draw(count(data), size, key) if size <= MOST_DRAWN else shuffle(data, key)[:size])


def _draw(count: Int[Array, ""] | int, size: int, key: PRNGKeyArray) -> Int[Array, " b"]:
    """Draw `size` of `count` numbers, uniform over sets (Floyd's sampling: Bentley and Floyd 1987).

    Draw r takes one of the first m = count − size + r + 1 numbers, or the m-th number if that one is already taken.
    The draw depends on the number of real examples, not on padding. If there are at most `size` real examples, all of
    them come first.
    """
    place = jnp.arange(size)
    last = jnp.maximum(count - size, 0) + place
    tried = jax.random.randint(key, (size,), 0, last + 1)

    def pick(r: Int[Array, ""], picks: Int[Array, " b"]) -> Int[Array, " b"]:
        return picks.at[r].set(jnp.where(jnp.any(picks == tried[r]), last[r], tried[r]))

    picks = jax.lax.fori_loop(0, size, pick, jnp.full(size, -1))
    return jnp.where(count > size, picks, place)
