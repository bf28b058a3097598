"""Both ends of the spectrum of the mean Hessian, found by the clients together."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from scipy.linalg import eigvalsh_tridiagonal

from hyperpush.checks import whole
from hyperpush.data.batches import Data, everything
from hyperpush.engine import simulate
from hyperpush.networks import Network
from hyperpush.problem import Problem
from hyperpush.problems.instance import Instance
from hyperpush.program import Average, Context, Node, Repeat, Within


class Curvature(NamedTuple):
    """Eigenvalues of the mean Hessian, from inside: a negative one is certain, a positive one is not a proof."""

    smallest: float
    largest: float


class _Lanczos(eqx.Module):
    params: PyTree
    hyper: PyTree
    basis: Float[Array, "k d"]
    vector: Float[Array, " d"]
    diagonal: Float[Array, " k"]
    beside: Float[Array, " k"]


@lru_cache(maxsize=16)
def lanczos(problem: Problem, steps: int, pushes: int) -> Node:
    """`steps` Lanczos steps on (1/n) Σ_k H_k with products averaged by `pushes` rounds of push-sum, kept orthogonal."""

    def enter(state: tuple[PyTree, PyTree], ctx: Context) -> _Lanczos:
        flat = ravel_pytree(state[0])[0]
        first = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)  # the same at every client
        none = jnp.zeros(steps, flat.dtype)
        return _Lanczos(*state, none[:, None] * flat, first / jnp.linalg.norm(first), none, none)

    def get(state: _Lanczos, ctx: Context):
        vector = ravel_pytree(state.params)[1](state.vector)
        product = problem.hessian_product(state.params, state.hyper, everything(ctx.data.inner), vector)
        return ravel_pytree(product)[0], jnp.ones(())

    def put(state: _Lanczos, image: Float[Array, " d"], mass, ctx: Context) -> _Lanczos:
        basis = state.basis.at[ctx.round].set(state.vector)
        along = state.vector @ image
        for _ in range(2):  # once loses orthogonality to rounding
            image = image - (basis @ image) @ basis
        size = jnp.linalg.norm(image)
        return replace(
            state,
            basis=basis,
            vector=image / jnp.where(size > 0, size, 1),
            diagonal=state.diagonal.at[ctx.round].set(along),
            beside=state.beside.at[ctx.round].set(size),
        )

    body = Average(get, put, rounds=pushes)
    return Within(Repeat(body, steps, name="Lanczos"), enter, lambda before, state, ctx: (state.diagonal, state.beside))


def curvature(
    setting: Instance, network: Network, params: PyTree, key: PRNGKeyArray, *, steps: int = 50, pushes: int = 100
) -> Curvature:
    """The ends of the spectrum at `params`, in `steps` products per client, each averaged in `pushes` rounds."""
    whole("steps", steps, least=1)
    whole("pushes", pushes, least=1)
    size = sum(leaf[0].size for leaf in jax.tree.leaves(params))
    program = lanczos(setting.problem, min(steps, size), pushes)
    data = Data(setting.inner_data, setting.outer_data)
    outcome = simulate.run(program, network, (params, setting.hypers), data, key)
    ends = [_ends(*(np.asarray(part, np.float64) for part in own)) for own in zip(*outcome.states, strict=True)]
    return Curvature(min(low for low, _ in ends), max(high for _, high in ends))


def _ends(diagonal: Float[np.ndarray, " k"], beside: Float[np.ndarray, " k"]) -> tuple[float, float]:
    """Eigenvalues of a tridiagonal matrix, up to where it falls apart: from there on nothing new was found."""
    small = np.flatnonzero(beside <= 1e-6 * np.max(np.abs(diagonal)))
    steps = small[0] + 1 if len(small) else len(diagonal)
    values = eigvalsh_tridiagonal(diagonal[:steps], beside[: steps - 1])
    return float(values[0]), float(values[-1])
