"""Running sums on faulty links, for messages whose total must be conserved; see `compiled/lossy.py`."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

NEVER = jnp.iinfo(jnp.int32).max


class Totals(eqx.Module):
    """The running sums of every link (sender, receiver) for one sending node of a program.

    Axis 0 of each sum holds its two parts (high, low).
    """

    sums: PyTree  # σ: sum of all that the sender put on the link, leaves [2, n, n, …]
    taken: PyTree  # ρ: the newest σ that the receiver got, leaves [2, n, n, …]
    taken_step: Int[Array, "n n"]  # step in which that σ was sent; −1: none yet
    past: PyTree  # σ as sent in each of the last delay+1 exchanges, leaves [delay+1, 2, n, n, …]
    past_step: Int[Array, " depth"]  # step of each of these exchanges; −1: none yet
    due: Int[Array, "depth n n"]  # step at which the message of that exchange arrives; NEVER: lost or not sent

    @staticmethod
    def start(message: PyTree[jax.ShapeDtypeStruct], clients: int, delay: int) -> "Totals":
        def zeros(*lead):
            return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), message)

        links, depth = (clients, clients), delay + 1
        return Totals(
            sums=zeros(2, *links),
            taken=zeros(2, *links),
            taken_step=jnp.full(links, -1),
            past=zeros(depth, 2, *links),
            past_step=jnp.full((depth,), -1),
            due=jnp.full((depth, *links), NEVER),
        )

    def restart(self) -> "Totals":
        """Return totals reset to their initial values."""
        zero = jax.tree.map(jnp.zeros_like, self)
        return replace(
            zero, taken_step=zero.taken_step - 1, past_step=zero.past_step - 1, due=jnp.full_like(self.due, NEVER)
        )

    def in_flight(self) -> PyTree:
        """Return the sum over all links of what was sent and not yet received, Σ_links (σ − ρ)."""
        return jax.tree.map(lambda sums, taken: jnp.sum(difference(sums, taken), axis=(0, 1)), self.sums, self.taken)


def difference(a: Array, b: Array) -> Array:
    """Return a − b for two sums stored as (high, low)."""
    return (a[0] - b[0]) + (a[1] - b[1])


def two_sum(sums: Array, x: Array) -> Array:
    """Return the sum (high, low) + x; the rounding error of `high` goes into `low` (Knuth's two-sum)."""
    high, low = sums
    total = high + x
    rest = total - high
    return jnp.stack([total, low + ((high - (total - rest)) + (x - rest))])
