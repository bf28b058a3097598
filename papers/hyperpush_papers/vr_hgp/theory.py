"""Theory of VR-HGP's error, for choosing its weights (α, β) before a run.

At a point, with gradient-after SGP and full batches, VR-HGP iterates

    v ← α(v + B u) + (1 − α) B w,   u⁺ = A u,   w ← β(A w + c_x) + (1 − β)(w + u⁺)

where A is random because the links are. `expected_errors` is the exact root mean square error after every round.
`theorem` is the bound of theorem 1 of "Personalized decentralized bilevel optimization over stochastic and directed
networks", and `mu` the factor in it that depends on the weights.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.linalg import block_diag

from hyperpush.networks import Network
from hyperpush.task.task import Task


def mu(alpha: float, beta: float, eta: float) -> float:
    """Return the factor μ_{α,β} of theorem 1 at contraction η for M → ∞; for α = 1, theorem 10's μ_{1,0}.

    μ² = 8 (1−α)/(1+α) (1 + (1+αρ)/(1−αρ) β²η²/(1−ρ²)) with ρ = 1−β+βη. At β = 0 only the noise of B is averaged.

    Args:
        alpha: α of `VRHGP`, from 0 to 1.
        beta: β of `VRHGP`, from 0 to 1.
        eta: η, the contraction factor of one step of SGP, above 0 and below 1.

    Example:
        >>> from hyperpush_papers.vr_hgp.theory import mu
        >>> round(mu(1, 0, 0.9), 1), round(mu(0.9, 0.1, 0.9), 1)  # plain, and the paper's weights
        (5.9, 1.8)
    """
    if alpha == 1:
        return float(np.sqrt(8 * (eta**2 + (1 - eta) ** 2) / (1 - eta**2)))
    average = (1 - alpha) / (1 + alpha)
    if beta == 0:
        return float(np.sqrt(8 * (average + eta**2 / (1 - eta**2))))
    rho = 1 - beta + beta * eta
    grown = (1 + alpha * rho) / (1 - alpha * rho) * beta**2 * eta**2 / (1 - rho**2)
    return float(np.sqrt(8 * average * (1 + grown)))


def mu_by_round(alpha: ArrayLike, beta: ArrayLike, eta: ArrayLike, rounds: int) -> Float[np.ndarray, "rounds ..."]:
    """Return the factor μ after every round, with the terms that theorem 1 summarizes as e^{−O(M)}.

    Let A = η(1 + sε), B = 1 + sε' and c = 1 be numbers, with independent random signs ε and ε'. For these, the paper's
    bounds on norms are equalities. Then the factor is √8 (1−η) times the standard deviation of v, to first order in s.
    α, β and η are as in `mu`, and broadcast.
    """
    alpha, beta, eta = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (alpha, beta, eta)))
    zero, rest, stay = np.zeros_like(alpha), 1 - alpha, 1 - beta

    def matrices(*rows):
        return np.moveaxis(np.array(rows), (0, 1), (-2, -1))

    onward = matrices((eta, zero, zero), (stay * eta, stay + beta * eta, zero), (alpha, rest, alpha))
    covariance, u, w, found = np.zeros_like(onward), zero + 1, zero + 1, []
    for _ in range(rounds):
        kicks = matrices((eta * u, zero), (eta * (beta * w + stay * u), zero), (zero, alpha * u + rest * w))
        covariance = onward @ covariance @ onward.mT + kicks @ kicks.mT
        u = eta * u
        w = w + u
        found.append(np.sqrt(8 * covariance[..., 2, 2]) * (1 - eta))
    return np.stack(found)


class Linear(NamedTuple):
    """The iteration of VR-HGP at a point, with gradient-after SGP, full batches and independent links."""

    push: Float[np.ndarray, "n n"]  # p̄_{i→j}
    heard: Float[np.ndarray, "n n"]  # i's weight of a message from j: p̄_{i→j}/δ̄_{j→i}
    spread: Float[np.ndarray, "n n n n"]  # [i, k, j, l]: covariance of these weights for j → i and l → k
    bend: Float[np.ndarray, "nd nd"]  # −γH_i/ω_i, block by block
    down: Float[np.ndarray, "nh nd"]  # B̄: −γB_i
    source: Float[np.ndarray, " nd"]  # c_x

    def forward(self) -> Float[np.ndarray, "nd nd"]:
        """Return the mean map Ā."""
        return np.kron(self.push, np.eye(len(self.source) // len(self.push))) + self.bend

    def series(self) -> Float[np.ndarray, " nh"]:
        """Return B̄(I − Ā)^{-1} c_x, the target without c_λ."""
        return self.down @ np.linalg.solve(np.eye(len(self.source)) - self.forward(), self.source)


def linearize(task: Task, network: Network, step: float) -> Linear:
    """Return the maps of VR-HGP at the task's params, as matrices.

    Args:
        task: A task whose params and hypers are one vector each; small, as the matrices are dense.
        network: Links that are up independently of each other and from round to round.
        step: γ, the step size of SGP and of the estimator.
    """
    problem = task.problem

    def derivatives(x, hyper, own):
        rows = jax.vmap(lambda unit: problem.products(x, hyper, own.train, unit))(jnp.eye(x.size, dtype=x.dtype))
        return *rows, problem.outer_gradients(x, hyper, own.outer)[0]

    found = jax.jit(jax.vmap(derivatives))(task.params, task.hypers, task.data)
    hessian, mixed, along_x = (np.asarray(part, np.float64) for part in found)  # mixed[i] is B_iᵀ
    means, n = network.means(), network.clients
    mass, up = means.stationary(), means.up.T
    heard = np.divide(means.weights, up, out=np.zeros((n, n)), where=up > 0)
    i, j = np.nonzero(~np.eye(n, dtype=bool))
    chance, spread = up[i, j] * (1 - up[i, j]), np.zeros((n, n, n, n))
    spread[i, i, j, j] = chance * heard[i, j] ** 2
    if not network.directed:
        spread[i, j, j, i] = chance * heard[i, j] * heard[j, i]
    return Linear(
        means.weights,
        heard,
        spread,
        np.asarray(block_diag(*(-step / mass[:, None, None] * hessian))),
        np.asarray(block_diag(*(-step * mixed.mT))),
        (along_x / n / mass[:, None]).ravel(),
    )


def expected_errors(
    system: Linear, weights: Float[np.ndarray, "pairs 2"], rounds: int
) -> Float[np.ndarray, "pairs rounds"]:
    """Return √E‖v − B̄(I − Ā)^{-1}c_x‖² after every round, exactly, for every pair (α, β) of `weights`.

    With A random and independent from round to round, the second moments of (u, w, v, 1) obey a linear recursion.
    """
    (m, k), n, pairs = system.down.shape, len(system.push), len(weights)
    alpha, beta, one = weights[:, 0, None, None], weights[:, 1, None, None], np.eye(k)
    size, u, w, v = 2 * k + m + 1, slice(0, k), slice(k, 2 * k), slice(2 * k, 2 * k + m)
    onward, both = np.zeros((pairs, size, size)), slice(0, 2 * k)
    # A maps u to the new u, and βw + (1 − β)u into the new w.
    moved = np.zeros((pairs, 2 * k, 2 * k))
    moved[:, u, u], moved[:, w, u], moved[:, w, w] = one, (1 - beta) * one, beta * one
    onward[:, both, both] = np.kron(np.eye(2), system.forward()) @ moved
    onward[:, w, w] += (1 - beta) * one
    onward[:, w, -1] = beta[:, 0] * system.source
    onward[:, v, u], onward[:, v, w] = alpha * system.down, (1 - alpha) * system.down
    onward[:, v, v], onward[:, -1, -1] = alpha * np.eye(m), 1
    start = np.concatenate([system.source, system.source, np.zeros(m), [1]])
    moments = np.broadcast_to(np.outer(start, start), onward.shape)
    misfit = np.concatenate([np.zeros((m, 2 * k)), np.eye(m), -system.series()[:, None]], 1)
    found = []
    for _ in range(rounds):
        moving = (moved @ moments[:, both, both] @ moved.mT).reshape(pairs, 2, n, k // n, 2, n, k // n)
        noise = np.einsum("ikjl,pajdble->paidbke", system.spread, moving, optimize=True)
        moments = onward @ moments @ onward.mT
        moments[:, both, both] += noise.reshape(moved.shape)
        found.append(np.einsum("ea,pab,eb->p", misfit, moments, misfit, optimize=True))
    return np.sqrt(np.maximum(np.stack(found, 1), 0))


def theorem(
    system: Linear, weights: Float[np.ndarray, "pairs 2"], rounds: int, failure: float
) -> tuple[Float[np.ndarray, "pairs rounds"] | None, dict[str, float]]:
    """Return the right-hand side of theorem 1 after every round, for every pair of weights, and its constants.

        μ τ √(Σ (p̄/δ̄)² log(n(d_y + d_λ)/ε)) + η_B‖c_x‖η_A^m/(1 − η_A),  τ = η_B‖c_x‖/(κ(1 − η_A)),  κ = Σ p̄/δ̄

    The term 4n/b is left out, because batches are full. η_B = 2κ max‖γB_i‖ is the least value that assumption
    8 allows. η_A is ‖Ā‖₂, although assumption 8 requires η_A ≥ 2κ max(1, ‖γH_i/ω_i‖), which is above 1 for any problem.
    The result is None if ‖Ā‖₂ ≥ 1.
    """
    n, kappa = len(system.push), float(system.heard.sum())
    contraction = float(np.linalg.norm(system.forward(), 2))
    constants = {
        "contraction": contraction,
        "contraction_of_assumption_8": 2 * kappa * max(1.0, float(np.linalg.norm(system.bend, 2))),
        "coupling": 2 * kappa * float(np.linalg.norm(system.down, 2)),
        "source_norm": float(np.linalg.norm(system.source)),
        "kappa": kappa,
        "links": float((system.heard**2).sum()),
        "dimension": len(system.source) + n + len(system.down),  # y is (z, ω)
    }
    if contraction >= 1:
        return None, constants
    whole = constants["coupling"] * constants["source_norm"] / (1 - contraction)
    chance = np.sqrt(constants["links"] * np.log(constants["dimension"] / failure))
    factor = mu_by_round(weights[:, 0], weights[:, 1], contraction, rounds).T
    return factor * whole / kappa * chance + whole * contraction ** np.arange(1, rounds + 1), constants
