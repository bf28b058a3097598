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

from hyperpush.checks import check_integer
from hyperpush.checks.verbs import check_key
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.lanczos import Lanczos
from hyperpush.hypergradients.settings import SHRINK, learn_settings
from hyperpush.programs import Average, Context, Network, Node, Problem, Recipe, Repeat, Scope, Sequence, everything
from hyperpush.results import Costs
from hyperpush.task import Task


class Curvature(NamedTuple):
    """Eigenvalues of the mean Hessian, from inside, up to rounding; a positive one is not a proof.

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


class _Mixing(eqx.Module):
    pushes: Int[Array, "*clients"]
    curvature: Float[Array, "*clients"]  # `learn_settings` averages one beside


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    lanczos: Lanczos


def lanczos_program(problem: Problem, steps: int, pushes: int) -> Node:
    """`steps` Lanczos steps on (1/n) Σ_k H_k.

    `pushes` rounds of push-sum average the products, and as many the next vector: else clients' vectors drift apart.
    """

    def start(state: tuple[PyTree, PyTree], ctx: Context) -> _State:
        flat = ravel_pytree(state[0])[0]
        first = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)  # the same at every client
        return _State(*state, Lanczos.start(first, steps))

    def get_product(state: _State, ctx: Context):
        vector = ravel_pytree(state.params)[1](state.lanczos.vector)
        product = problem.hessian_product(state.params, state.hyper, everything(ctx.data.train), vector)
        return ravel_pytree(product)[0], jnp.ones(())

    def advance(state: _State, image: Float[Array, " d"], mass, ctx: Context) -> _State:
        return replace(state, lanczos=state.lanczos.advance(image, ctx.round))

    def align(state: _State, vector: Float[Array, " d"], mass, ctx: Context) -> _State:
        return replace(state, lanczos=state.lanczos.align(vector))

    body = Sequence(
        Average(get_product, advance, rounds=pushes),
        Average(lambda state, ctx: (state.lanczos.vector, jnp.ones(())), align, rounds=pushes),
    )
    return Scope(Repeat(body, steps, name="Lanczos"), start, lambda before, state, ctx: state.lanczos)


def resolution(dtype: Any) -> float:
    """The share of the largest eigenvalue below which others are not told from 0."""
    return float(np.sqrt(np.finfo(dtype).eps))


def curvature(
    task: Task,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    steps: int = 50,
    pushes: int | None = None,
    engine: Engine = Simulate(),
) -> Curvature:
    """The ends of the spectrum of the mean Hessian at the task's params, by `steps` Lanczos steps of all clients.

    **Use it** to see whether params are a minimum, and how ill-conditioned it is. **Avoid it** on private tasks and
    with many params: each client keeps `steps` vectors of their size.

    Args:
        task: The task, at the params to look at.
        network: Who can send to whom, and when.
        key: An integer or a JAX key.
        steps: Products per client, at least 1. As many as params are exact; the largest eigenvalue is close much
            sooner than the smallest.
        pushes: Rounds of averaging of each product and of each vector, at least 1. With None the clients first find how
            many shrink their differences threefold, and take many times as many; large rings may need more than that.
        engine: Where the clients run.

    Raises:
        InvalidInput: An argument is out of range.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(3, seed=0), hp.networks.FullyConnected(3)
        >>> smallest, largest = hp.influence.curvature(task, network, key=0)
        >>> 0 < smallest < largest
        True
    """
    return measure_curvature(task, network, key, steps=steps, pushes=pushes, engine=engine)[0]


def measure_curvature(
    task: Task,
    network: Network,
    key: PRNGKeyArray | int,
    *,
    steps: int,
    pushes: int | None = None,
    engine: Engine = Simulate(),
) -> tuple[Curvature, Costs]:
    """The curvature, and what it cost."""
    check_integer("steps", steps, minimum=1)
    key, reliable, costs, step = check_key(key), engine.without_faults(), Costs(), 0
    flat = jnp.concatenate([leaf[0].ravel() for leaf in jax.tree.leaves(task.params)])
    if pushes is None:
        unknown = _Mixing(jnp.zeros(network.clients, jnp.int32), jnp.ones(network.clients, flat.dtype))
        mixed = reliable.run(Recipe(learn_settings, (None,)), network, unknown, task.data, key, step=step)
        # The last differences shrink more slowly than the first, on a ring by far.
        times = 4 * math.ceil(math.log(10 / resolution(flat.dtype), SHRINK))
        pushes, step = times * int(np.max(mixed.states.pushes)), mixed.step
        costs = costs + Costs.of(mixed, task)
    check_integer("pushes", pushes, minimum=1)
    recipe = Recipe(lanczos_program, (task.problem, min(steps, flat.size), pushes))
    run = reliable.run(recipe, network, (task.params, task.hypers), task.data, key, step=step)
    own = [jax.tree.map(lambda leaf, i=client: leaf[i], run.states).ends() for client in range(network.clients)]
    smallest, largest = zip(*own, strict=True)
    return Curvature(min(smallest), max(largest)), costs + Costs.of(run, task)
