"""Check that clients hear negative samples, which peers of BiG-Fed draw among the clients that they hear.

Strangers are clients that are not neighbors on the graph: the candidates for negative samples.
"""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hyperpush.base.errors import InvalidInput
from hyperpush.big_fed.cosine import Cosine, find_strangers
from hyperpush.networks import Network
from hyperpush.networks.links import densify

NAMED = 10  # clients that a message lists


def pairs_that_count(cosine: Cosine, round: int) -> Bool[np.ndarray, "n n"]:
    """Return the pairs of strangers that may push each other apart in a round.

    Both need a vector H other than 0, and one needs links on the graph, because clients draw negative samples for their
    links. Without self-loops only clients with links have such a vector, so both need links.
    """
    weights, here = cosine.graph.at(round)
    linked, far = np.asarray(weights).sum(1) > 0, np.asarray(find_strangers(weights, here))
    return far & (linked[:, None] | linked if cosine.self_loops else linked[:, None] & linked)


def audible(network: Network, step: int) -> Bool[np.ndarray, "n n"]:
    """Return the clients (columns) that each client (row) can hear at a step; on random links, can ever hear."""
    if network.period() == 1:
        return network.possible().toarray().T > 0
    links = network.links(jax.random.key(0), step, jnp.arange(network.clients))
    return np.asarray(densify(links, network.clients).alive).T


def pairs_that_hear(cosine: Cosine, network: Network, round: int, stride: int) -> Bool[np.ndarray, "n n"]:
    """Return the pairs of `pairs_that_count` whose first client can hear the second, after both heard a neighbor.

    Round k starts at network step k·stride with the neighbors' vectors; pairs are compared one step later.
    """
    near = np.asarray(cosine.graph.at(round)[0]) > 0
    shows = cosine.self_loops | ((near & audible(network, round * stride)).sum(1) > 0)
    return pairs_that_count(cosine, round) & audible(network, round * stride + 1) & shows[:, None] & shows


def without_negatives(
    cosine: Cosine, network: Network, iterations: int, stride: int
) -> tuple[Int[np.ndarray, " k"], int]:
    """Return the clients that have strangers but never hear one, and the number of clients that have strangers."""
    steps, wanted = len(cosine.graph.weights), np.zeros(cosine.graph.clients, bool)
    for k in range(min(iterations, steps) if cosine.negatives else 0):
        wanted |= pairs_that_count(cosine, k).any(1)
    found = ~wanted
    for k in range(min(iterations, math.lcm(steps, network.period()))):
        if found.all():
            break
        found |= pairs_that_hear(cosine, network, k, stride).any(1)
    return np.flatnonzero(~found), int(wanted.sum())


def check_strangers(cosine: Cosine, network: Network, iterations: int, stride: int) -> None:
    """Raise `InvalidInput` if no client ever hears a stranger; warn if only some clients never do.

    If no client hears a stranger, F only attracts neighbors, and is least where all clients are alike. If only some
    never do, the other clients still push the common hyper.
    """
    silent, wanted = without_negatives(cosine, network, iterations, stride)
    if not silent.size:
        return
    if silent.size == wanted:
        raise InvalidInput(
            "network",
            f"{network.name}, where no client ever hears a negative sample",
            "links over which clients hear their neighbors on the graph and others; or form 'products', or "
            "Cosine.negatives = 0",
        )
    more = f" and {silent.size - NAMED} more" if silent.size > NAMED else ""
    warnings.warn(
        f"clients {', '.join(map(str, silent[:NAMED]))}{more} of {wanted} never hear a negative sample on "
        f"{network.name}, so they are not pushed apart from others",
        stacklevel=2,
    )
