"""How far clients are from having solved the inner problem: what each of them adds to it, and an average of that."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.programs import Average, Context, Node, Sequence
from hyperpush.programs.report import Report
from hyperpush.task.problem import Problem

SMALLEST, LARGEST = 16, 128  # numbers in place of a longer vector; its norm is right to about 18 % and 6 %


def terms_of(problem: Problem, params: PyTree, hyper: PyTree, examples: PyTree) -> tuple[PyTree, PyTree]:
    """A client's inner gradient g_i, and H_i x."""
    batch = everything(examples)
    return problem.inner_gradient(params, hyper, batch), problem.hessian_product(params, hyper, batch, params)


def residual_of(gradient: PyTree, product: PyTree, size: Float[Array, ""]) -> Float[Array, ""]:
    """‖g‖ / max(‖Hx‖, size/10) of the means over clients of g_i, H_i x and ‖g_i‖."""
    scale = jnp.maximum(jnp.asarray(optax.tree.norm(product)), 0.1 * size)
    return jnp.asarray(optax.tree.norm(gradient)) / jnp.where(scale > 0, scale, 1)


def append_residual(program: Node, problem: Problem) -> Node:
    """An estimator's program, and an average along a tree that puts the residual at its params into its report.

    Long vectors travel as count sketches (Charikar, Chen and Farach-Colton 2002), which add up as they do: a
    message has at most 257 numbers, and from 128 parameters on about a quarter of a vector.
    """

    def get(state: HypergradientState, ctx: Context) -> tuple[Any, Float[Array, ""]]:
        terms = terms_of(problem, state.params, state.hyper, ctx.data.train)
        gradient, product = (ravel_pytree(term)[0] for term in terms)
        return sketch_terms(gradient, product, ctx), jnp.ones(())

    def put(state: HypergradientState, means: Any, mass: Any, ctx: Context) -> HypergradientState:
        report = Report.none() if state.report is None else state.report
        return replace(state, report=report.at(residual_of(*means)))

    return Sequence(program, Average(get, put, rounds=1, by="tree"), appended=True)


def sketch_terms(gradient: Float[Array, " d"], product: Float[Array, " d"], ctx: Context) -> tuple[Array, Array, Array]:
    """What a client adds to the averages that `residual_of` takes."""
    assert ctx.common_key is not None
    return _sketch(gradient, ctx.common_key), _sketch(product, ctx.common_key), jnp.linalg.norm(gradient)


def _sketch(vector: Float[Array, " d"], key: PRNGKeyArray) -> Float[Array, " k"]:
    """Its numbers with random signs, summed up in random places."""
    length = min(max(vector.size // 8, SMALLEST), LARGEST)
    if vector.size <= length:
        return vector
    places, signs = jax.random.split(key)
    signed = vector * jax.random.rademacher(signs, vector.shape, vector.dtype)
    return jnp.zeros(length, vector.dtype).at[jax.random.randint(places, vector.shape, 0, length)].add(signed)
