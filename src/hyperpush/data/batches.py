"""A client's examples, and mini-batches of them.

A client's data are a pytree whose leaves have the examples on axis 0 (one client's view; stacked data have the client
axis before it). Clients that own different numbers of examples are stacked by `ragged`, which pads and counts; costs
then receive a `Batch` that knows which examples are real.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.errors import InvalidInput


class Data(eqx.Module):
    """What a client keeps: examples of its inner cost and examples of its outer cost."""

    inner: PyTree
    outer: PyTree


class Ragged(eqx.Module):
    """Examples of clients that own different numbers of them: padded leaves, and how many are real."""

    examples: PyTree
    counts: Int[Array, "..."]


class Batch(eqx.Module):
    """Examples of which only those with mask 1 are real."""

    examples: PyTree
    mask: Float[Array, " b"]

    def mean(self, values: Float[Array, " b"]) -> Float[Array, ""]:
        """The mean of one value per example over the real ones."""
        return jnp.sum(self.mask * values) / jnp.maximum(jnp.sum(self.mask), 1)


def ragged(clients: Sequence[PyTree]) -> Ragged:
    """Stack one pytree of examples per client; each may have its own number of examples."""
    if not clients:
        raise InvalidInput("clients", clients, "at least one client's examples")
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(client)] for client in clients]
    structure = jax.tree.structure(clients[0])
    for number, client in enumerate(clients):
        if jax.tree.structure(client) != structure:
            raise InvalidInput(f"data of client {number}", jax.tree.structure(client), f"the structure {structure}")
    counts = [own[0].shape[0] for own in leaves]
    for number, (own, count) in enumerate(zip(leaves, counts, strict=True)):
        if count == 0:
            raise InvalidInput(f"data of client {number}", "0 examples", "at least 1 example per client")
        if any(leaf.shape[0] != count for leaf in own):
            raise InvalidInput(
                f"data of client {number}", [leaf.shape[0] for leaf in own], "the same number of examples in each leaf"
            )
    longest = max(counts)

    def stacked(position: int) -> np.ndarray:
        parts = [own[position] for own in leaves]
        out = np.zeros((len(parts), longest, *parts[0].shape[1:]), np.result_type(*parts))
        for row, part in zip(out, parts, strict=True):
            row[: len(part)] = part
        return out

    examples = structure.unflatten([jnp.asarray(stacked(position)) for position in range(len(leaves[0]))])
    return Ragged(examples, jnp.asarray(counts))


def capacity(data: PyTree) -> int:
    """Rows of one client's examples, padding included."""
    return jax.tree.leaves(data.examples if isinstance(data, Ragged) else data)[0].shape[0]


def count(data: PyTree) -> Int[Array, ""] | int:
    """How many examples one client owns."""
    return data.counts if isinstance(data, Ragged) else capacity(data)


def everything(data: PyTree) -> PyTree:
    """One client's full batch."""
    if isinstance(data, Ragged):
        real = jnp.arange(capacity(data)) < data.counts
        return Batch(data.examples, real.astype(jnp.zeros(()).dtype))
    return data


def shuffled(data: PyTree, key: PRNGKeyArray) -> Int[Array, " m"]:
    """One client's example numbers in random order, padding last."""
    order = jax.random.uniform(key, (capacity(data),))
    if isinstance(data, Ragged):
        order = jnp.where(jnp.arange(order.shape[0]) < data.counts, order, jnp.inf)
    return jnp.argsort(order)


def rows(data: PyTree, order: Int[Array, " b"], start: Int[Array, ""] | int = 0) -> PyTree:
    """The examples at `order`, the `start`-th and following of a shuffle."""
    if isinstance(data, Ragged):
        real = start + jnp.arange(order.shape[0]) < data.counts
        return Batch(jax.tree.map(lambda leaf: leaf[order], data.examples), real.astype(jnp.zeros(()).dtype))
    return jax.tree.map(lambda leaf: leaf[order], data)


def draw(data: PyTree, size: int | None, key: PRNGKeyArray) -> PyTree:
    """`size` of one client's examples, uniformly without replacement; all of them for `None`.

    A client that owns fewer gives all it has. Only the drawn rows are gathered; the data stay where they are.
    """
    if size is None:
        return everything(data)
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(getattr(data, "examples", data))}
    if len(lengths) != 1:
        raise InvalidInput("batch", size, "None: these data have no common axis of examples to draw from")
    return rows(data, shuffled(data, key)[:size])
