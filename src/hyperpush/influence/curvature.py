"""Both ends of the spectrum of the mean Hessian, found by the clients together."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from scipy.linalg import eigvalsh_tridiagonal

from hyperpush.arguments import check_key
from hyperpush.checks import check_integer
from hyperpush.data.batches import everything
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.settings import SHRINK, learn_settings
from hyperpush.networks import Network
from hyperpush.problem import Problem
from hyperpush.programs import Average, Context, Node, Recipe, Repeat, Scope, Sequence
from hyperpush.results import Costs
from hyperpush.task import Task


class Curvature(NamedTuple):
    """Eigenvalues of the mean Hessian, from inside, up to rounding; a positive one is not a proof."""

    smallest: float
    largest: float


class _Mixing(eqx.Module):
    pushes: Int[Array, "*clients"]
    curvature: Float[Array, "*clients"]  # `learn_settings` averages one beside


class _Lanczos(eqx.Module):
    params: PyTree
    hyper: PyTree
    basis: Float[Array, "k d"]
    vector: Float[Array, " d"]
    diagonal: Float[Array, " k"]
    beside: Float[Array, " k"]


def lanczos(problem: Problem, steps: int, pushes: int) -> Node:
    """`steps` Lanczos steps on (1/n) Σ_k H_k, kept orthogonal.

    `pushes` rounds of push-sum average the products, and as many the next vector: else clients' vectors drift apart.
    """

    def enter(state: tuple[PyTree, PyTree], ctx: Context) -> _Lanczos:
        flat = ravel_pytree(state[0])[0]
        first = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)  # the same at every client
        none = jnp.zeros(steps, flat.dtype)
        return _Lanczos(*state, none[:, None] * flat, first / jnp.linalg.norm(first), none, none)

    def get(state: _Lanczos, ctx: Context):
        vector = ravel_pytree(state.params)[1](state.vector)
        product = problem.hessian_product(state.params, state.hyper, everything(ctx.data.train), vector)
        return ravel_pytree(product)[0], jnp.ones(())

    def put(state: _Lanczos, image: Float[Array, " d"], mass, ctx: Context) -> _Lanczos:
        basis = state.basis.at[ctx.round].set(state.vector)
        vector, size = _rest(image, basis)
        return replace(
            state,
            basis=basis,
            vector=vector,
            diagonal=state.diagonal.at[ctx.round].set(state.vector @ image),
            beside=state.beside.at[ctx.round].set(size),
        )

    def agreed(state: _Lanczos, vector: Float[Array, " d"], mass, ctx: Context) -> _Lanczos:
        return replace(state, vector=_rest(vector, state.basis)[0])

    body = Sequence(
        Average(get, put, rounds=pushes),
        Average(lambda state, ctx: (state.vector, jnp.ones(())), agreed, rounds=pushes),
    )
    return Scope(Repeat(body, steps, name="Lanczos"), enter, lambda before, state, ctx: (state.diagonal, state.beside))


def _rest(vector: Float[Array, " d"], basis: Float[Array, "k d"]) -> tuple[Float[Array, " d"], Float[Array, ""]]:
    """What is left of a vector outside the basis, of length 1, and the length it had."""
    for _ in range(2):  # once loses orthogonality to rounding
        vector = vector - (basis @ vector) @ basis
    size = jnp.linalg.norm(vector)
    return vector / jnp.where(size > 0, size, 1), size


def resolution(dtype: Any) -> float:
    """The share of the largest eigenvalue below which others are not told from 0."""
    return float(np.sqrt(np.finfo(dtype).eps))


def _mixing() -> Node:
    return learn_settings(None)


def curvature(
    task: Task,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    steps: int = 50,
    pushes: int | None = None,
    engine: Engine = Simulate(),
) -> Curvature:
    """The ends of the spectrum of the mean Hessian at the task's params, in `steps` products per client.

    Products and vectors are averaged in `pushes` rounds each. Without a number the clients first find how many shrink
    their differences threefold at first, and take many times as many; large rings may need more than that.
    """
    return measured(task, network, key, steps=steps, pushes=pushes, engine=engine)[0]


def measured(
    task: Task,
    network: Network,
    key: PRNGKeyArray | int,
    *,
    steps: int,
    pushes: int | None = None,
    engine: Engine = Simulate(),
) -> tuple[Curvature, Costs]:
    """The same, and what it cost."""
    check_integer("steps", steps, minimum=1)
    key, reliable, costs, step = check_key(key), engine.without_faults(), Costs(), 0
    flat = jnp.concatenate([leaf[0].ravel() for leaf in jax.tree.leaves(task.params)])
    if pushes is None:
        unknown = _Mixing(jnp.zeros(network.clients, jnp.int32), jnp.ones(network.clients, flat.dtype))
        mixed = reliable.run(Recipe(_mixing, ()), network, unknown, task.data, key, step=step)
        # The last differences shrink more slowly than the first, on a ring by far.
        times = 4 * math.ceil(math.log(10 / resolution(flat.dtype), SHRINK))
        pushes, step = times * int(np.max(mixed.states.pushes)), mixed.step
        costs = costs + Costs.of(mixed, task)
    check_integer("pushes", pushes, minimum=1)
    recipe = Recipe(lanczos, (task.problem, min(steps, flat.size), pushes))
    run = reliable.run(recipe, network, (task.params, task.hypers), task.data, key, step=step)
    ends = [_ends(*(np.asarray(part, np.float64) for part in own)) for own in zip(*run.states, strict=True)]
    found = Curvature(min(low for low, _ in ends), max(high for _, high in ends))
    return found, costs + Costs.of(run, task)


def _ends(diagonal: Float[np.ndarray, " k"], beside: Float[np.ndarray, " k"]) -> tuple[float, float]:
    """Eigenvalues of a tridiagonal matrix, up to where it falls apart: from there on nothing new was found."""
    small = np.flatnonzero(beside <= 1e-6 * np.max(np.abs(diagonal)))
    steps = small[0] + 1 if len(small) else len(diagonal)
    values = eigvalsh_tridiagonal(diagonal[:steps], beside[: steps - 1])
    return float(values[0]), float(values[-1])
