"""Quadratics, different at every client, whose solution and hyper-gradient have closed forms."""

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.data.synthetic import quadratics
from hyperpush.problem import Problem
from hyperpush.problems.instance import Instance


def inner(params, hyper, data):
    """½xᵀAx − bᵀx + λᵀCx."""
    return 0.5 * params @ data["hessian"] @ params - data["linear"] @ params + hyper @ data["coupling"] @ params


def outer(params, hyper, data):
    """½‖Dx − e‖² + ½‖λ − g‖²."""
    misfit = data["map"] @ params - data["target"]
    return 0.5 * jnp.sum(misfit**2) + 0.5 * jnp.sum((hyper - data["hyper_target"]) ** 2)


PROBLEM = Problem(inner, outer)


def quadratic(clients: int, seed: int, *, inner_size: int = 4, hyper_size: int = 3) -> Instance:
    """Random strongly convex inner costs; params and hypers start at zero and at random."""
    generator = np.random.default_rng(seed)
    first, second = quadratics(clients, inner_size, hyper_size, generator)
    hypers = generator.normal(size=(clients, hyper_size))
    dtype = jnp.zeros(()).dtype
    start = (np.zeros((clients, inner_size)), hypers, first, second)
    return Instance(PROBLEM, *jax.tree.map(lambda a: jnp.asarray(a, dtype), start))
