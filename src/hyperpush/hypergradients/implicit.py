"""Common parts of estimators that solve a linear system by conjugate gradients.

M. Hestenes and E. Stiefel, "Methods of conjugate gradients for solving linear systems", 1952. The steps are written out
here instead of taken from a solver library, because each step of `ImplicitCG` needs an exchange between clients. Also,
the products must stay visible in the trace, where they are counted and where a private task adds noise.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.base.checks import check_integer
from hyperpush.base.numbers import Number, as_number
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients.base import HypergradientState, subtract_indirect
from hyperpush.hypergradients.systems import SystemSolver, report_error
from hyperpush.programs import Average, Context, Node, Repeat, Sequence
from hyperpush.solving.common import ROUNDING, probe_of
from hyperpush.solving.ritz import Tridiagonal
from hyperpush.task.problem import Problem


class Implicit(SystemSolver):
    """An estimator by at most `steps` steps of conjugate gradients, with `damping` on the Hessian's diagonal."""

    steps: int = eqx.field(static=True)
    damping: Number = eqx.field(converter=as_number, default=0.0)

    def __check_init__(self):
        check_integer(f"{type(self).__name__}.steps", self.steps, minimum=1)

    def start_probe(self, problem: Problem, size: int, dtype: jnp.dtype, ctx: Context) -> "System | None":
        """Return a system with a random right-hand side, which reveals singular directions that the first one misses.

        Return None for `singular="minimum-norm"`, which does not need it, and on private tasks, which are too noisy.
        """
        if self.ignores_flat or problem.private:
            return None
        return System.start(probe_of(size, dtype, ctx), self.steps)


class System(eqx.Module):
    """A linear system during its solution by conjugate gradients, with the iterate q.

    It stops changing once it is solved up to rounding, or after a direction without positive curvature.
    """

    q: Float[Array, "*k d"]
    residual: Float[Array, "*k d"]
    direction: Float[Array, "*k d"]
    ritz: Tridiagonal
    largest: Float[Array, "*k"]  # largest curvature of the clients' Hessians so far
    drift: Float[Array, "*k"]  # possible contribution of rounding to the residual
    flat: Bool[Array, "*k"]  # True if a direction lacks positive curvature

    @staticmethod
    def start(right: Float[Array, " d"], room: int) -> "System":
        """Return the system before the first of at most `room` steps."""
        zero, rounding = jnp.zeros((), right.dtype), jnp.finfo(right.dtype).eps
        ritz, drift = Tridiagonal.start(room, right.dtype), rounding * jnp.linalg.norm(right)
        return System(jnp.zeros_like(right), right, right, ritz, zero, drift, jnp.zeros((), bool))

    @property
    def floor(self) -> Float[Array, "*k"]:
        """Largest curvature that rounding cannot tell from zero."""
        return ROUNDING * jnp.finfo(self.largest.dtype).eps * self.largest

    @property
    def solved(self) -> Bool[Array, "*k"]:
        """True if rounding prevents a smaller residual."""
        return jnp.linalg.norm(self.residual, axis=-1) <= 2 * self.drift

    def smallest(self) -> Float[Array, ""]:
        """Return the smallest eigenvalue so far, at least the floor; infinite before the first step."""
        return jnp.where(self.ritz.count > 0, self.ritz.smallest(self.floor), jnp.inf)

    def error(self, smallest: Float[Array, ""]) -> Float[Array, ""]:
        """Return an estimate of the largest error of q if `smallest` is the smallest eigenvalue of the Hessian."""
        error = jnp.linalg.norm(self.residual) + self.drift
        return jnp.where(jnp.isinf(smallest), jnp.where(error > 0, jnp.inf, 0), error / smallest)

    def advance(self, image: Float[Array, " d"], spread: Float[Array, ""]) -> "System":
        """Return the system after a step.

        `image` is the product of the matrix and the direction. `spread` is the root mean square of the norms of the
        clients' products, from which `image` was averaged.
        """
        squared, slope = self.residual @ self.residual, self.direction @ image
        size = jnp.linalg.norm(self.direction)
        system = replace(self, largest=jnp.maximum(self.largest, _ratio(spread, size)))
        flat = slope <= system.floor * size**2
        length = _ratio(squared, slope)
        residual = self.residual - length * image
        ratio = _ratio(residual @ residual, squared)
        after = replace(
            system,
            q=self.q + length * self.direction,
            residual=residual,
            direction=residual + ratio * self.direction,
            ritz=self.ritz.append(jnp.where(length > 0, length, 1), ratio),
            drift=jnp.hypot(self.drift, jnp.finfo(image.dtype).eps * spread * length),
        )
        ended = replace(system, flat=self.flat | (flat & ~self.solved))
        stays = flat | self.flat | self.solved
        return jax.tree.map(lambda old, new: jnp.where(stays, old, new), ended, after)


