"""Mixing on links that never change: polynomials of the mixing matrix that average in far fewer rounds than pushes.

One round is v ← a·Pv + b·v + c·(v one round before), with a + b + c = 1, so that sums over clients stay the same.
Several such rounds multiply v by a polynomial p(P) with p(1) = 1. If the roots of p are the eigenvalues of P except 1,
p(P) is the exact average. On a directed ring this takes n − 1 rounds, where pushes take about n² (finite-time
consensus: Sundaram and Hadjicostis 2007).
"""

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Complex, Float

from hyperpush.solving.settings import MOST_PUSHES, SHRINK

MOST_CLIENTS = 300  # number of clients up to which eigenvalues take a fraction of a second
SHARP = 0.02  # root mean square to which the rounds must shrink differences between clients
GROWTH = 100.0  # largest growth of intermediate numbers, because rounding errors grow with them
DIGITS = 9  # decimals of rounded eigenvalues, so that all clients take the same eigenvalues in the same order

Round = tuple[float, float, float]  # a, b and c


def fast_rounds(network: Any, most: int) -> tuple[Round, ...] | None:
    """Return at most `most` rounds after which clients hardly differ; None if impossible or links change."""
    if network.varying or network.clients > MOST_CLIENTS:
        return None
    return _fast_rounds(np.packbits(network.possible().toarray()).tobytes(), network.clients, most)


def pushes_on_lossy_links(network: Any) -> int:
    """Return the number of pushes per step on lossy links, where clients cannot search for it.

    It is twice the number that suffices for the mean weights. It is at most the number of rounds in which a value
    reaches all clients; networks with more than 300 clients take this limit.
    """
    most = min(network.flood_rounds(), MOST_PUSHES)
    if network.clients > MOST_CLIENTS:
        return most
    weights, left = network.means().weights.T, np.eye(network.clients)
    for pushes in range(1, most // 2 + 1):
        left = weights @ left
        if _differences(left) <= 1 / SHRINK:
            return 2 * pushes
    return most


@lru_cache(maxsize=32)
def _fast_rounds(links: bytes, clients: int, most: int) -> tuple[Round, ...] | None:
    up = np.unpackbits(np.frombuffer(links, np.uint8), count=clients**2).reshape(clients, clients).astype(float)
    np.fill_diagonal(up, 1)
    weights = (up / up.sum(1, keepdims=True)).T  # weights of links from column to row
    before = left = np.eye(clients)
    rounds: list[Round] = []
    for some in _factors(weights):
        for a, b, c in some:
            before, left = left, a * weights @ left + b * left + c * before
            if np.abs(left).max() > GROWTH:
                return None
        rounds += some
        if len(rounds) > most:
            return None
        if _differences(left) <= SHARP:
            return tuple(rounds)
    return None


def _factors(weights: Float[np.ndarray, "n n"]) -> list[list[Round]]:
    """Return the rounds of each root, or pair of roots, in an order in which products stay small (Leja 1957)."""
    roots = _other_eigenvalues(weights)
    sizes = np.zeros(len(roots))  # log₁₀ |p(root)|
    factors = []
    while len(roots):
        # Ties are broken by the root itself, because rounding must not decide the order.
        at = max(range(len(roots)), key=lambda k: (round(float(sizes[k]), 5), roots[k].real, roots[k].imag))
        root = roots[at]
        real, squared, left = float(root.real), float(abs(root) ** 2), float(abs(1 - root) ** 2)
        if root.imag == 0:
            factors.append([_round(1 / (1 - real), -real / (1 - real))])
            values = (roots - real) / (1 - real)
        else:
            factors.append([(1.0, 0.0, 0.0), _round(1 / left, -2 * real / left)])
            values = (roots**2 - 2 * real * roots + squared) / left
        keep = np.arange(len(roots)) != at
        roots, sizes = roots[keep], (sizes + np.log10(np.maximum(np.abs(values), 1e-300)))[keep]
    return factors


def _round(a: float, b: float) -> Round:
    return a, b, 1 - a - b


def _other_eigenvalues(weights: Float[np.ndarray, "n n"]) -> Complex[np.ndarray, " m"]:
    """Return the distinct eigenvalues except 1, one of each conjugate pair."""
    found = np.round(np.linalg.eigvals(weights).astype(complex), DIGITS)
    return np.asarray(sorted({each for each in found.tolist() if each.imag >= 0 and each != 1}, key=str))


def _differences(left: Float[np.ndarray, "n n"]) -> float:
    """Return the rms difference of clients after rounds with this matrix product; infinite if a client has mass 0."""
    masses = left.sum(1, keepdims=True)
    if masses.min() <= 0:
        return np.inf
    ratios = left / masses
    return float(np.linalg.norm(ratios - ratios.mean(1, keepdims=True)) / np.sqrt(len(left)))
