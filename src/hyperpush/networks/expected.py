"""Expected rounds and floats of averages along a tree, and of gradient tracking: which of the two a network suits.

A tree waits for particular links. Where any link is up rarely, as on random sparse graphs, gradient tracking over
push-sum takes a hundredth of the rounds, because it takes whatever links are up.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import shortest_path

from hyperpush.networks.base import Network
from hyperpush.networks.remembered import remembered
from hyperpush.networks.trees import ROOT, WaitingTree

AVERAGES = 10  # that conjugate gradients take, seen on logistic regression and quadratics
STEPS, VOTE = 75, 5  # of gradient tracking to the same error, and from one vote on its end to the next
LOSSY_STEPS = 200  # of gradient tracking where messages get lost
MISSED = 5  # rounds more that a flood takes until random links have missed nobody
SLOWER = 3.0  # times the rounds that a tree may take
MOST_BYTES = 1 << 31  # for planning a tree
PLAN_BYTES = 48  # for each link that can ever be up


class Losses(NamedTuple):
    """What happens to messages on links that are up."""

    loss: float = 0.0  # probability that all copies of a message are lost
    delay: float = 0.0  # mean rounds that a message is late


RELIABLE = Losses()


def tree_rounds(network: Network, losses: Losses = RELIABLE) -> float:
    """Return the expected rounds of one average along a tree on random links.

    The last of n clients waits longest: about ln n / −ln(1 − p) rounds more than the mean, where a link is up with
    probability p. A lost message is sent again after the longest round trip. So many follow each other as are lost on
    the longest way, or of the messages of the unluckiest client.
    """
    uniform, tree = network.uniform(), WaitingTree(network)
    if uniform is not None:
        hops, rounds = 2, 2 * (1 / uniform + _last(network.clients, uniform))
    else:
        frequencies, clients = network.frequencies(), np.arange(network.clients)
        other = clients[1:]
        used = np.concatenate([frequencies[other, tree.up[other]], frequencies[tree.down[other], other], [1.0]])
        hops = _depth(tree.up) + _depth(tree.down)
        rounds = tree.planned_rounds + 2 * _last(network.clients, max(float(used.min()), 1e-3))
    odds = losses.loss / (1 - losses.loss)
    unlucky = min(2 * network.clients * odds, 2 * _last(network.clients, 1 - losses.loss))
    return rounds + hops * losses.delay + tree.planned_rounds * max(hops * odds, unlucky)


def push_rounds(network: Network, error: float) -> int:
    """Return the rounds of push-sum after which every client's average has about this relative error."""
    shrunk = math.log(math.sqrt(network.clients) / error) / math.log(3)
    return math.ceil(shrunk * spreading(network).mixing)


class Spreading(NamedTuple):
    """Rounds on a network in which everybody uses whatever links are up."""

    mixing: int  # of push-sum that shrink differences between clients about threefold
    flood: int  # until a number has reached everybody


def spreading(network: Network) -> Spreading:
    """Return about how fast a network spreads numbers.

    Random links with d receivers each shrink differences by √(d + 1) in a round. Elsewhere they spread as heat does, in
    rounds in proportion to the square of the longest way.
    """
    uniform = network.uniform()
    if uniform is not None:
        receivers, hops = uniform * (network.clients - 1), 1
    else:
        frequencies = np.array(network.frequencies())
        np.fill_diagonal(frequencies, 0)
        ways = shortest_path(network.possible(), unweighted=True, indices=[ROOT])
        receivers, hops = float(frequencies.sum(axis=1).mean()), int(ways.max())
    growth = math.log(receivers + 1)
    mixing = max(math.log(3) / (0.5 * growth), hops**2 / 3)
    return Spreading(math.ceil(mixing), max(hops, math.ceil(math.log(network.clients) / growth)) + MISSED)


@remembered
def tree_pays(network: Network, size: int, losses: Losses | None = None) -> bool:
    """Return whether averages of `size` numbers along a tree are the better choice on this network.

    They are unless they take more than three times the rounds of gradient tracking, and do not send fewer floats in the
    same proportion. So they never take more than three times the rounds and more floats. `losses` are None on reliable
    links, where clients vote on the end of tracking, and follow a schedule without waiting. Elsewhere tracking takes a
    fixed number of steps, each as long as a flood.
    """
    if network.clients == 1 or (network.scheduled and losses is None):
        return True
    if network.uniform() is None and PLAN_BYTES * network.clients**2 > MOST_BYTES:
        return False
    if losses is None:
        mixing, flood = spreading(network)
        pushes, votes = STEPS * mixing, STEPS // VOTE * flood
    else:
        pushes, votes = LOSSY_STEPS * network.flood_rounds(), 0
    rounds = AVERAGES * tree_rounds(network, losses or RELIABLE) / (pushes + votes)
    learned = 0 if network.scheduled else 3 * network.clients  # rows of frequencies, on the way to the root and back
    floats = (learned + 3 * AVERAGES * size) / (2 * pushes * size)
    return rounds <= SLOWER or rounds * floats <= SLOWER


def _depth(parents: np.ndarray) -> int:
    """Return the number of links on the longest way along a tree to the root."""
    place, depth = np.arange(len(parents)), 0
    while np.any(place != ROOT):
        place, depth = parents[place], depth + 1
    return depth


def _last(clients: int, probability: float) -> float:
    """Return the rounds beyond the first that the last of the clients waits for an event of this probability."""
    return math.log(clients) / -math.log1p(-probability) if probability < 1 else 0.0
