"""Means of a network over steps: frequencies and mean weights of its links."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Means(NamedTuple):
    """Means of a network over steps, from `network.means()`: row j belongs to sender j.

    No client of the network can observe them. Estimators that reverse links use them with `links="means"`.

    Args:
        weights: Mean weight from j (row) to i (column); the sender's own share is on the diagonal.
        up: Frequency of the link from j to i; 1 on the diagonal.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.DirectedRing(3).means().stationary().round(3))
        [1. 1. 1.]
    """

    weights: Float[np.ndarray, "n n"]
    up: Float[np.ndarray, "n n"]

    def stationary(self) -> Float[np.ndarray, " n"]:
        """Return ω* = E[P] ω* with Σ ω* = n, the limit of push-sum weights under mean weights; 1 for gossip."""
        n = len(self.weights)
        system = np.concatenate([self.weights.T - np.eye(n), np.ones((1, n))])
        return np.linalg.lstsq(system, np.append(np.zeros(n), n), rcond=None)[0]


def of_independent(up: Float[np.ndarray, "n n"]) -> Means:
    """Return the means of links that are up independently with probabilities `up` (0 on the diagonal).

    Let δ_ij be 1 if the link i → j is up, else 0, and p_ij its mean. Let D_i be the number of live links of i. Then

        E[δ_ij/(1 + D_i)] = p_ij ∫₀¹ s Π_{k≠i,j} (1 − p_ik + p_ik s) ds,

    because 1/(2 + d) = ∫₀¹ s^{1+d} ds. The integrand is a polynomial, which Gauss–Legendre nodes integrate exactly.
    """
    n = len(up)
    nodes, weights = np.polynomial.legendre.leggauss(n // 2 + 1)
    nodes, weights = (nodes + 1) / 2, weights / 2
    push = np.zeros((n, n))
    for i, row in enumerate(up):
        factors = 1 - row[:, None] + row[:, None] * nodes  # 1 for the client itself
        product = factors.prod(axis=0)
        push[i] = row * ((product / factors) @ (weights * nodes))
        push[i, i] = product @ weights
    return Means(push, up + np.eye(n))


def gossip_of_independent(up: Float[np.ndarray, "n n"]) -> Means:
    """Return the means of Metropolis weights of undirected links that are up independently with probabilities `up`.

    Given a live link i ↔ j, the other links of i and of j are independent. Let D_i\\j and D_j\\i be the numbers of
    live ones among them. Then

        E[1/(2 + max(D_i\\j, D_j\\i))] = Σ_m P(both ≤ m) (1/(2 + m) − 1/(3 + m)),

    where nothing is subtracted in the last term.
    """
    n = len(up)
    chance = np.zeros((n, n, n))  # [i, j, m]: probability that m links of i are up besides the one to j
    chance[:, :, 0] = 1
    for k in range(n):
        rate = np.repeat(up[:, None, k, None], n, axis=1)
        rate[:, k] = 0
        added = np.pad(chance[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
        chance += rate * (added - chance)
    within = np.minimum(chance.cumsum(axis=2), 1)
    shares = 1 / np.arange(2.0, n + 2)
    weights = up * ((within * within.swapaxes(0, 1)) @ (shares - np.append(shares[1:], 0)))
    return Means(weights + np.diag(1 - weights.sum(axis=1)), up + np.eye(n))
