"""Tracked hypergradient push: gradient tracking over push-sum, without the bias of a finite number of pushes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.checks import check_integer, check_positive
from hyperpush.data.batches import draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import (
    HypergradientEstimator,
    HypergradientState,
    outer_gradient_shares,
    subtract_indirect,
)
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
    curvature: Float[Array, "*clients"]  # mean of the clients' largest curvatures, as far as this client learned it
    own: Float[Array, "*clients"]  # its own then


class _Secants(eqx.Module):
    """The last k changes of q and of the tracked gradient, from which a client accelerates its steps."""

    moves: Float[Array, "k d"]  # changes of q
    turns: Float[Array, "k d"]  # and of the tracked gradient
    doubts: Float[Array, " k"]  # what part of each change was mixing
    least: Float[Array, ""]  # size of the smallest tracked gradient so far; 0 once one was much larger
    q: Float[Array, " d"]  # one step ago
    slope: Float[Array, " d"]  # the tracked gradient one step ago

    @staticmethod
    def start(count: int, q: Float[Array, " d"], slope: Float[Array, " d"]) -> "_Secants":
        none = jnp.zeros(count, q.dtype)
        least = jnp.sqrt(jnp.finfo(q.dtype).max)  # none yet; states must be finite
        return _Secants(none[:, None] * q, none[:, None] * q, none, least, q, slope)

    def after(self, q: Float[Array, " d"], slope: Float[Array, " d"], aim: Float[Array, " d"], step) -> "_Secants":
        """With the change since the last step, in place of the oldest one."""
        # The first tracked gradient that is not the own one alone belongs to step 1.
        slot, known = (step - 2) % len(self.doubts), step > 1
        move = q - self.q
        mixing, size = jnp.linalg.norm(q - aim), jnp.linalg.norm(move)
        doubt = jnp.where(mixing < 1e3 * size, mixing / jnp.where(size > 0, size, 1), 1e3)

        def write(rows: Array, row: Array) -> Array:
            return rows.at[slot].set(jnp.where(known, row, rows[slot]))

        rise = jnp.linalg.norm(slope)
        least = jnp.where(known, jnp.minimum(self.least, rise), self.least)
        return _Secants(
            write(self.moves, move),
            write(self.turns, slope - self.slope),
            write(self.doubts, doubt),
            jnp.where(rise <= WORSE * least, least, 0),
            q,
            slope,
        )

    def change(self, step_size: Number) -> Float[Array, " d"]:
        """The next displacement of q."""
        weights = smallest(self.turns, self.slope, jnp.max(self.doubts))
        accelerated = -weights @ self.moves - step_size * (self.slope - weights @ self.turns)
        # Combinations that a client alone finds best can be bad for all, such as where its own Hessian is zero.
        return jnp.where(self.least > 0, accelerated, -step_size * self.slope / 2)


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    z: Float[Array, " d"]
    mass: Float[Array, ""]  # ω
    aim: Float[Array, " d"]  # where the own step led, before the others' were mixed in
    product: Float[Array, " d"]  # H_i times that: g_i without the part that stays, c_i
    tracker: Float[Array, " d"]  # y
    secants: _Secants | None  # None: plain steps
    mean: Float[Array, " d"] | None  # of q over the steps, late ones counting more; None without mini-batches
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

    **Use it** on directed, changing or lossy networks, where `HGP` would need many pushes. **Avoid its defaults** at
    condition numbers above about 1e3, and where a client's Hessian is zero: they can return wrong values without a
    word. Set `step_size`, `pushes` and `tolerance` there, and compare with another estimator or with `hp.check`.

    Departures from Push-DIGing:
        1. Several pushes per step, as many as mix well.
        2. Δ = −αy/ω is accelerated by the last changes of q and y/ω (Anderson 1965): each client alone first goes to
           where the mean gradient is smallest among the combinations of them that it knows. A client whose tracked
           gradient grows a hundredfold takes plain steps of half the size from then on.
        3. The first step moves nothing: before anything is mixed there is no common direction.
        4. With mini-batches there is no acceleration and no early end. The result is the mean of q over the steps,
           weighted by their number, and its noise falls with `steps`.
        5. In `hp.solve` each outer step continues from where the one before stood, with the settings found then.
        6. On a private task each step releases a clipped and noisy H_i(p⁺ − p), and g(p) is the sum of these: as noise
           is in proportion to ‖p⁺ − p‖, it falls as the steps do. Displacements and votes are made of what was
           released; the search for pushes uses no data. Every outer step starts anew: steps + 1 releases in each, and a
           few more where clients vote.

    Args:
        steps: Steps at most, rounded up to a multiple of five where clients vote; with 0 the result is the direct
            gradient (1/n) ∂_λ F_i.
        step_size: α, above 0; below 1 / λ_max of the Hessians is safe. None takes the inverse of the mean of the
            clients' largest curvatures, and half of that for plain steps. It costs each client ten products and a few
            rounds of scalars. On a private task it must be given: noise would decide on it.
        pushes: Rounds of push-sum per step, at least 1. None finds how many let differences between clients shrink
            threefold, at the price of a few rounds of scalars. Give it where messages get lost.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        tolerance: End when all clients agree that ‖y/ω‖ ≤ tolerance·‖q‖/α, and that mixing changes q by at most
            tolerance·‖q‖. They vote every five steps. None takes all `steps`, without votes; take None where messages
            get lost.
        acceleration: How many changes of q and y/ω to keep, each a vector; 0 takes plain steps.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> found = hp.hypergradient(task, hp.TrackedHGP(), network, key=0).value
        >>> bool(abs(found - exact).max() < 1e-3)
        True
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

    def memory(self, params: PyTree, hyper: PyTree) -> Memory:
        """One client's memory before the first outer step."""
        vector = jnp.zeros_like(ravel_pytree(params)[0])
        zero, one = jnp.zeros((), vector.dtype), jnp.ones((), vector.dtype)
        return Memory(vector, one, vector, vector, vector, jnp.zeros((), jnp.int32), zero, zero)

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> _State:
            return self._start(problem, state, ctx)

        def descend(state: _State, ctx: Context) -> _State:
            secants, change = self._displacement(state)
            change = jnp.where(state.count > 0, change, 0)  # before anything is mixed there is no common direction
            aim, batch = state.q + change, draw(ctx.data.train, self.batch_size, ctx.key)
            if problem.private:
                product = state.product + _product(problem, state, batch, aim - state.aim)
            else:
                product = _product(problem, state, batch, aim)
            return replace(
                state,
                z=state.z + state.mass * change,
                aim=aim,
                product=product,
                tracker=state.tracker + product - state.product,
                secants=secants,
                count=state.count + 1,
            )

        def stay(state: _State, ctx: Context) -> _State:
            """The first step of `descend`, without its product."""
            secants = state.secants and replace(state.secants, q=state.q, slope=state.slope)
            return replace(state, secants=secants, count=state.count + 1)

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass, tracker = inbox.mix((state.z, state.mass, state.tracker))
            return replace(state, z=z, mass=mass, tracker=tracker)

        def add_to_mean(state: _State, ctx: Context) -> _State:
            assert state.mean is not None
            return replace(state, mean=state.mean + 2 / (state.count + 1) * (state.q - state.mean))

        def has_settled(state: _State, ctx: Context):
            assert self.tolerance is not None
            size = self.tolerance * jnp.linalg.norm(state.q)
            curvature = state.curvature if self.step_size is None else 1 / self.step_size
            still = jnp.linalg.norm(state.q - state.aim) <= size
            return still & (jnp.linalg.norm(state.slope) <= curvature * size)

        def finish(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            return self._finish(problem, before, state, ctx)

        push = Exchange(send=lambda state, ctx: (state.z, state.mass, state.tracker), receive=receive, conserved=True)
        mix = [self._repeat_pushes(push), *([] if self.batch_size is None else [Local(add_to_mean)])]
        body, steps = Sequence(Local(descend), *mix), self.steps
        prepare = learn_settings(self.pushes) if self.pushes is None or self.step_size is None else Sequence()
        if problem.private and steps:  # the first step stays where it is: it needs no product
            prepare, steps = Sequence(prepare, Local(stay), *mix), steps - 1
        return Scope(Sequence(prepare, self._repeat_steps(body, steps, has_settled)), start, finish)

    def _repeat_steps(self, body: Node, steps: int, settled: Callable[[_State, Context], Bool[Array, ""]]) -> Repeat:
        """All steps, or as many as it takes until clients agree to end."""
        if self.tolerance is None or self.batch_size is not None:
            return Repeat(body, steps, name="TrackedHGP")
        some = Repeat(body, CHECK, name="steps")
        return Repeat(some, -(-steps // CHECK), until=settled, name="TrackedHGP")

    def _repeat_pushes(self, push: Exchange) -> Repeat:
        """As many pushes as a step takes: given, or found by the clients."""
        if self.pushes is not None:
            return Repeat(push, self.pushes, name="pushes")
        return Repeat(push, MOST_PUSHES, times=lambda state, ctx: state.pushes, name="pushes")

    def _start(self, problem: Problem, state: HypergradientState, ctx: Context) -> _State:
        along_x, along_hyper = outer_gradient_shares(problem, state, ctx)
        source = ravel_pytree(along_x)[0]
        known = self.memory(state.params, state.hyper) if state.memory is None else state.memory
        examples = everything(ctx.data.train)
        # Trackers continue from where they were: their sum stays that of the gradients, what was mixed stays mixed.
        anew = state.memory is None or problem.private
        product = jnp.zeros_like(source) if anew else _product(problem, state, examples, known.aim)
        tracker = known.tracker + (product - source) - known.gradient
        q = known.z / known.mass
        own = curvature = jnp.zeros((), q.dtype)
        if self.step_size is None:
            own = largest_curvature(lambda v: _product(problem, state, examples, v), q, ctx.key)
            # Known from an earlier outer step, and corrected by how much the own one has changed since.
            earlier = known.curvature * own / jnp.where(known.own > 0, known.own, 1)
            curvature = jnp.where(known.pushes > 0, earlier, own)
        return _State(
            params=state.params,
            hyper=state.hyper,
            z=known.z,
            mass=known.mass,
            aim=known.aim,
            product=product,
            tracker=tracker,
            secants=_Secants.start(self.acceleration, q, tracker) if self._accelerates else None,
            mean=None if self.batch_size is None else q,
            count=jnp.zeros((), jnp.int32),
            pushes=known.pushes if self.pushes is None else jnp.asarray(self.pushes, jnp.int32),
            curvature=curvature,
            own=own,
            along_hyper=along_hyper if problem.private else None,
        )

    @property
    def _accelerates(self) -> bool:
        return self.acceleration > 0 and self.batch_size is None

    def _displacement(self, state: _State) -> tuple[_Secants | None, Float[Array, " d"]]:
        """Δ, and what the next one needs to know."""
        if state.secants is None:
            step_size = 0.5 / state.curvature if self.step_size is None else self.step_size
            return None, -step_size * state.slope
        step_size = 1 / state.curvature if self.step_size is None else self.step_size
        secants = state.secants.after(state.q, state.slope, state.aim, state.count)
        return secants, secants.change(step_size)

    def _finish(self, problem: Problem, before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
        q = ravel_pytree(before.params)[1](state.q if state.mean is None else state.mean)
        if problem.private:
            memory = before.memory and replace(before.memory, pushes=state.pushes)
            after = replace(before, memory=memory, value=state.along_hyper)  # released with the rest
            return subtract_indirect(problem, after, after.value, q, ctx) if self.steps else after
        along_x, direct = outer_gradient_shares(problem, before, ctx)
        after = subtract_indirect(problem, before, direct, q, ctx)
        if before.memory is None:
            return after
        gradient = state.product - ravel_pytree(along_x)[0]
        stood = state.z, state.mass, state.aim, gradient, state.tracker
        return replace(after, memory=Memory(*stood, state.pushes, state.curvature, state.own))


def _product(
    problem: Problem, at: _State | HypergradientState, batch: PyTree, q: Float[Array, " d"]
) -> Float[Array, " d"]:
    """H_i q."""
    unravel = ravel_pytree(at.params)[1]
    return ravel_pytree(problem.hessian_product(at.params, at.hyper, batch, unravel(q)))[0]


def smallest(turns: Float[Array, "k d"], slope: Float[Array, " d"], doubt: Float[Array, ""]) -> Float[Array, " k"]:
    """The w that makes ‖slope − w·turns‖ smallest, regularized as much as the turns are in doubt; 0 for zero turns."""
    sizes = jnp.linalg.norm(turns, axis=1)
    scale = jnp.where(sizes > 0, 1 / jnp.where(sizes > 0, sizes, 1), 0)
    unit = turns * scale[:, None]
    least = 100 * jnp.finfo(turns.dtype).eps
    normal = unit @ unit.T + jnp.maximum(0.1 * doubt**2, least) * jnp.eye(turns.shape[0], dtype=turns.dtype)
    return jnp.linalg.solve(normal, unit @ slope) * scale
