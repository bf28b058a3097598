"""How far params are from solving the inner problem: the rule by which estimates are marked as unsolved."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush import processes
from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.differences import DifferenceProblem
from hyperpush.method import Method
from hyperpush.problem import Problem
from hyperpush.programs import program_of
from hyperpush.task import Task


def inner_residual(task: Task, method: Method) -> float | None:
    """How far the task's params are from solving the inner problem that all clients share.

    It is ‖mean of the clients' inner gradients g_i‖ over the larger of ‖mean of H_i x‖ and a tenth of the mean ‖g_i‖.
    For a quadratic cost, the first quotient is the distance to the solution relative to the params, both as the Hessian
    weighs them. It does not depend on how unlike the clients are. The second is for solutions near zero.

    None where data must not be looked at, where nobody sees all clients, or where it does not matter.
    """
    matters = method.info.target in ("global", "client", "inner") and method.info.network != "none"
    trains = isinstance(method, HypergradientEstimator) and method.trains
    if trains or not matters or task.privacy is not None or task.owner is not None or processes.count() > 1:
        return None
    problem = program_of(method, task.problem).traceable().parts[1]
    if getattr(method, "products", "exact") == "difference":  # the costs have no second derivatives
        problem = DifferenceProblem.of(problem)
    return float(_inner_residual(problem, task.params, task.hypers, task.train))


@eqx.filter_jit
def _inner_residual(problem: Problem, params: PyTree, hypers: PyTree, train: PyTree) -> Float[Array, ""]:
    def one(x: PyTree, hyper: PyTree, examples: PyTree) -> tuple[PyTree, PyTree]:
        batch = everything(examples)
        return problem.inner_gradient(x, hyper, batch), problem.hessian_product(x, hyper, batch, x)

    gradients, products = jax.vmap(one)(params, hypers, train)
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), (gradients, products))
    mean, part = map(optax.tree.norm, means)
    scale = jnp.maximum(part, 0.1 * jnp.mean(jax.vmap(optax.tree.norm)(gradients)))
    return jnp.asarray(mean / jnp.where(scale > 0, scale, 1))
