"""Faulty links in the vectorised simulator: what arrives in time, and running sums for what must not be lost.

Per link j→i the sender keeps the total σ of all shares it ever put on it and sends that total; the receiver keeps the
total ρ it has taken in, and on arrival of a newer total takes σ − ρ (Hadjicostis, Vaidya, Domínguez-García 2016).
Whatever is lost, late, repeated or reordered, Σ_i w_i + Σ_links (σ − ρ) does not change. Totals grow while
their differences matter, so they are kept as unevaluated sums (high, low) of two floats.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.engines.faults import Faults
from hyperpush.engines.placement import alive_rows, weight_rows
from hyperpush.networks import Links


class Fates(NamedTuple):
    """For messages sent now, by (sender, receiver, copy)."""

    arrives: Bool[Array, "b n 2"]
    delays: Int[Array, "b n 2"]


def fates(faults: Faults, key: PRNGKeyArray, step: Int[Array, ""], senders: Int[Array, " b"], clients: int) -> Fates:
    return Fates(*jax.vmap(lambda sender: faults.fates(key, step, sender, clients))(senders))


def in_time(links: Links, fate: Fates, clients: int) -> tuple[Links, Int[Array, ""]]:
    """The links over which a message sent now arrives now, and the number of messages that will come too late."""
    now = jnp.any(fate.arrives & (fate.delays == 0), axis=2)
    late = fate.arrives & (fate.delays > 0) & alive_rows(links, clients)[:, :, None]
    if links.targets is not None:
        now = jnp.take_along_axis(now, links.targets, axis=1)
    alive = links.alive & now
    return Links(links.own, jnp.where(alive, links.weights, 0), alive, links.targets), jnp.sum(late, dtype=jnp.int32)


class Totals(eqx.Module):
    """The running sums of every link (sender, receiver) at one place of a program."""

    high: PyTree  # σ, leaves [n, n, …]
    low: PyTree
    taken_high: PyTree  # ρ
    taken_low: PyTree
    taken_step: Int[Array, "n n"]  # step of the newest total taken; −1: none
    past_high: PyTree  # σ as sent in the last delay+1 exchanges, leaves [delay+1, n, n, …]
    past_low: PyTree
    past_step: Int[Array, " depth"]
    due: Int[Array, "depth n n"]  # step at which the message of that exchange arrives; NEVER: lost or not sent

    @staticmethod
    def start(message: PyTree[jax.ShapeDtypeStruct], clients: int, delay: int) -> "Totals":
        def zeros(*lead):
            return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), message)

        links, depth = (clients, clients), delay + 1
        return Totals(
            high=zeros(*links),
            low=zeros(*links),
            taken_high=zeros(*links),
            taken_low=zeros(*links),
            taken_step=jnp.full(links, -1),
            past_high=zeros(depth, *links),
            past_low=zeros(depth, *links),
            past_step=jnp.full((depth,), -1),
            due=jnp.full((depth, *links), NEVER),
        )

    def restarted(self) -> "Totals":
        """As at the start."""
        zero = jax.tree.map(jnp.zeros_like, self)
        return Totals(
            high=zero.high,
            low=zero.low,
            taken_high=zero.taken_high,
            taken_low=zero.taken_low,
            taken_step=zero.taken_step - 1,
            past_high=zero.past_high,
            past_low=zero.past_low,
            past_step=zero.past_step - 1,
            due=zero.due + NEVER,
        )

    def in_flight(self) -> PyTree:
        """Σ_links (σ − ρ): what has been sent and not yet taken in."""
        return jax.tree.map(
            lambda h, low, th, tl: jnp.sum((h - th) + (low - tl), axis=(0, 1)),
            self.high,
            self.low,
            self.taken_high,
            self.taken_low,
        )


NEVER = jnp.iinfo(jnp.int32).max


def push(totals: Totals, links: Links, fate: Fates, message: PyTree, step: Int[Array, ""]) -> tuple[PyTree, Totals]:
    """Put everyone's shares on the links, deliver what is due; the sum each client takes in, and the new totals."""
    n = links.own.shape[0]
    alive, share = alive_rows(links, n), weight_rows(links, n)

    def add(high, low, m):
        return two_sum(high, low, share.reshape(n, n, *(1,) * (m.ndim - 1)) * m[:, None])

    pairs = jax.tree.map(add, totals.high, totals.low, message)
    high, low = unzip(pairs, totals.high)
    copies = jnp.where(fate.arrives, step + fate.delays, NEVER)
    due_now = jnp.where(alive, jnp.min(copies, axis=2), NEVER)

    def shift(past, new):
        return jnp.concatenate([past[1:], new[None]])

    past_high, past_low = jax.tree.map(shift, totals.past_high, high), jax.tree.map(shift, totals.past_low, low)
    past_step, due = shift(totals.past_step, step), shift(totals.due, due_now)
    # The newest exchange whose message has arrived by now, per link.
    arrived = due <= step
    depth = past_step.shape[0]
    newest = jnp.max(jnp.where(arrived, jnp.arange(depth)[:, None, None], -1), axis=0)
    take = (newest >= 0) & (past_step[newest] > totals.taken_step)

    def pick(past, taken):
        index = newest.reshape(1, n, n, *(1,) * (past.ndim - 3))
        chosen = jnp.take_along_axis(past, jnp.maximum(index, 0), axis=0)[0]
        return jnp.where(take.reshape(n, n, *(1,) * (past.ndim - 3)), chosen, taken)

    taken_high = jax.tree.map(pick, past_high, totals.taken_high)
    taken_low = jax.tree.map(pick, past_low, totals.taken_low)
    received = jax.tree.map(
        lambda h, low, th, tl: jnp.sum((h - th) + (low - tl), axis=0),
        taken_high,
        taken_low,
        totals.taken_high,
        totals.taken_low,
    )
    taken_step = jnp.where(take, past_step[newest], totals.taken_step)
    return received, Totals(high, low, taken_high, taken_low, taken_step, past_high, past_low, past_step, due)


def two_sum(high: Array, low: Array, x: Array) -> tuple[Array, Array]:
    """(high, low) + x without losing what does not fit into `high` (Knuth's two-sum)."""
    total = high + x
    rest = total - high
    return total, low + ((high - (total - rest)) + (x - rest))


def unzip(pairs: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    leaves = jax.tree.structure(like).flatten_up_to(pairs)
    structure = jax.tree.structure(like)
    return structure.unflatten([p[0] for p in leaves]), structure.unflatten([p[1] for p in leaves])
