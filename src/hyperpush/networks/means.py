"""What a network does on average: how often each link is up, and the mean weight pushed over it."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Means(NamedTuple):
    """What a network does on average over steps, sender-major: row j is what client j sends; `network.means()`.

    Estimators that reverse links use it where training has not observed them.

    Args:
        push: The mean push weight from j (row) to i (column); the sender's own share is on the diagonal.
        up: How often the link from j to i is up; 1 on the diagonal.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.DirectedRing(3).means().stationary().round(3))
        [1. 1. 1.]
    """

    push: Float[np.ndarray, "n n"]  # E of the push weight j → i; the sender's own share on the diagonal
    up: Float[np.ndarray, "n n"]  # how often j → i is up; 1 on the diagonal

    def stationary(self) -> Float[np.ndarray, " n"]:
        """ω* = E[P] ω*, Σ ω* = n: the push-sum weights that the mean iteration settles at."""
        n = len(self.push)
        system = np.concatenate([self.push.T - np.eye(n), np.ones((1, n))])
        return np.linalg.lstsq(system, np.append(np.zeros(n), n), rcond=None)[0]


def of_independent(up: Float[np.ndarray, "n n"]) -> Means:
    """Means of links that are up independently with probabilities `up` (0 on the diagonal).

    With D_i the number of live links of i, E[δ_ij/(1 + D_i)] = p_ij ∫₀¹ s Π_{k≠i,j} (1 − p_ik + p_ik s) ds, because
    1/(2 + d) = ∫ s^{1+d} ds. The integrand is a polynomial, which Gauss–Legendre nodes integrate exactly.
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
