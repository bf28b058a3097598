"""How far params are from solving the inner problem: the rule by which estimates are marked as unsolved."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.base import processes
from hyperpush.engines.base import Engine
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.differences import DifferenceProblem
from hyperpush.hypergradients.residual import append_residual, residual_of, terms_of
from hyperpush.methods.base import Method
from hyperpush.programs import Node, Recipe, Sequence, contains, program_of
from hyperpush.task.problem import Problem
from hyperpush.task.task import Task


def inner_residual(task: Task, method: Method, engine: Engine) -> float | None:
    """How far the task's params are from solving the inner problem that all clients share.

    It is ‖mean of the clients' inner gradients g_i‖ over the larger of ‖mean of H_i x‖ and a tenth of the mean ‖g_i‖.
    For a quadratic cost, the first quotient is the distance to the solution relative to the params, both as the Hessian
    weighs them. It does not depend on how unlike the clients are. The second is for solutions near zero.

    None where data must not be looked at, where nobody sees all clients, or where it does not matter. Where the engine
    does not compute all clients at once, this does not either.
    """
    if not _matters(task, method) or task.owner is not None or processes.count() > 1:
        return None
    problem = _with_products(method, program_of(method, task.problem).traceable().parts[1])
    few = getattr(engine, "clients_per_batch", None) is not None
    return float(_inner_residual(problem, (task.params, task.hypers, task.train), few))


def estimate_recipe(given: Method, adapted: Method, task: Task, engine: Engine) -> Recipe:
    """The recipe of an estimator's program, `adapted` to its network from what was `given`.

    Among peers, where nobody sees all clients, they average along a tree how far they are from the inner solution. They
    do not if they are asynchronous, have private data or distrust each other. Elsewhere it costs no message.
    """
    trust = all(getattr(part, "trust", True) for part in (given, *given.parts()))
    if engine.hosts_one and not engine.no_tree and trust and _matters(task, given):
        return Recipe(_measured_program, (adapted, task.problem))
    return program_of(adapted, task.problem)


def _measured_program(method: Method, problem: Problem) -> Node:
    program = method.program(problem)
    if contains(program, lambda node: isinstance(node, Sequence) and node.appended):  # TreeCG's does it anyway
        return program
    return append_residual(program, _with_products(method, problem))


def _matters(task: Task, method: Method) -> bool:
    """Whether a method's result depends on how well the shared inner problem is solved, and data may be looked at."""
    shared = method.info.target in ("global", "client", "inner") and method.info.network != "none"
    trains = isinstance(method, HypergradientEstimator) and method.trains
    return shared and not trains and task.privacy is None


def _with_products(method: Method, problem: Problem) -> Problem:
    """The problem with products as the method takes them: of differences where costs have no second derivatives."""
    differ = any(getattr(part, "products", "exact") == "difference" for part in (method, *method.parts()))
    return DifferenceProblem.of(problem) if differ else problem


@eqx.filter_jit
def _inner_residual(problem: Problem, clients: tuple[PyTree, PyTree, PyTree], few: bool) -> Float[Array, ""]:
    def one(x: PyTree, hyper: PyTree, examples: PyTree) -> tuple[PyTree, PyTree, Array]:
        gradient, product = terms_of(problem, x, hyper, examples)
        return gradient, product, jnp.asarray(optax.tree.norm(gradient))

    if few:  # one at a time
        none = optax.tree.zeros_like(jax.eval_shape(lambda: one(*jax.tree.map(lambda leaf: leaf[0], clients))))
        totals, _ = jax.lax.scan(lambda sums, each: (jax.tree.map(jnp.add, sums, one(*each)), None), none, clients)
    else:
        totals = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(one)(*clients))
    return residual_of(*totals)  # all of them times the number of clients
