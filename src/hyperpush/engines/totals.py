"""Running sums of all links at one place of a program, stacked over senders and receivers."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

NEVER = jnp.iinfo(jnp.int32).max


class Totals(eqx.Module):
    """The running sums of every link (sender, receiver) at one place of a program; sums have axis 0 (high, low)."""

    sums: PyTree  # σ, leaves [2, n, n, …]
    taken: PyTree  # ρ
    taken_step: Int[Array, "n n"]  # step of the newest total taken; −1: none
    past: PyTree  # σ as sent in the last delay+1 exchanges, leaves [delay+1, 2, n, n, …]
    past_step: Int[Array, " depth"]
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
        """Return Σ_links (σ − ρ): the sum of all that was sent and not yet received."""
        return jax.tree.map(lambda sums, taken: jnp.sum(difference(sums, taken), axis=(0, 1)), self.sums, self.taken)


def difference(a: Array, b: Array) -> Array:
    """Return a − b of sums (high, low)."""
    return (a[0] - b[0]) + (a[1] - b[1])


def two_sum(sums: Array, x: Array) -> Array:
    """Return (high, low) + x, with the rounding error of `high` added to `low` (Knuth's two-sum)."""
    high, low = sums
    total = high + x
    rest = total - high
    return jnp.stack([total, low + ((high - (total - rest)) + (x - rest))])
