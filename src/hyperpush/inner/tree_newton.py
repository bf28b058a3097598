"""Newton's method on exact averages along a tree, which solves the inner problem and bounds its error."""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.status import Reason
from hyperpush.data.batches import full_batch
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Node, Repeat, Scope, Sequence
from hyperpush.programs.decide import decide_at_root, has_ended
from hyperpush.programs.report import Report
from hyperpush.solving.common import probe_of
from hyperpush.solving.descent import Descent
from hyperpush.solving.iterate import HUGE, RUNNING, Point
from hyperpush.solving.newton_cg import CAUTION, LOOSE, TRIAL, Steps
from hyperpush.solving.packed_newton import Packed, pack
from hyperpush.task.problem import Problem

MOST_PRODUCTS = 500  # largest number of Hessian products in one Newton step


class NewtonMemory(eqx.Module):
    """A client's memory for the next outer step."""

    common: Bool[Array, "*clients"]  # True if all clients hold the same params already
    smallest: Float[Array, "*clients"]  # smallest eigenvalue of the mean Hessian; 0: not known


class TreeNewton(InnerSolver):
    """Newton's method on exact averages along a tree: solves the inner problem, without settings to choose.

    The Newton step p solves

        mean(H_k(x)) p = −mean(∇f_k(x)),    x ← x + p if that lowers the mean cost

    All means are exact: they are gathered along a spanning tree of the network and sent back. With few params, one
    message holds cost, gradient and Hessian. With many params, conjugate gradients take one product per average. They
    stay inside a trust region (Steihaug 1983), and are only as exact as a step needs (Eisenstat and Walker 1996). The
    method descends along negative curvature. All clients end with the same params. The problem counts as solved if

        ‖mean g‖/θ ≤ tolerance·‖x‖,    θ the smallest eigenvalue of the mean Hessian

    With few params θ is computed exactly. With many params θ is the smallest Ritz value of a random probe, which is the
    same at every client.

    **Use it** wherever links repeat and members trust each other: it is the default (`hp.AutomaticInner`). **Avoid it**
    with mini-batches, on private tasks, and among members that distrust each other. A member that forwards in the tree
    sees its children's vectors and can falsify a sum. Use `TrackedSGP` or `SGP` instead.

    Args:
        steps: Largest number of Newton steps, at least 1; the status says if it is reached.
        tolerance: The largest accepted distance to the solution, relative to it, above 0. None: 1e-6 in float64, 1e-4
            in float32.
        packed: Largest number of params for which the whole Hessian is sent, 0 or more.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        The mean of 1, 2 and 6 minimizes the mean inner cost.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [6.0]]), validation=jnp.zeros((3, 1)),
        ... )
        >>> found = hp.train(task, hp.TreeNewton(), hp.networks.DirectedRing(3), key=0)
        >>> print(found.params, found.status)
        [3. 3. 3.] converged (tolerance)
    """

    certifies: ClassVar[bool] = True
    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="inner",
        sends="along a tree, the size of the params squared, halved, per step; more than 32 params: their size per "
        "product",
        paper="here; Steihaug 1983, Eisenstat and Walker 1996",
        note="inner nodes of the tree see their children's vectors",
        lossy=True,
        example={"steps": 20},
    )

    steps: int = eqx.field(static=True, default=100)
    tolerance: Number | None = eqx.field(converter=as_number, default=None)
    packed: int = eqx.field(static=True, default=32)

    def __check_init__(self):
        check_integer("TreeNewton.steps", self.steps, minimum=1)
        check_positive("TreeNewton.tolerance", self.tolerance, optional=True)
        check_integer("TreeNewton.packed", self.packed, minimum=0)

    @property
    def stacks(self) -> bool:
        return True

    @property
    def solves(self) -> bool:
        return True

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        if task.privacy is not None:
            allowed = "SGP(…): Newton steps are chosen by costs, and none of them has a release with noise"
            raise InvalidInput("method", "TreeNewton on a private task", allowed)

    def bind(self, network: Any, engine: Any = None, task: Any = None) -> "TreeNewton":
        if engine is not None and engine.no_tree:
            allowed = "TrackedSGP(…) or AutomaticInner(), which need no tree"
            raise InvalidInput("method", f"TreeNewton among {engine.no_tree}", allowed)
        return self

    def memory(self, params: PyTree, hyper: PyTree) -> NewtonMemory:
        return NewtonMemory(jnp.zeros((), bool), jnp.zeros((), ravel_pytree(params)[0].dtype))

    def program(self, problem: Problem) -> Node:
        def enter(state: InnerState, ctx: Context) -> Point:
            return self._start(state, ctx)

        def leave(before: InnerState, state: Point, ctx: Context) -> InnerState:
            return self._finish(before, state)

        def get_point(state: Point, ctx: Context) -> tuple[Float[Array, " d"], Array]:
            return state.trial, jnp.ones(())

        def put_point(state: Point, mean: Float[Array, " d"], mass: Any, ctx: Context) -> Point:
            return replace(state, x=mean, trial=mean)

        def get(state: Point, ctx: Context) -> tuple[Any, Array]:
            assert isinstance(state, Packed | Steps)
            message = _expand(problem, state, ctx) if isinstance(state, Packed) else _look_along(problem, state, ctx)
            return _finite(message, state.count > 0), jnp.ones(())

        def answer(state: Point, means: tuple[Any, ...], ctx: Context) -> Point:
            assert isinstance(state, Packed | Steps)
            after = state.look(means, self._tolerance(state.x), self.steps)
            return replace(after, params=ravel_pytree(state.params)[1](after.x), hyper=None)

        def put(state: Point, after: Point, mass: Any, ctx: Context) -> Point:
            return replace(after, hyper=state.hyper)

        def is_done(state: Point, ctx: Context) -> Bool[Array, ""]:
            return state.reason != RUNNING

        def differs(state: Point, ctx: Context) -> Int[Array, ""]:
            return jnp.where(state.count < 0, 0, 1)

        meet = Repeat(Average(get_point, put_point, rounds=1, by="tree"), 1, times=differs, name="start of TreeNewton")
        body = decide_at_root(Average(get, put, rounds=1, by="tree", answer=answer), is_done)
        most = self.steps * (MOST_PRODUCTS + 2)
        loop = Repeat(body, most, until=has_ended, name=self.loop, common=True)
        return Scope(Sequence(meet, loop), enter, leave)

    def _tolerance(self, like: Array) -> Any:
        if self.tolerance is not None:
            return self.tolerance
        return 1e-6 if like.dtype == jnp.float64 else 1e-4

    def _start(self, state: InnerState, ctx: Context) -> Point:
        x = ravel_pytree(state.params)[0]
        none, zero, no = jnp.zeros_like(x), jnp.zeros((), x.dtype), jnp.zeros((), bool)
        known = state.memory
        # A count of −1 means that all clients already hold the same params, from the previous outer step.
        count = jnp.asarray(0 if known is None else jnp.where(known.common, -1, 0), jnp.int32)
        point: dict[str, Any] = {
            "params": state.params, "hyper": state.hyper, "x": x, "trial": x, "cost": zero, "gradient": none,
            "noise": zero, "longest": zero, "count": count, "rejected": jnp.zeros((), jnp.int32),
            "reason": jnp.asarray(RUNNING, jnp.int32), "error": zero - 1, "ended": no,
        }  # fmt: skip
        if x.size <= self.packed:
            matrix = jnp.zeros((x.size, x.size), x.dtype)
            return Packed(**point, values=none, vectors=matrix, damping=zero, predicted=zero, floor=zero)
        room = min(4 * x.size + 20, MOST_PRODUCTS)
        return Steps(
            **point,
            probe=probe_of(x.size, x.dtype, ctx),
            phase=jnp.asarray(TRIAL, jnp.int32),
            descent=Descent.start(none, room),
            unit=zero,
            step=none,
            image=none,
            bounded=no,
            region=zero + HUGE,
            forcing=zero + LOOSE,
            smallest=zero,
            probed=zero if known is None else known.smallest / CAUTION,
            largest=zero,
        )

    def _finish(self, before: InnerState, state: Point) -> InnerState:
        reason = jnp.where(state.reason == RUNNING, Reason.LIMIT, state.reason)
        memory = before.memory
        if memory is not None:
            seen = jnp.zeros_like(state.error)
            if isinstance(state, Steps):
                seen = jnp.where(reason == Reason.TOLERANCE, state.known, 0)
            memory = NewtonMemory(jnp.ones((), bool), seen)
        error = jnp.where(reason == Reason.ILL_POSED, -1, state.error)
        return InnerState(state.params, before.hyper, before.links, Report.of(reason, error), memory)


