"""Base class of baselines with local epochs, and the penalty that pulls params to another model."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.base.numbers import Number
from hyperpush.base.ranges import Count, OptionalCount
from hyperpush.inner.base import GradientSolver, Learner
from hyperpush.inner.fedavg import local_epochs
from hyperpush.programs import Context
from hyperpush.task.problem import L2, Penalty, Problem


class LocalEpochs(GradientSolver):
    """A baseline whose clients train on their own examples, for some epochs, between two averages of the params.

    Args:
        steps: Number of rounds, 0 or more. 0 leaves the params unchanged.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
    """

    epochs: Count = eqx.field(static=True, default=1)
    batch_size: OptionalCount = eqx.field(static=True, default=None)

    def train(self, problem: Problem, state: Learner, ctx: Context, examples: PyTree) -> Learner:
        """Return a client's state after its local epochs."""
        return local_epochs(problem, self.transformation, state, ctx, examples, self.epochs, self.batch_size)


class Near(eqx.Module):
    """The penalty ½·rate·‖params − center‖², plus the penalty `beside` unless it is None."""

    rate: Number
    center: PyTree
    beside: Penalty | None = None

    def __call__(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        numbers = eqx.filter(params, eqx.is_inexact_array)
        own = L2(self.rate)(jax.tree.map(jnp.subtract, numbers, self.center), hyper)
        return own if self.beside is None else own + self.beside(params, hyper)
