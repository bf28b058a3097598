"""Expected rounds and floats of averages along a tree, and of gradient tracking: which of the two a network suits.

A tree waits for particular links. Where any link is up rarely, as on random sparse graphs, gradient tracking over
push-sum takes a hundredth of the rounds, because it takes whatever links are up.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import shortest_path

from hyperpush.networks.base import Network
from hyperpush.networks.trees import ROOT, WaitingTree

AVERAGES = 10  # that conjugate gradients take, seen on logistic regression and quadratics
STEPS, VOTE = 75, 5  # of gradient tracking to the same error, and from one vote on its end to the next
MISSED = 5  # rounds more that a flood takes until random links have missed nobody
SLOWER = 3.0  # times the rounds that a tree may take
MOST_BYTES = 1 << 31  # for planning a tree
PLAN_BYTES = 48  # for each link that can ever be up


def tree_rounds(network: Network) -> float:
    """Return the expected rounds of one average along a tree on random links.

    The last of n clients waits longest: about ln n / −ln(1 − p) rounds more than the mean, where a link is up with
    probability p.
    """
    uniform = network.uniform()
    if uniform is not None:
        return 2 * (1 / uniform + _last(network.clients, uniform))
    tree, frequencies, clients = WaitingTree(network), network.frequencies(), np.arange(network.clients)
    other = clients[1:]
    used = np.concatenate([frequencies[other, tree.up[other]], frequencies[tree.down[other], other], [1.0]])
    return tree.planned_rounds + 2 * _last(network.clients, max(float(used.min()), 1e-3))


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


def tree_pays(network: Network, size: int) -> bool:
    """Return whether averages of `size` numbers along a tree are the better choice on this network.

    They are unless they take more than three times the rounds of gradient tracking, and do not send fewer floats in the
    same proportion. So they never take more than three times the rounds and more floats.
    """
    if network.scheduled or network.clients == 1:
        return True
    if network.uniform() is None and PLAN_BYTES * network.clients**2 > MOST_BYTES:
        return False
    mixing, flood = spreading(network)
    tracked = STEPS * mixing + STEPS // VOTE * flood
    rounds = AVERAGES * tree_rounds(network) / tracked
    learned = 3 * network.clients  # rows of frequencies, on the way to the root and back
    floats = (learned + 3 * AVERAGES * size) / (2 * STEPS * mixing * size)
    return rounds <= SLOWER or rounds * floats <= SLOWER


def _last(clients: int, probability: float) -> float:
    return math.log(clients) / -math.log1p(-probability) if probability < 1 else 0.0