def _expand(problem: Problem, state: Packed, ctx: Context) -> tuple[Any, ...]:
    """Return a client's cost, gradient and Hessian at the trial point, and squared norms for their rounding errors."""
    back = ravel_pytree(state.params)[1]
    cost, gradient, hessian = problem.expansion(back(state.trial), state.hyper, full_batch(ctx.data.train))
    gradient = ravel_pytree(gradient)[0]
    return cost, gradient, pack((hessian + hessian.T) / 2), gradient @ gradient, jnp.sum(hessian**2)


def _look_along(problem: Problem, state: Steps, ctx: Context) -> tuple[Any, ...]:
    """Return a client's cost and gradient at the trial point, or its Hessian product with the phase's direction."""
    back, trying = ravel_pytree(state.params)[1], state.phase == TRIAL
    point = jnp.where(trying, state.trial, state.x)
    cost, gradient, product = problem.along(back(point), state.hyper, full_batch(ctx.data.train), back(state.direction))
    vector = jnp.where(trying, ravel_pytree(gradient)[0], ravel_pytree(product)[0])
    return cost, vector, vector @ vector


def _finite(message: PyTree, tries: Bool[Array, ""]) -> PyTree:
    """Replace a message that is not finite by `HUGE`, so that all clients reject the trial; not at the first point."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(message)]))
    return jax.tree.map(lambda leaf: jnp.where(finite | ~tries, leaf, HUGE), message)
