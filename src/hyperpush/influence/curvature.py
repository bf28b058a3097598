"""Estimate the smallest and the largest eigenvalue of the mean Hessian, by all clients together."""

from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer, no_type_check
from hyperpush.data.batches import full_batch
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.lanczos import Lanczos
from hyperpush.networks import Network
from hyperpush.networks.expected import push_rounds, tree_pays
from hyperpush.programs import Average, Context, Node, ProgramRecipe, Repeat, Scope
from hyperpush.solving.common import probe_of
from hyperpush.task.problem import Problem
from hyperpush.task.task import Task, client_shapes
from hyperpush.verbs.checks import check_key, check_task
from hyperpush.verbs.costs import Costs

PUSH_ERROR = 10  # error of averages by push-sum, as a multiple of the rounding error
HIDDEN = 30  # a Lanczos vector that is shorter than this multiple of the error has no new direction


class Curvature(NamedTuple):
    """Estimates of the extreme eigenvalues of the mean Hessian, inside its spectrum up to rounding.

    A positive `smallest` does not prove that the Hessian is positive definite.

    Args:
        smallest: Estimate of λ_min, which is at least λ_min.
        largest: Estimate of λ_max, which is at most λ_max.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> found = hp.influence.curvature(task, network, key=0)
        >>> 0 < found.smallest < found.largest
        True
    """

    smallest: float
    largest: float


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    lanczos: Lanczos


def lanczos_program(problem: Problem, steps: int, pushes: int = 0) -> Node:
    """Return a program of `steps` Lanczos steps on the mean Hessian (1/n) Σ_k H_k of all clients.

    Push-sum with `pushes` rounds averages the products; with 0 they are averaged along a tree.
    """

    def start(state: tuple[PyTree, PyTree], ctx: Context) -> _State:
        flat = ravel_pytree(state[0])[0]
        return _State(*state, Lanczos.start(probe_of(flat.size, flat.dtype, ctx), steps))

    def get_product(state: _State, ctx: Context):
        vector = ravel_pytree(state.params)[1](state.lanczos.vector)
        product = problem.hessian_product(state.params, state.hyper, full_batch(ctx.data.train), vector)
        return ravel_pytree(product)[0], jnp.ones(())

    def advance(state: _State, image: Float[Array, " d"], mass, ctx: Context) -> _State:
        return replace(state, lanczos=state.lanczos.advance(image, ctx.round))

    body = Average(get_product, advance, rounds=pushes or 1, by="push" if pushes else "tree")
    return Scope(Repeat(body, steps, name="Lanczos"), start, lambda before, state, ctx: state.lanczos)


def resolution(dtype: Any) -> float:
    """Return the share of the largest eigenvalue below which another one cannot be distinguished from 0."""
    return float(np.sqrt(np.finfo(dtype).eps))


@no_type_check
def curvature(
    task: Task,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    steps: int = 50,
    engine: Engine = Simulate(),
) -> Curvature:
    """Estimate the extreme eigenvalues of the mean Hessian at the task's params, by Lanczos steps of all clients.

    Products with the Hessian are averaged along a tree, as in `TreeCG`. Push-sum averages them if links are up too
    rarely to wait for them, or if the members lack a tree.

    **Use it** to see whether params are a minimum, and how ill-conditioned it is. **Avoid it** on private tasks and
    with many params: each client keeps `steps` vectors of their size.

    Args:
        task: The task, at the params to look at.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key.
        steps: Lanczos steps, each with one product per client, at least 1. As many steps as params give exact results.
            The largest eigenvalue converges much sooner than the smallest.
        engine: The engine that runs the clients.

    Raises:
        InvalidInput: An argument is out of range.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> smallest, largest = hp.influence.curvature(task, network, key=0)
        >>> 0 < smallest < largest
        True
    """
    return measure_curvature(task, network, key, steps=steps, engine=engine)[0]


@no_type_check
def measure_curvature(
    task: Task, network: Network, key: PRNGKeyArray | int, *, steps: int, engine: Engine = Simulate()
) -> tuple[Curvature, Costs]:
    """Estimate the extreme eigenvalues as `curvature` does; return them with the costs of the run."""
    check_task(task)
    check_integer("steps", steps, minimum=1)
    size = sum(leaf.size for leaf in jax.tree.leaves(client_shapes(task, task.params)))
    kind = jnp.result_type(*jax.tree.leaves(task.params))
    waits = tree_pays(network, size) and not engine.no_tree
    error = PUSH_ERROR * float(np.finfo(kind).eps)
    pushes = 0 if waits else push_rounds(network, error)
    recipe = ProgramRecipe(lanczos_program, (task.problem, min(steps, size), pushes))
    run = engine.without_faults().run(recipe, network, (task.params, task.hypers), task.data, check_key(key))
    # All clients hold the same numbers.
    found = run.states if task.owner is not None else jax.tree.map(lambda leaf: np.asarray(leaf)[0], run.states)
    return Curvature(*found.ends(None if waits else HIDDEN * error)), Costs.of(run, task)