def _ratio(a: Float[Array, ""], b: Float[Array, ""]) -> Float[Array, ""]:
    """Return a/b, or 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def judge(system: System, probe: System | None) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """Return the estimated error of q, and True if system or probe shows that the Hessian is singular or indefinite."""
    seen = [each for each in (system, probe) if each is not None]
    smallest = [each.smallest() for each in seen]
    flat = [each.flat | (least <= each.floor) for each, least in zip(seen, smallest, strict=True)]
    return system.error(jnp.min(jnp.stack(smallest))), jnp.any(jnp.stack(flat))


def finish_solving(
    problem: Problem,
    before: HypergradientState,
    direct: PyTree,
    system: System,
    probe: System | None,
    ctx: Context,
    tolerance: Number | None = None,
) -> HypergradientState:
    """Return the state with the estimate `direct` − B_i q and its report."""
    error, flat = judge(system, probe)
    after = subtract_indirect(problem, before, direct, ravel_pytree(before.params)[1](system.q), ctx)
    ended = system.solved | _is_within(system, probe, tolerance)
    report = report_error(problem, before, after.value, direct, system.q, error, flat, ended, ctx, tolerance)
    return replace(after, report=report)


def _is_within(system: System, probe: System | None, tolerance: Number | None) -> Bool[Array, ""]:
    """Return True if the estimated relative error of q is at most `tolerance`."""
    if tolerance is None:
        return jnp.zeros((), bool)
    return judge(system, probe)[0] <= tolerance * jnp.linalg.norm(system.q)


class Solving(eqx.Module):
    """A client's state while all clients solve k systems together; the systems are then equal at every client."""

    params: PyTree
    hyper: PyTree
    systems: System  # k systems, stacked on axis 0
    probe: System | None

    @property
    def q(self) -> Float[Array, "k d"]:
        return self.systems.q

    def system(self, number: Array | int) -> System:
        """Return the system at position `number` of the k stacked systems."""
        return jax.tree.map(lambda leaf: leaf[number], self.systems)


def solve_together(problem: Problem, method: Implicit, tolerance: Number | None = None) -> Node:
    """Return a node that solves (mean Hessian + damping·I) q = mean of the right-hand sides, on `Solving` states.

    Clients average the right-hand sides and, in each step, the products H_i p with the direction p and the products'
    squared norms. All other computations are local, because all clients hold the same vectors. With a `tolerance`, the
    loop ends when the estimated relative errors of all q are below it, or when rounding prevents a better result.
    """

    def begin(state: Solving, right: Float[Array, "k d"], mass, ctx: Context):
        return replace(state, systems=_start_all(right, method.steps))

    def products(state: Solving, ctx: Context):
        back, examples = ravel_pytree(state.params)[1], full_batch(ctx.data.train)

        def one(vector: Float[Array, " d"]):
            image = ravel_pytree(problem.hessian_product(state.params, state.hyper, examples, back(vector)))[0]
            return image, image @ image

        probed = None if state.probe is None else one(state.probe.direction)
        return (jax.vmap(one)(state.systems.direction), probed), jnp.ones(())

    def one_step(system: System, image: Float[Array, " d"], squared: Float[Array, ""]) -> System:
        return system.advance(image + method.damping * system.direction, jnp.sqrt(squared))

    def advance(state: Solving, means, mass, ctx: Context):
        (images, squared), probed = means
        probe = None if state.probe is None else one_step(state.probe, *probed)
        return replace(state, systems=jax.vmap(one_step)(state.systems, images, squared), probe=probe)

    def has_ended(state: Solving, ctx: Context):
        within = jax.vmap(lambda system: _is_within(system, state.probe, tolerance))(state.systems)
        return jnp.all(state.systems.solved | state.systems.flat | within)

    share = Average(lambda state, ctx: (state.systems.residual, jnp.ones(())), begin, rounds=1, by="exact")
    step = Average(products, advance, rounds=1, by="exact")
    # All clients compute the same condition from common values, so they need no vote.
    until = None if tolerance is None else has_ended
    return Sequence(share, Repeat(step, method.steps, until=until, name=type(method).__name__, common=True))


def _start_all(rights: Float[Array, "k d"], room: int) -> System:
    return jax.vmap(lambda right: System.start(right, room))(rights)


def start_solving(
    problem: Problem, method: Implicit, state: HypergradientState, rights: Float[Array, "k d"], ctx: Context
) -> Solving:
    """Return a client's state before the solution, with its own part of the right-hand sides."""
    probe = method.start_probe(problem, rights.shape[1], rights.dtype, ctx)
    return Solving(state.params, state.hyper, _start_all(rights, method.steps), probe)
