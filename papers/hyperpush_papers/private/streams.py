"""Streams of quadratics with closed forms: costs, minimizers, constants for privacy, and samples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.data.batches import Data
from hyperpush.privacy.sensitivity import Constants
from hyperpush.task.problem import Problem
from hyperpush_papers.private.config import Case

SIZE = 2  # dimension of the params, and of the hypers


class Stream(NamedTuple):
    """A stream of samples of b and e for the inner cost g and the outer cost f; arrays are [clients, …].

    g = ½yᵀA_i y − bᵀy + xᵀC_i y,   f = ½‖D_i y − e‖² + ½μ‖x − t_i‖² + ρ Σ_k cos 3x_k
    """

    hessian: np.ndarray  # A
    coupling: np.ndarray  # C
    map: np.ndarray  # D
    aim: np.ndarray  # t
    linear: np.ndarray  # mean of b
    target: np.ndarray  # mean of e
    pull: float  # μ
    ripple: float  # ρ

    def inner_solution(self, x: np.ndarray) -> np.ndarray:
        """Return the inner solution y*(x), for hypers x on the last axis."""
        inverse = np.linalg.inv(self.hessian.mean(0))
        return (self.linear.mean(0) - x @ self.coupling.mean(0)) @ inverse

    def cost(self, x: np.ndarray) -> np.ndarray | np.floating:
        """Return the outer cost F(x) at the mean of the samples."""
        y = self.inner_solution(x)
        misfit = np.einsum("nij,...j->...ni", self.map, y) - self.target
        away = x[..., None, :] - self.aim
        own = 0.5 * (misfit**2).sum(-1) + 0.5 * self.pull * (away**2).sum(-1)
        return own.mean(-1) + self.ripple * np.cos(3 * x).sum(-1)

    def adjoint(self, x: np.ndarray) -> np.ndarray:
        """Return z*(x) = H̄^{-1} ∂_y f̄, the solution of the hypergradient's linear system."""
        misfit = np.einsum("nij,...j->...ni", self.map, self.inner_solution(x)) - self.target
        along_y = np.einsum("nij,...ni->...nj", self.map, misfit).mean(-2)
        return along_y @ np.linalg.inv(self.hessian.mean(0))

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return the hypergradient ∇F(x)."""
        direct = self.pull * (x - self.aim.mean(0)) - 3 * self.ripple * np.sin(3 * x)
        return direct - self.adjoint(x) @ self.coupling.mean(0).T

    def minimum(self) -> np.ndarray:
        """Return a minimizer of F, for ρ = 0, where ∇F is affine."""
        zero = self.gradient(np.zeros(SIZE))
        slope = (self.gradient(np.eye(SIZE)) - zero).T
        return -np.linalg.pinv(slope) @ zero


def stream(case: Case, clients: int, seed: int) -> Stream:
    """Draw a stream with different clients. The convex cost is flat along one hyper; the non-convex one has ripples."""
    generator = np.random.default_rng(seed)
    factor = generator.normal(0, 0.3, (clients, SIZE, SIZE))
    coupling = generator.normal(0, 0.3, (clients, SIZE, SIZE)) + np.eye(SIZE)
    if case == "convex":  # the second hyper does not affect any params
        coupling[:, 1] = 0
    pull = {"strongly convex": 1.0, "convex": 0.0, "non-convex": 0.5}[case]
    return Stream(
        hessian=np.eye(SIZE) + factor @ factor.transpose(0, 2, 1),
        coupling=coupling,
        map=np.eye(SIZE) + generator.normal(0, 0.2, (clients, SIZE, SIZE)),
        aim=generator.normal(0.5, 0.3, (clients, SIZE)),
        linear=generator.normal(0, 0.5, (clients, SIZE)),
        target=generator.normal(0, 0.5, (clients, SIZE)),
        pull=pull,
        ripple=0.15 if case == "non-convex" else 0.0,
    )


def problem_of(made: Stream) -> Problem:
    """Return the costs g and f for data rows of the form (client, sample)."""
    tables = [jnp.asarray(table) for table in made[:4]]

    def inner(y, x, rows):
        hessian, coupling, *_ = (table[rows["client"][0]] for table in tables)
        return 0.5 * y @ hessian @ y - rows["sample"] @ y + x @ coupling @ y

    def outer(y, x, rows):
        *_, mapped, aim = (table[rows["client"][0]] for table in tables)
        misfit = jnp.sum((mapped @ y - rows["sample"]) ** 2, -1)
        return 0.5 * misfit + 0.5 * made.pull * jnp.sum((x - aim) ** 2) + made.ripple * jnp.sum(jnp.cos(3 * x))

    return Problem(inner, outer)


def constants_of(made: Stream, spread: float) -> Constants:
    """Return constants that hold for every sample: exact smoothness, and clips above the norms at start and end."""

    def norm(matrices):
        return float(np.linalg.norm(matrices, 2, axis=(-2, -1)).max())

    end, zero = made.minimum() if made.ripple == 0 else made.aim.mean(0), np.zeros(SIZE)
    wide, met = spread * SIZE**0.5, []
    for x, y in ((zero, zero), (end, made.inner_solution(end))):
        slopes = made.hessian @ y - made.linear + x @ made.coupling
        pulls = np.einsum("nij,ni->nj", made.map, made.map @ y - made.target)
        parts = slopes, pulls, made.pull * (x - made.aim), made.adjoint(x)
        met.append([np.linalg.norm(part, axis=-1).max() for part in parts])
    around = wide, wide * norm(made.map), 3 * made.ripple * SIZE**0.5, 0.0
    largest = dict(zip(("C_y", "C_b", "C_x", "R"), np.max(met, 0) + around, strict=True))
    return Constants(
        **{name: 1.25 * float(value) + 0.05 for name, value in largest.items()},
        C_H=norm(made.hessian),
        C_J=norm(made.coupling),
        L_H=0.0,
        L_J=0.0,
        L_b=norm(made.map.transpose(0, 2, 1) @ made.map),
        L_fx=made.pull + 9 * made.ripple,
    )


def samples(made: Stream, rounds: int, spread: float, key: PRNGKeyArray) -> Data:
    """Draw every client's data rows for the inner and the outer cost."""
    clients = len(made.aim)
    who = jnp.broadcast_to(jnp.arange(clients, dtype=jnp.int8)[:, None], (clients, rounds))
    parts = []
    for mean, own in zip((made.linear, made.target), jax.random.split(key), strict=True):
        noise = jax.random.uniform(own, (clients, rounds, SIZE), minval=-spread, maxval=spread)
        parts.append({"client": who, "sample": jnp.asarray(mean)[:, None] + noise})
    return Data.pair(*parts)


def errors(made: Stream, case: Case, hypers: np.ndarray) -> np.ndarray:
    """Return the clients' mean of ‖x − x*‖², or, over rounds so far, of F(x) − F(x*) or ‖∇F(x)‖²; rounds on axis −3."""
    if case == "strongly convex":
        return ((hypers - made.minimum()) ** 2).sum(-1).mean(-1)
    if case == "convex":
        found = (made.cost(hypers) - made.cost(made.minimum())).mean(-1)
    else:
        found = (made.gradient(hypers) ** 2).sum(-1).mean(-1)
    return np.cumsum(found, axis=-1) / np.arange(1, found.shape[-1] + 1)


def slope(rounds: np.ndarray, values: np.ndarray) -> float:
    """Return the slope of log error over log T, fitted in the last decade of rounds."""
    last = rounds >= rounds[-1] / 10
    return float(np.polyfit(np.log(rounds[last]), np.log(values[last]), 1)[0])
