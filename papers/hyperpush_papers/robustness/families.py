"""Families of quadratic bilevel problems, and their hypergradients by NumPy alone."""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from hyperpush_papers.robustness.config import Family

Hessians = Float[np.ndarray, "n d d"]
# families without a hypergradient: every unflagged result is wrong
UNSOLVABLE = ("singular", "indefinite", "hidden", "lossy-singular")
LOSS = 0.2  # share of messages that get lost in the families with lossy links


class Quadratics(NamedTuple):
    """A problem f_i = ½xᵀA_i x + λ_iᵀB_i x, F_i = c_iᵀx + g_iᵀλ_i at λ = 0 and its inner solution x = 0."""

    hessians: Hessians  # A_i
    couplings: Float[np.ndarray, "n m d"]  # B_i
    slopes: Float[np.ndarray, "n d"]  # c_i
    direct: Float[np.ndarray, "n m"]  # g_i

    def hypergradient(self) -> Float[np.ndarray, "n m"]:
        """Return the true hypergradient g_i/n − B_i (Σ_k A_k)⁻¹ (1/n)Σ_j c_j in float64."""
        hessians, couplings, slopes, direct = (part.astype(np.float64) for part in self)
        q = np.linalg.solve(hessians.sum(0), slopes.mean(0))
        return direct / len(direct) - couplings @ q

    def trained(self) -> Float[np.ndarray, "n m"]:
        """Return the hypergradient at λ_i = g_i, where the inner solution is not 0, with ½‖x‖² in every outer cost."""
        hessians, couplings, slopes, direct = (part.astype(np.float64) for part in self)
        x = -np.linalg.solve(hessians.sum(0), np.einsum("nmd,nm->d", couplings, direct))
        return Quadratics(hessians, couplings, slopes + x, direct).hypergradient()


def draw(family: Family, network: str, seed: int, clients: int, params: int, hypers: int) -> Quadratics:
    """Draw the problem of a family for a seed and a network."""
    rng = np.random.default_rng([zlib.crc32(f"{family} {network}".encode()), seed, clients, params, hypers])
    hessians = MAKERS[family](rng, clients, params)
    hessians = (hessians + hessians.transpose(0, 2, 1)) / 2
    shapes = (clients, hypers, params), (clients, params), (clients, hypers)
    drawn = Quadratics(hessians, *(rng.normal(size=shape) for shape in shapes))
    name, _, share = family.partition("-")
    if name == "cancelling":
        return _cancelling(drawn, 1 / float(share))
    return _hidden(drawn) if name == "hidden" else drawn


def _hidden(drawn: Quadratics) -> Quadratics:
    """Remove the mean outer gradient's component along the eigenvector of the mean Hessian's smallest eigenvalue."""
    vector = np.linalg.eigh(drawn.hessians.mean(0))[1][:, 0]
    return drawn._replace(slopes=drawn.slopes - np.outer(drawn.slopes @ vector, vector))


def _cancelling(drawn: Quadratics, share: float) -> Quadratics:
    """Change g_i so that the two terms of the hypergradient cancel, except for this share."""
    through = drawn._replace(direct=np.zeros_like(drawn.direct)).hypergradient()
    return drawn._replace(direct=len(through) * (share * drawn.direct * np.abs(through).mean() - through))


def _positive(rng: np.random.Generator, params: int, low: float, high: float) -> Float[np.ndarray, "d d"]:
    """Draw a symmetric matrix with eigenvalues from low to high, evenly spaced in their logarithm."""
    basis, _ = np.linalg.qr(rng.normal(size=(params, params)))
    return (basis * np.geomspace(low, high, params)) @ basis.T


def _zero_mean_noise(rng: np.random.Generator, clients: int, params: int) -> Hessians:
    """Draw indefinite matrices whose mean is zero."""
    noise = rng.normal(size=(clients, params, params))
    noise = noise + noise.transpose(0, 2, 1)
    return noise - noise.mean(0)


def _mild(rng: np.random.Generator, clients: int, params: int) -> Hessians:
    return np.stack([_positive(rng, params, 0.5, 2.0) for _ in range(clients)])


def _scales(rng: np.random.Generator, clients: int, params: int) -> Hessians:
    """Draw Hessians whose sizes differ by up to 1e4 between clients."""
    scales = 10 ** np.append(rng.uniform(-2, 2, clients - 2), [-2, 2])
    return scales[:, None, None] * _mild(rng, clients, params)


def _indefinite_local(rng: np.random.Generator, clients: int, params: int) -> Hessians:
    return _mild(rng, clients, params) + _zero_mean_noise(rng, clients, params)


def _disjoint(rng: np.random.Generator, clients: int, params: int) -> Hessians:
    """Draw Hessians such that each parameter is in the cost of one client only."""
    owners = rng.permutation(np.arange(params) % clients)
    return np.stack([np.diag(np.where(owners == i, rng.uniform(0.5, 2.0, params), 0)) for i in range(clients)])


def _low_rank(condition: float) -> Callable[..., Hessians]:
    """Draw Gram matrices of few rows, plus a ridge that gives the mean about this condition number."""

    def make(rng: np.random.Generator, clients: int, params: int) -> Hessians:
        rows = rng.normal(size=(clients, max(2, params // (2 * clients)), params))
        grams = np.einsum("nri,nrj->nij", rows, rows)
        return grams + np.linalg.eigvalsh(grams.mean(0))[-1] / condition * np.eye(params)

    return make


def _condition(condition: float) -> Callable[..., Hessians]:
    def make(rng: np.random.Generator, clients: int, params: int) -> Hessians:
        return _positive(rng, params, 1 / condition, 1.0) + 0.01 * _zero_mean_noise(rng, clients, params)

    return make


def _zero_third(rng: np.random.Generator, clients: int, params: int) -> Hessians:
    hessians = _mild(rng, clients, params)
    hessians[: clients // 3] = 0
    return hessians


def _with_less_curvature(factor: float) -> Callable[..., Hessians]:
    """Draw the mild family, and subtract a multiple of the mean's smallest eigenvalue along its eigenvector."""

    def make(rng: np.random.Generator, clients: int, params: int) -> Hessians:
        hessians = _mild(rng, clients, params)
        values, vectors = np.linalg.eigh(hessians.mean(0))
        return hessians - factor * values[0] * np.outer(vectors[:, 0], vectors[:, 0])

    return make


MAKERS: dict[Family, Callable[..., Hessians]] = {
    "mild": _mild,
    "scales": _scales,
    "indefinite-local": _indefinite_local,
    "disjoint": _disjoint,
    "low-rank-1e2": _low_rank(1e2),
    "low-rank-1e4": _low_rank(1e4),
    "kappa-1e3": _condition(1e3),
    "kappa-1e4": _condition(1e4),
    "zero-third": _zero_third,
    "singular": _with_less_curvature(1.0),
    "indefinite": _with_less_curvature(1.3),
    "hidden": _with_less_curvature(1.0),
    "cancelling-1e2": _mild,
    "cancelling-1e4": _mild,
    "lossy": _mild,
    "lossy-singular": _with_less_curvature(1.0),
    "trained": _mild,
}
