"""What estimators that solve a linear system by conjugate gradients have in common.

M. Hestenes and E. Stiefel, "Methods of conjugate gradients for solving linear systems", 1952. The steps are written out
here, and not taken from a solver library: in `ImplicitCG` each needs an exchange between clients, and elsewhere the
products must stay visible in the trace, where they are counted and where a private task adds noise.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import check_integer, check_nonnegative
from hyperpush.data.batches import everything
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.method import Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Average, Context, Node, Repeat, Sequence


class Implicit(HypergradientEstimator):
    """An estimator with at most `steps` of conjugate gradients for a Hessian with `damping` on its diagonal."""

    steps: int = eqx.field(static=True)
    damping: Number = eqx.field(converter=as_number, default=0.0)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.steps", self.steps, minimum=1)
        check_nonnegative(f"{name}.damping", self.damping)


class System(eqx.Module):
    """A linear system on the way to its solution q; several of them have a leading axis."""

    q: Float[Array, "*k d"]
    residual: Float[Array, "*k d"]
    direction: Float[Array, "*k d"]

    @staticmethod
    def start(right: Float[Array, "*k d"]) -> "System":
        """Before the first step."""
        return System(jnp.zeros_like(right), right, right)

    @property
    def size(self) -> Float[Array, "*k"]:
        """The squared norm of the residual."""
        return jnp.sum(self.residual**2, axis=-1)

    def advance(self, image: Float[Array, "*k d"], *, only_convex: bool = False) -> "System":
        """After a step, where `image` is the product of the matrix with the direction.

        A system that is solved stays as it is. With `only_convex`, so does one that meets a curvature below 0.
        """
        curvature = jnp.sum(self.direction * image, axis=-1)
        length = _ratio(self.size, jnp.maximum(curvature, 0) if only_convex else curvature)
        after = replace(self, q=self.q + length * self.direction, residual=self.residual - length * image)
        return replace(after, direction=after.residual + _ratio(after.size, self.size) * self.direction)


def _ratio(a: Float[Array, "*k"], b: Float[Array, "*k"]) -> Float[Array, "*k 1"]:
    """a/b, and 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))[..., None]


class Solving(eqx.Module):
    """A client while all solve k systems together; the systems are the same at every client once they begin."""

    params: PyTree
    hyper: PyTree
    system: System
    goal: Float[Array, " k"]  # squared norms of the right-hand sides

    @property
    def q(self) -> Float[Array, "k d"]:
        return self.system.q


def solve_together(problem: Problem, method: Implicit, tolerance: Number | None = None) -> Node:
    """Solves (mean Hessian + damping·I) q = mean of the right-hand sides, on `Solving` states.

    Averaged are the right-hand sides and, in each step, the products H_i p. Every client continues from there by
    itself: the vectors, and with them their dot products, are common. With a `tolerance` it ends when all residuals
    are at most this share of their right-hand sides.
    """

    def begin(state: Solving, right: Float[Array, "k d"], mass, ctx: Context):
        system = System.start(right)
        return replace(state, system=system, goal=system.size)

    def products(state: Solving, ctx: Context):
        back, examples = ravel_pytree(state.params)[1], everything(ctx.data.train)

        def one(vector: Float[Array, " d"]):
            return ravel_pytree(problem.hessian_product(state.params, state.hyper, examples, back(vector)))[0]

        return jax.vmap(one)(state.system.direction), jnp.ones(())

    def advance(state: Solving, products: Float[Array, "k d"], mass, ctx: Context):
        return replace(state, system=state.system.advance(products + method.damping * state.system.direction))

    def is_solved(state: Solving, ctx: Context):
        assert tolerance is not None
        return jnp.all(state.system.size <= tolerance**2 * state.goal)

    share = Average(lambda state, ctx: (state.system.residual, jnp.ones(())), begin, rounds=1, by="exact")
    step = Average(products, advance, rounds=1, by="exact")
    until = None if tolerance is None else is_solved
    return Sequence(share, Repeat(step, method.steps, until=until, name=type(method).__name__))


def start_solving(params: PyTree, hyper: PyTree, right: Float[Array, "k d"]) -> Solving:
    """A client before all begin to solve, with its own part of the right-hand sides."""
    return Solving(params, hyper, System.start(right), jnp.zeros(len(right)))
