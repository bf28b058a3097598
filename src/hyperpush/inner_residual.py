"""How far params are from solving the inner problem: the rule by which estimates are marked as unsolved."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush import processes
from hyperpush.data.batches import everything
from hyperpush.engines.base import Engine
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.differences import DifferenceProblem
from hyperpush.method import Method
from hyperpush.problem import Problem
from hyperpush.programs import program_of
from hyperpush.task import Task


def inner_residual(task: Task, method: Method, engine: Engine) -> float | None:
    """How far the task's params are from solving the inner problem that all clients share.

    It is ‖mean of the clients' inner gradients g_i‖ over the larger of ‖mean of H_i x‖ and a tenth of the mean ‖g_i‖.
    For a quadratic cost, the first quotient is the distance to the solution relative to the params, both as the Hessian
    weighs them. It does not depend on how unlike the clients are. The second is for solutions near zero.

    None where data must not be looked at, where nobody sees all clients, or where it does not matter. Where the engine
    does not compute all clients at once, this does not either.
    """
    matters = method.info.target in ("global", "client", "inner") and method.info.network != "none"
    trains = isinstance(method, HypergradientEstimator) and method.trains
    if trains or not matters or task.privacy is not None or task.owner is not None or processes.count() > 1:
        return None
    problem = program_of(method, task.problem).traceable().parts[1]
    if getattr(method, "products", "exact") == "difference":  # the costs have no second derivatives
        problem = DifferenceProblem.of(problem)
    few = getattr(engine, "clients_per_batch", None) is not None
    return float(_inner_residual(problem, (task.params, task.hypers, task.train), few))


@eqx.filter_jit
def _inner_residual(problem: Problem, clients: tuple[PyTree, PyTree, PyTree], few: bool) -> Float[Array, ""]:
    def one(x: PyTree, hyper: PyTree, examples: PyTree) -> tuple[PyTree, PyTree, Array]:
        batch = everything(examples)
        gradient = problem.inner_gradient(x, hyper, batch)
        return gradient, problem.hessian_product(x, hyper, batch, x), jnp.asarray(optax.tree.norm(gradient))

    if few:  # one at a time
        none = optax.tree.zeros_like(jax.eval_shape(lambda: one(*jax.tree.map(lambda leaf: leaf[0], clients))))
        totals, _ = jax.lax.scan(lambda sums, each: (jax.tree.map(jnp.add, sums, one(*each)), None), none, clients)
    else:
        totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(one)(*clients))
    mean, part, size = map(optax.tree.norm, totals)  # all of them times the number of clients
    scale = jnp.maximum(part, 0.1 * size)
    return jnp.asarray(mean / jnp.where(scale > 0, scale, 1))
