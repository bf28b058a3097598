"""Both ends of the spectrum of the mean Hessian, found by the clients together."""

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

PUSH_ERROR = 10  # error of averages by push-sum, in units of rounding
HIDDEN = 30  # multiple of this error below which a Lanczos vector has found nothing new


class Curvature(NamedTuple):
    """Extreme eigenvalues of the mean Hessian, from inside up to rounding; a positive one is not a proof.

    Args:
        smallest: λ_min, or a number above it.
        largest: λ_max, or a number below it.

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
    """Return a program of `steps` Lanczos steps on (1/n) Σ_k H_k.

    Products are averaged by this number of pushes; 0: along a tree.
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
    """Find the ends of the spectrum of the mean Hessian at the task's params, by `steps` Lanczos steps of all clients.

    Products are averaged along a tree, as in `TreeCG`. Where links are too seldom up to wait for, and among members
    without a tree, they are averaged by push-sum.

    **Use it** to see whether params are a minimum, and how ill-conditioned it is. **Avoid it** on private tasks and
    with many params: each client keeps `steps` vectors of their size.

    Args:
        task: The task, at the params to look at.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key.
        steps: Products per client, at least 1. The number of params gives exact results; the largest eigenvalue
            converges much sooner than the smallest.
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
    """Find the curvature; return it with its costs."""
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
