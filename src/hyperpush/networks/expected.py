"""Predict the rounds and floats of averages along a tree and of gradient tracking, to choose between these methods.

An average along a tree waits for particular links. On random sparse graphs each link is rarely up. There, gradient
tracking over push-sum takes a hundredth of the rounds, because it uses any link that is up.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import shortest_path

from hyperpush.networks.base import Network
from hyperpush.networks.remembered import remembered
from hyperpush.networks.trees import ROOT, WaitingTree

AVERAGES = 10  # averages in a run of conjugate gradients, as observed on logistic regression and quadratics
STEPS, VOTE = 75, 5  # steps of gradient tracking to the same error, and steps between votes on ending it
LOSSY_STEPS = 200  # steps of gradient tracking if messages get lost
MISSED = 5  # additional rounds of a flood until random links have missed no client
SLOWER = 3.0  # largest accepted ratio of the rounds of a tree to those of gradient tracking
MOST_BYTES = 1 << 31  # largest memory for planning a tree
PLAN_BYTES = 48  # memory for planning, per link that can ever be up


class Losses(NamedTuple):
    """Loss and delay of messages on links that are up."""

    loss: float = 0.0  # probability that all copies of a message are lost
    delay: float = 0.0  # mean rounds that a message is late


RELIABLE = Losses()


def tree_rounds(network: Network, losses: Losses = RELIABLE) -> float:
    """Return the expected rounds of one average along a tree on random links.

    If a link is up with probability p, the last of n clients waits about ln n / −ln(1 − p) rounds longer than the
    mean. A lost message is sent again after the longest round trip. The number of such repetitions is the number of
    losses on the longest path, or of losses of the unluckiest client if that is larger.
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
    """Rounds in which values spread over a network if clients use every link that is up."""

    mixing: int  # rounds of push-sum that shrink differences between clients about threefold
    flood: int  # rounds until a number has reached all clients


def spreading(network: Network) -> Spreading:
    """Return estimates of the rounds in which a network mixes values and spreads a number to all clients.

    If each client has d random receivers, differences shrink by √(d + 1) per round. On other networks values spread
    like heat: the rounds are proportional to the square of the longest path.
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
    """Return True if averages of `size` numbers along a tree suit this network better than gradient tracking.

    A tree may take up to three times the rounds of tracking. It may take more only if it saves floats in the same
    proportion. `losses=None` means reliable links: clients vote on the end of tracking, and averages on a scheduled
    network wait for no link. With losses, tracking takes a fixed number of steps, each as long as a flood.
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
    learned = 0 if network.scheduled else 3 * network.clients  # frequencies sent to the root, and parents sent back
    floats = (learned + 3 * AVERAGES * size) / (2 * pushes * size)
    return rounds <= SLOWER or rounds * floats <= SLOWER


def _depth(parents: np.ndarray) -> int:
    """Return the number of links on the longest path along a tree to the root."""
    place, depth = np.arange(len(parents)), 0
    while np.any(place != ROOT):
        place, depth = parents[place], depth + 1
    return depth


def _last(clients: int, probability: float) -> float:
    """Return how many rounds after the first the last client waits for an event with this probability per round."""
    return math.log(clients) / -math.log1p(-probability) if probability < 1 else 0.0
