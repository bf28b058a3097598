"""Faulty links in the vectorized simulator.

Ordinary messages count only if they arrive in time. Conserved quantities travel as running sums on each link j→i
(Hadjicostis, Vaidya, Domínguez-García 2016). The sender keeps the total σ of all shares that it ever put on the link,
and sends that total. The receiver keeps the newest total ρ that it has received. When a newer total σ arrives, it adds
σ − ρ to its value. All clients' values w_i and the shares still on the links add up to Σ_i w_i + Σ_links (σ − ρ). This
sum stays constant under lost, late, repeated and reordered messages.

Totals grow, but only their small differences matter. So each is stored as the unevaluated sum (high, low) of two
floats.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.engines.compiled.placement import alive_rows, weight_rows
from hyperpush.engines.faults import Faults
from hyperpush.engines.totals import NEVER, Totals, difference, two_sum
from hyperpush.networks import Links, Network
from hyperpush.networks.trees import Post, reliable_post


class Fates(NamedTuple):
    """Arrivals and delays of the messages of this step, by (sender, receiver, copy)."""

    arrives: Bool[Array, "b n 2"]
    delays: Int[Array, "b n 2"]


def fates(faults: Faults, key: PRNGKeyArray, step: Int[Array, ""], senders: Int[Array, " b"], clients: int) -> Fates:
    return Fates(*jax.vmap(lambda sender: faults.fates(key, step, sender, clients))(senders))


def in_time(links: Links, fate: Fates, clients: int) -> tuple[Links, Int[Array, ""]]:
    """Return the links on which this step's message arrives in this step, and the number of messages that are late."""
    now = jnp.any(fate.arrives & (fate.delays == 0), axis=2)
    late = fate.arrives & (fate.delays > 0) & alive_rows(links, clients)[:, :, None]
    if links.targets is not None:
        now = jnp.take_along_axis(now, links.targets, axis=1)
    alive = links.alive & now
    return Links(links.own, jnp.where(alive, links.weights, 0), alive, links.targets), jnp.sum(late, dtype=jnp.int32)


def post(network: Network, network_key: PRNGKeyArray, faults: Faults, key: PRNGKeyArray) -> Post:
    """Return the function that says which links are up, and when the first copy of a message arrives."""
    reliable = reliable_post(network, network_key)

    def one(step, senders, receivers):
        alive, _ = reliable(step, senders, receivers)
        fate = fates(faults, key, step, jnp.arange(network.clients), network.clients)
        edges = senders, receivers
        copies = jnp.where(fate.arrives[edges], step + fate.delays[edges], NEVER)
        return alive, jnp.where(alive, jnp.min(copies, axis=1), NEVER)

    return one


def push(totals: Totals, links: Links, fate: Fates, message: PyTree, step: Int[Array, ""]) -> tuple[PyTree, Totals]:
    """Add each client's shares to the totals of its links, and deliver the messages that are due.

    Return the sum that each client receives, and the new totals.
    """
    n = links.own.shape[0]
    alive, share = alive_rows(links, n), weight_rows(links, n)

    def add(sums, m):
        return two_sum(sums, share.reshape(n, n, *(1,) * (m.ndim - 1)) * m[:, None])

    def shift(past, new):
        return jnp.concatenate([past[1:], new[None]])

    sums = jax.tree.map(add, totals.sums, message)
    copies = jnp.where(fate.arrives, step + fate.delays, NEVER)
    due_now = jnp.where(alive, jnp.min(copies, axis=2), NEVER)
    past = jax.tree.map(shift, totals.past, sums)
    past_step, due = shift(totals.past_step, step), shift(totals.due, due_now)
    # The newest exchange whose message has arrived by now, per link.
    newest = jnp.max(jnp.where(due <= step, jnp.arange(past_step.shape[0])[:, None, None], -1), axis=0)
    take = (newest >= 0) & (past_step[newest] > totals.taken_step)

    def pick(past, taken):
        more = (1,) * (past.ndim - 4)
        chosen = jnp.take_along_axis(past, jnp.maximum(newest, 0).reshape(1, 1, n, n, *more), axis=0)[0]
        return jnp.where(take.reshape(n, n, *more), chosen, taken)

    taken = jax.tree.map(pick, past, totals.taken)
    received = jax.tree.map(lambda now, before: jnp.sum(difference(now, before), axis=0), taken, totals.taken)
    taken_step = jnp.where(take, past_step[newest], totals.taken_step)
    return received, Totals(sums, taken, taken_step, past, past_step, due)
