"""Local SGD: every client trains alone, without messages."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from hyperpush.base.ranges import OptionalCount
from hyperpush.data.batches import full_batch, minibatch
from hyperpush.inner.base import GradientSolver, Learner, solver_program
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node, Repeat, Sequence
from hyperpush.solving.settings import largest_curvature
from hyperpush.task.problem import Problem


class LocalSGD(GradientSolver):
    """SGD of each client on its own inner cost, without messages (Robbins and Monro 1951).

        x_i ← x_i − η ∇f_i(x_i)

    **It stops near each client's own solution**: on all examples it converges slowly, like gradient descent. With
    mini-batches and a constant η it ends about η away from the solution.

    **Use it** as the baseline without cooperation, and for methods with separate params for each client. **Avoid it**
    where clients should share params: each ends at the solution of its own cost.

    Args:
        steps: Gradient steps; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)` by step. Take one below 2 / λ_max of the client's Hessian. None
            without an `optimizer` takes 1 / λ_max at the start, which costs ten products.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        optimizer: Instead of `step_size`: `hp.optimizer(…)`, or any Optax transformation.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Each client ends at the solution of its own cost.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [6.0]]), validation=jnp.zeros((3, 1)),
        ... )
        >>> solver = hp.LocalSGD(steps=30, step_size=0.5)
        >>> print(hp.train(task, solver, hp.networks.FullyConnected(3), key=0).params.round(2))
        [1. 2. 6.]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="none",
        target="inner",
        sends="nothing",
        paper="Robbins and Monro, A stochastic approximation method",
        note="each client's inner cost alone",
        lossy=True,
        example={"steps": 20, "step_size": 0.1},
    )

    can_find_step: ClassVar[bool] = True

    batch_size: OptionalCount = eqx.field(static=True, default=None)

    def program(self, problem: Problem) -> Node:
        transform = self.transformation

        def descend(state: Learner, ctx: Context) -> Learner:
            return state.step(problem, transform, minibatch(ctx.data.train, self.batch_size, ctx.key))

        def find_step(state: Learner, ctx: Context) -> Learner:
            return replace(state, memory=_safe_step(problem, state, ctx))

        loop = Repeat(Local(descend), self.steps, name="LocalSGD")
        return solver_program(Sequence(Local(find_step), loop) if self.finds_step else loop, transform)


def _safe_step(problem: Problem, state: Learner, ctx: Context) -> Float[Array, ""]:
    """Return 1 / the largest curvature of the client's own cost, or 1 / its bound on a private task."""
    vector, back = ravel_pytree(state.params)
    examples = full_batch(ctx.data.train)

    def multiply(direction: Float[Array, " d"]) -> Float[Array, " d"]:
        return ravel_pytree(problem.bounding_product(state.params, state.hyper, examples, back(direction)))[0]

    largest = largest_curvature(multiply, vector, ctx.key)
    return 1 / jnp.maximum(largest, jnp.finfo(largest.dtype).tiny ** 0.5)
