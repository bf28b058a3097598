"""Bilevel problems whose hypergradient is one linear system, with Hessians of every kind, solved in NumPy.

Client i has the inner cost ½ xᵀA_i x + λ_iᵀB_i x and the outer cost c_iᵀx + g_iᵀλ_i. At λ = 0 the inner solution is
x = 0, where the hypergradient is v_i = g_i/n − B_i (Σ A_k)⁻¹ Σ_k c_k/n.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import hyperpush as hp


def inner(x, hyper, batch):
    hessian, coupling = batch
    return 0.5 * x @ hessian[0] @ x + hyper @ coupling[0] @ x


def outer(x, hyper, batch):
    along_x, along_hyper = batch
    return along_x[0] @ x + along_hyper[0] @ hyper


class System(NamedTuple):
    """The matrices and vectors of all clients."""

    hessians: np.ndarray
    sources: np.ndarray
    couplings: np.ndarray
    direct: np.ndarray

    @property
    def task(self) -> hp.Task:
        return self.with_cost(inner)

    def with_cost(self, inner) -> hp.Task:
        def of_clients(array):
            return jnp.asarray(array[:, None], jnp.zeros(()).dtype)  # one example each

        return hp.Task(
            inner=inner,
            outer=outer,
            params=jnp.zeros(self.sources.shape[1]),
            hypers=jnp.zeros(self.direct.shape[1]),
            train=(of_clients(self.hessians), of_clients(self.couplings)),
            validation=(of_clients(self.sources), of_clients(self.direct)),
        )

    def hypergradients(self, inverse=np.linalg.inv) -> np.ndarray:
        n = len(self.sources)
        q = inverse(self.hessians.sum(0)) @ self.sources.sum(0) / n
        return self.direct / n - self.couplings @ q

    def error(self, value) -> float:
        """Return the largest relative error of any client's hypergradient."""
        return relative_error(value, self.hypergradients())


def relative_error(value, truth) -> float:
    """Return the largest relative error of any client."""
    return float(np.max(np.linalg.norm(value - truth, axis=1) / np.linalg.norm(truth, axis=1)))


def system(kind: str, seed: int = 0, n: int = 6, d: int = 12, hypers: int = 5) -> System:
    """Return a random system of the named kind."""
    random = np.random.default_rng(seed)
    hessians = np.stack([definite(random, d, 0.5, 2) for _ in range(n)])
    if kind == "unlike":
        hessians *= 10 ** random.uniform(-2, 2, (n, 1, 1))
    if kind in ("indefinite clients", "ill-conditioned", "nearly singular"):
        noise = random.normal(size=(n, d, d))
        noise += noise.transpose(0, 2, 1)
        noise -= noise.mean(0)  # the mean does not change
        least = {"ill-conditioned": 1e-4, "nearly singular": 1e-14}.get(kind)
        hessians = noise + (hessians if least is None else definite(random, d, least, 1))
    if kind == "zero clients":
        hessians[: n // 3] = 0
    if kind == "low rank":
        rows = random.normal(size=(n, 2, d))
        hessians = np.einsum("nki,nkj->nij", rows, rows)
        hessians += 1e-4 * np.linalg.norm(hessians.mean(0), 2) * np.eye(d)
    values, vectors = np.linalg.eigh(hessians.mean(0))
    # reduces the smallest eigenvalue by this share
    less = {"condition 1e6": 1 - 1e-6, "singular": 1.0, "indefinite": 1.3}.get(kind, 0.0)
    hessians = hessians - less * values[0] * np.outer(vectors[:, 0], vectors[:, 0])
    sources = random.normal(size=(n, d))
    return System(hessians, sources, random.normal(size=(n, hypers, d)), random.normal(size=(n, hypers)))


def definite(random, d: int, least: float, most: float) -> np.ndarray:
    basis, _ = np.linalg.qr(random.normal(size=(d, d)))
    return (basis * np.geomspace(least, most, d)) @ basis.T
