"""Tracked hypergradient push: gradient tracking over push-sum, without the bias of a finite number of pushes."""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.checks import check_integer, check_positive
from hyperpush.data.batches import draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.hypergradients.settings import MOST_PUSHES, largest_curvature, learn_settings
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence

CHECK = 5  # steps between two votes on ending
WORSE = 100  # times the smallest tracked gradient so far: a client that has seen that takes plain steps from then on


class Memory(eqx.Module):
    """What a client keeps for the next outer step: where it stood, and the settings that were found."""

    z: Float[Array, "*clients d"]
    mass: Float[Array, "*clients"]
    aim: Float[Array, "*clients d"]
    gradient: Float[Array, "*clients d"]
    tracker: Float[Array, "*clients d"]
    pushes: Int[Array, "*clients"]  # 0: not known yet
    curvature: Float[Array, "*clients"]  # mean of the clients' largest curvatures, as far as this client learnt it
    own: Float[Array, "*clients"]  # its own then


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    z: Float[Array, " d"]
    mass: Float[Array, ""]  # ω
    aim: Float[Array, " d"]  # where the own step led, before the others' were mixed in
    product: Float[Array, " d"]  # H_i times that: g_i without the part that stays, c_i
    tracker: Float[Array, " d"]  # y
    moves: Float[Array, "k d"]  # the last changes of q
    turns: Float[Array, "k d"]  # and of the tracked gradient
    doubts: Float[Array, " k"]  # what part of each change was mixing
    least: Float[Array, ""]  # size of the smallest tracked gradient so far; 0 once one was much larger
    last: tuple[Float[Array, " e"], Float[Array, " e"]]  # q and the tracked gradient one step ago; empty if unused
    mean: Float[Array, " m"]  # of q over the steps, late ones counting more; empty without mini-batches
    count: Int[Array, ""]
    pushes: Int[Array, ""]
    curvature: Float[Array, ""]
    own: Float[Array, ""]
    along_hyper: PyTree  # (1/n)∂_λ F_i as released, on a private task; else None

    @property
    def q(self) -> Float[Array, " d"]:
        return self.z / self.mass

    @property
    def slope(self) -> Float[Array, " d"]:
        """The tracked mean gradient."""
        return self.tracker / self.mass


class TrackedHGP(HypergradientEstimator):
    """Tracked hypergradient push: gradient tracking over push-sum, without the bias of finitely many pushes.

    Clients solve min_q Σ_k ½qᵀH_k q − c_kᵀq together, c_k = (1/n) ∂_x F_k, then take v_i = (1/n) ∂_λ F_i − B_i q_i.
    The closed form of the hypergradient (`HGP`) contains the solution of this quadratic. With g_i(q) = H_i q − c_i and
    y = g(q), at most `steps` times (after Push-DIGing: Nedić, Olshevsky and Shi, arXiv:1607.03218)

        p⁺ = q + Δ,  z ← P(z + ωΔ),  ω ← Pω,  y ← P(y + g(p⁺) − g(p)),  q = z/ω

    with `pushes` rounds for each P. The only fixed point is the solution, whatever the displacements Δ. All that is
    pushed (z, ω, y) is conserved, so lost messages do no harm.

    Δ = −αy/ω, accelerated by the last changes of q and y/ω (Anderson 1965): each client alone first goes to where the
    mean gradient is smallest among the combinations of them that it knows.

    **Use it** on directed, changing or lossy networks, where `HGP` would need many pushes. **Avoid its defaults** at
    condition numbers above about 1e3, and where a client's Hessian is zero: they can return wrong values without a
    word. Set `step_size`, `pushes` and `tolerance` there, and compare with another estimator or with `hp.check`.

    With mini-batches there is no acceleration and no early end; the result is the mean of q over the steps, weighted by
    their number, and its noise falls with `steps`. In `hp.solve` each outer step continues from where the one before
    stood, with the settings found then.

    On a private task each step releases a clipped and noisy H_i(p⁺ − p), and g(p) is the sum of these: as noise is in
    proportion to ‖p⁺ − p‖, it falls as the steps do. Displacements and votes are made of what was released; the
    search for pushes uses no data. Every outer step starts anew: steps + 1 releases in each, and a few more where
    clients vote.

    Args:
        steps: Steps at most; with 0 the result is the direct gradient (1/n) ∂_λ F_i.
        step_size: α, above 0; below 1 / λ_max of the Hessians is safe. None takes the inverse of the mean of the
            clients' largest curvatures, which costs each ten products and a few rounds of scalars. On a private task
            it must be given: noise would decide on it.
        pushes: Rounds of push-sum per step, at least 1. None finds how many let differences between clients shrink
            threefold, at the price of a few rounds of scalars. Give it where messages get lost.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        tolerance: End when all clients agree that ‖y/ω‖ and what mixing still changes are below this share of the size
            of the solution, on which they vote every five steps. None takes all `steps`, without votes; take None where
            messages get lost.
        acceleration: How many changes of q and y/ω to keep, each a vector; 0 takes plain steps.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="two vectors of the size of the params, and one number, per push",
        paper="here; after Nedić, Olshevsky and Shi, Achieving geometric convergence over time-varying graphs",
        private=True,
        lossy=True,
        example={"steps": 30, "step_size": 0.1, "pushes": 3, "tolerance": None},
    )

    steps: int = eqx.field(static=True, default=1000)
    step_size: Number | None = eqx.field(converter=as_number, default=None)
    pushes: int | None = eqx.field(static=True, default=None)
    batch_size: int | None = eqx.field(static=True, default=None)
    tolerance: Number | None = eqx.field(converter=as_number, default=1e-5)
    acceleration: int = eqx.field(static=True, default=5)

    def __check_init__(self):
        check_integer("TrackedHGP.steps", self.steps, minimum=0)
        check_positive("TrackedHGP.step_size", self.step_size, optional=True)
        check_integer("TrackedHGP.pushes", self.pushes, minimum=1, maximum=MOST_PUSHES, optional=True)
        check_integer("TrackedHGP.batch_size", self.batch_size, minimum=1, optional=True)
        check_positive("TrackedHGP.tolerance", self.tolerance, optional=True)
        check_integer("TrackedHGP.acceleration", self.acceleration, minimum=0)

    def check_task(self, task: Any) -> None:
        super().check_task(task)
        if task.privacy is not None and self.step_size is None:
            allowed = "a number on a private task: the curvature that it would be found from is lost in noise"
            raise InvalidInput("TrackedHGP.step_size", None, allowed)

    @property
    def _votes(self) -> bool:
        return self.tolerance is not None and self.batch_size is None

    def memory(self, params: PyTree, hyper: PyTree) -> Memory:
        """One client's memory before the first outer step."""
        vector = jnp.zeros_like(ravel_pytree(params)[0])
        zero, one = jnp.zeros((), vector.dtype), jnp.ones((), vector.dtype)
        return Memory(vector, one, vector, vector, vector, jnp.zeros((), jnp.int32), zero, zero)

    def program(self, problem: Problem) -> Node:
        secants = self.acceleration if self.batch_size is None else 0

        def product(state: _State | HypergradientState, batch: PyTree, q: Float[Array, " d"]) -> Float[Array, " d"]:
            unravel = ravel_pytree(state.params)[1]
            return ravel_pytree(problem.hessian_product(state.params, state.hyper, batch, unravel(q)))[0]

        def enter(state: HypergradientState, ctx: Context) -> _State:
            along_x, along_hyper = outer_gradient_shares(problem, state, ctx)
            source = ravel_pytree(along_x)[0]
            known = self.memory(state.params, state.hyper) if state.memory is None else state.memory
            examples, aim = everything(ctx.data.train), known.aim
            # Trackers go on from where they were: their sum stays that of the gradients, what was mixed stays mixed.
            anew = state.memory is None or problem.private
            turned = jnp.zeros_like(source) if anew else product(state, examples, aim)
            tracker = known.tracker + (turned - source) - known.gradient
            q = known.z / known.mass
            none = jnp.zeros(secants, q.dtype)
            empty = none[:, None] * q
            own = curvature = jnp.zeros((), q.dtype)
            if self.step_size is None:
                own = largest_curvature(lambda v: product(state, examples, v), q, ctx.key)
                # Known from an earlier outer step, and corrected by how much the own one has changed since.
                earlier = known.curvature * own / jnp.where(known.own > 0, known.own, 1)
                curvature = jnp.where(known.pushes > 0, earlier, own)
            pushes = known.pushes if self.pushes is None else jnp.asarray(self.pushes, jnp.int32)
            return _State(
                params=state.params,
                hyper=state.hyper,
                z=known.z,
                mass=known.mass,
                aim=aim,
                product=turned,
                tracker=tracker,
                moves=empty,
                turns=empty,
                doubts=none,
                least=jnp.sqrt(jnp.finfo(q.dtype).max),  # none yet; states must be finite
                last=(q, tracker) if secants else (q[:0], q[:0]),
                mean=q if self.batch_size is not None else q[:0],
                count=jnp.zeros((), jnp.int32),
                pushes=pushes,
                curvature=curvature,
                own=own,
                along_hyper=along_hyper if problem.private else None,
            )

        def descend(state: _State, ctx: Context) -> _State:
            q, slope = state.q, state.slope
            step = (1 if secants else 0.5) / state.curvature if self.step_size is None else self.step_size
            moves, turns, doubts, change = state.moves, state.turns, state.doubts, -step * slope
            least = state.least
            if secants:
                # The first tracked gradient that is not the own one alone belongs to step 1.
                slot, known = (state.count - 2) % secants, state.count > 1
                move = q - state.last[0]
                moves = moves.at[slot].set(jnp.where(known, move, moves[slot]))
                turns = turns.at[slot].set(jnp.where(known, slope - state.last[1], turns[slot]))
                mixing, size = jnp.linalg.norm(q - state.aim), jnp.linalg.norm(move)
                doubt = jnp.where(mixing < 1e3 * size, mixing / jnp.where(size > 0, size, 1), 1e3)
                doubts = doubts.at[slot].set(jnp.where(known, doubt, doubts[slot]))
                weights = smallest(turns, slope, jnp.max(doubts))
                # Combinations that a client alone finds best can be bad for all, such as where its own Hessian is zero.
                rise = jnp.linalg.norm(slope)
                least = jnp.where(known, jnp.minimum(least, rise), least)
                accelerated = -weights @ moves - step * (slope - weights @ turns)
                least = jnp.where(rise <= WORSE * least, least, 0)
                change = jnp.where(least > 0, accelerated, change / 2)
            change = jnp.where(state.count > 0, change, 0)  # before anything is mixed there is no common direction
            aim = q + change
            batch = draw(ctx.data.train, self.batch_size, ctx.key)
            if problem.private:
                turned = state.product + product(state, batch, aim - state.aim)
            else:
                turned = product(state, batch, aim)
            return replace(
                state,
                z=state.z + state.mass * change,
                aim=aim,
                product=turned,
                tracker=state.tracker + turned - state.product,
                moves=moves,
                turns=turns,
                doubts=doubts,
                least=least,
                last=(q, slope) if secants else state.last,
                count=state.count + 1,
            )

        def stay(state: _State, ctx: Context) -> _State:
            # The first step of `descend`, without its product.
            return replace(state, last=(state.q, state.slope) if secants else state.last, count=state.count + 1)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass, tracker = inbox.mix((state.z, state.mass, state.tracker))
            return replace(state, z=z, mass=mass, tracker=tracker)

        def collect(state: _State, ctx: Context) -> _State:
            return replace(state, mean=state.mean + 2 / (state.count + 1) * (state.q - state.mean))

        def settled(state: _State, ctx: Context):
            assert self.tolerance is not None
            size = self.tolerance * jnp.linalg.norm(state.q)
            curvature = state.curvature if self.step_size is None else 1 / self.step_size
            still = jnp.linalg.norm(state.q - state.aim) <= size
            return still & (jnp.linalg.norm(state.slope) <= curvature * size)

        def leave(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            q = ravel_pytree(before.params)[1](state.q if self.batch_size is None else state.mean)
            along_x, value = None, state.along_hyper  # released with the rest, on a private task
            if not problem.private:
                along_x, value = outer_gradient_shares(problem, before, ctx)
            if self.steps or not problem.private:
                product = problem.jacobian_product(before.params, before.hyper, everything(ctx.data.train), q)
                value = jax.tree.map(jnp.subtract, value, product)
            memory = None
            if before.memory is not None and problem.private:
                memory = replace(before.memory, pushes=state.pushes)
            elif before.memory is not None:
                gradient = state.product - ravel_pytree(along_x)[0]
                kept = (state.z, state.mass, state.aim, gradient, state.tracker)
                memory = Memory(*kept, state.pushes, state.curvature, state.own)
            return replace(before, value=value, memory=memory)

        push = Exchange(send=lambda state, ctx: (state.z, state.mass, state.tracker), receive=receive, conserved=True)
        if self.pushes is None:
            pushing = Repeat(push, MOST_PUSHES, times=lambda state, ctx: state.pushes, name="pushes")
        else:
            pushing = Repeat(push, self.pushes, name="pushes")
        rest = Sequence(pushing) if self.batch_size is None else Sequence(pushing, Local(collect))
        body, steps = Sequence(Local(descend), *rest.nodes), self.steps
        prepare = learn_settings(self.pushes) if self.pushes is None or self.step_size is None else Sequence()
        if problem.private and steps:  # the first step stays where it is: it needs no product
            prepare, steps = Sequence(prepare, Local(stay), *rest.nodes), steps - 1
        if not self._votes:
            solving = Repeat(body, steps, name="TrackedHGP")
        else:
            some = Repeat(body, CHECK, name="steps")
            solving = Repeat(some, -(-steps // CHECK), until=settled, name="TrackedHGP")
        return Scope(Sequence(prepare, solving), enter, leave)


def smallest(turns: Float[Array, "k d"], slope: Float[Array, " d"], doubt: Float[Array, ""]) -> Float[Array, " k"]:
    """The w that makes ‖slope − w·turns‖ smallest, regularised as much as the turns are in doubt; 0 for zero turns."""
    sizes = jnp.linalg.norm(turns, axis=1)
    scale = jnp.where(sizes > 0, 1 / jnp.where(sizes > 0, sizes, 1), 0)
    unit = turns * scale[:, None]
    least = 100 * jnp.finfo(turns.dtype).eps
    normal = unit @ unit.T + jnp.maximum(0.1 * doubt**2, least) * jnp.eye(turns.shape[0], dtype=turns.dtype)
    return jnp.linalg.solve(normal, unit @ slope) * scale
