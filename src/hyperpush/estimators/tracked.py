"""Tracked hyper-gradient push: gradient tracking over push-sum, without the bias of a finite number of pushes."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.settings import MOST_PUSHES, largest_curvature, learn_settings
from hyperpush.estimators.state import Declaration, Hyper, shared_gradients
from hyperpush.privacy.noise import Noise, check_noise
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Local, Node, Repeat, Sequence, Within

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
    along_hyper: PyTree  # (1/n)∂_λ F_i as released, with privacy; else None

    @property
    def q(self) -> Float[Array, " d"]:
        return self.z / self.mass

    @property
    def slope(self) -> Float[Array, " d"]:
        """The tracked mean gradient."""
        return self.tracker / self.mass


class TrackedHGP(eqx.Module):
    """Solve min_q Σ_k ½qᵀH_k q − c_kᵀq together, c_k = (1/n)∂_x F_k, then v_i = (1/n)∂_λ F_i − B_i q_i.

    Gradient tracking over push-sum (Push-DIGing: Nedić, Olshevsky, Shi 2017) on the quadratic whose solution the closed
    form of the hyper-gradient contains: with g_i(q) = H_i q − c_i and y = g(q), at most `steps` times

        p⁺ = q + Δ,  z ← P(z + ωΔ),  ω ← Pω,  y ← P(y + g(p⁺) − g(p)),  q = z/ω

    with `pushes` rounds for each P. The only fixed point is the solution, whatever the displacements Δ: there is no
    bias, and all that is pushed (z, ω, y) is conserved, so it also works where messages get lost.

    Δ = −αy/ω, accelerated by the last `acceleration` changes of q and y/ω (Anderson 1965): each client alone first
    goes to where the mean gradient is smallest among the combinations of them that it knows. α = `step`. Every one
    of these changes takes a vector of memory twice.

    Left at None, `pushes` and `step` are found by the clients themselves (`settings.py`), at the price of a few rounds
    of scalars: enough pushes for differences between clients to shrink threefold, and the inverse of the mean of the
    clients' largest curvatures. It ends when all clients agree that ‖y/ω‖ and what mixing still changes are
    below `tolerance` of the size of the solution; None takes all `steps`, without votes (links that lose messages
    allow none: there give `pushes`, and no tolerance).

    With mini-batches (`batch`) there is no acceleration and no early end; the result is the mean of q over the steps,
    weighted by their number, and its noise falls with `steps`. In `hp.solve` each outer step goes on from where the
    one before stood, with the settings found then.

    With `privacy` each step releases a clipped and noisy H_i(p⁺ − p), and g(p) is the sum of these: as noise is in
    proportion to ‖p⁺ − p‖, it falls as the steps do. Displacements and votes are made of what was released; the
    search for pushes uses no data; but `step` must be given. Every outer step starts anew: steps + 1 releases in each.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="any: directed, time-varying, lossy",
        target="global: everybody's mean outer cost",
        sends="two vectors of the size of the params",
        matrices=False,
        paper="here; after Nedić, Olshevsky and Shi, Achieving geometric convergence over time-varying graphs",
    )

    steps: int = eqx.field(static=True, default=1000)
    step: float | None = eqx.field(
        static=True, converter=lambda given: None if given is None else float(given), default=None
    )
    pushes: int | None = eqx.field(static=True, default=None)
    batch: int | None = eqx.field(static=True, default=None)
    tolerance: float | None = eqx.field(static=True, default=1e-5)
    acceleration: int = eqx.field(static=True, default=5)
    privacy: Noise | None = None

    def __check_init__(self):
        whole("TrackedHGP.steps", self.steps, least=0)
        whole("TrackedHGP.acceleration", self.acceleration, least=0)
        if self.step is not None:
            positive("TrackedHGP.step", self.step)
        if self.pushes is not None:
            whole("TrackedHGP.pushes", self.pushes, least=1, most=MOST_PUSHES)
        if self.batch is not None:
            whole("TrackedHGP.batch", self.batch, least=1)
        if self.tolerance is not None:
            positive("TrackedHGP.tolerance", self.tolerance)
        check_noise("TrackedHGP.privacy", self.privacy)
        if self.privacy is not None:
            self.privacy.check_estimator("TrackedHGP")
            if self.step is None:
                raise InvalidInput(
                    "TrackedHGP.step", None, "a number with privacy: the own curvature would be sent clean"
                )

    @property
    def releases(self) -> int:
        # The gradients, a product in each step but the first, which stays where it is, and the estimate.
        return (-(-self.steps // CHECK) * CHECK if self._votes else self.steps) + 1

    @property
    def _votes(self) -> bool:
        return self.tolerance is not None and self.batch is None

    def memory(self, params: PyTree, hyper: PyTree) -> Memory:
        """One client's memory before the first outer step."""
        vector = jnp.zeros_like(ravel_pytree(params)[0])
        zero, one = jnp.zeros((), vector.dtype), jnp.ones((), vector.dtype)
        return Memory(vector, one, vector, vector, vector, jnp.zeros((), jnp.int32), zero, zero)

    def program(self, problem: Problem) -> Node:
        secants = self.acceleration if self.batch is None else 0

        def product(state: _State | Hyper, batch: PyTree, q: Float[Array, " d"]) -> Float[Array, " d"]:
            unravel = ravel_pytree(state.params)[1]
            return ravel_pytree(problem.hessian_product(state.params, state.hyper, batch, unravel(q)))[0]

        def enter(state: Hyper, ctx: Context) -> _State:
            along_x, along_hyper = shared_gradients(problem, state, ctx, self.privacy)
            source = ravel_pytree(along_x)[0]
            known = self.memory(state.params, state.hyper) if state.memory is None else state.memory
            examples, aim = everything(ctx.data.inner), known.aim
            # Trackers go on from where they were: their sum stays that of the gradients, what was mixed stays mixed.
            anew = state.memory is None or self.privacy is not None
            turned = jnp.zeros_like(source) if anew else product(state, examples, aim)
            tracker = known.tracker + (turned - source) - known.gradient
            q = known.z / known.mass
            none = jnp.zeros(secants, q.dtype)
            empty = none[:, None] * q
            own = curvature = jnp.zeros((), q.dtype)
            if self.step is None:
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
                mean=q if self.batch is not None else q[:0],
                count=jnp.zeros((), jnp.int32),
                pushes=pushes,
                curvature=curvature,
                own=own,
                along_hyper=None if self.privacy is None else along_hyper,
            )

        def descend(state: _State, ctx: Context) -> _State:
            q, slope = state.q, state.slope
            step = self.step or (1 if secants else 0.5) / state.curvature
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
            if self.privacy is None:
                turned = product(state, draw(ctx.data.inner, self.batch, ctx.key), aim)
            else:
                first, second = jax.random.split(ctx.key)
                move = ravel_pytree(state.params)[1](aim - state.aim)
                at = state.params, state.hyper, draw(ctx.data.inner, self.batch, first), move
                released = self.privacy.hessian_product(problem, *at, second, state.count)
                turned = state.product + ravel_pytree(released)[0]
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

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass, tracker = inbox.mix((state.z, state.mass, state.tracker))
            return replace(state, z=z, mass=mass, tracker=tracker)

        def collect(state: _State, ctx: Context) -> _State:
            return replace(state, mean=state.mean + 2 / (state.count + 1) * (state.q - state.mean))

        def settled(state: _State, ctx: Context):
            assert self.tolerance is not None
            size = self.tolerance * jnp.linalg.norm(state.q)
            curvature = state.curvature if self.step is None else 1 / self.step
            still = jnp.linalg.norm(state.q - state.aim) <= size
            return still & (jnp.linalg.norm(state.slope) <= curvature * size)

        def leave(before: Hyper, state: _State, ctx: Context) -> Hyper:
            q = ravel_pytree(before.params)[1](state.q if self.batch is None else state.mean)
            at = before.params, before.hyper, everything(ctx.data.inner), q
            along_x = None
            if self.privacy is None:
                along_x, along_hyper = shared_gradients(problem, before, ctx)
                product = problem.jacobian_product(*at)
            else:
                along_hyper = state.along_hyper  # released with the rest
                product = self.privacy.jacobian_product(problem, *at, ctx.key, self.releases - 1)
            value = jax.tree.map(jnp.subtract, along_hyper, product)
            memory = None
            if before.memory is not None and self.privacy is not None:
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
        body = Sequence(Local(descend), pushing)
        if self.batch is not None:
            body = Sequence(*body.nodes, Local(collect))
        if not self._votes:
            solving = Repeat(body, self.steps, name="TrackedHGP")
        else:
            some = Repeat(body, CHECK, name="steps")
            solving = Repeat(some, -(-self.steps // CHECK), until=settled, name="TrackedHGP")
        prepare = learn_settings(self.pushes) if self.pushes is None or self.step is None else Sequence()
        return Within(Sequence(prepare, solving), enter, leave)


def smallest(turns: Float[Array, "k d"], slope: Float[Array, " d"], doubt: Float[Array, ""]) -> Float[Array, " k"]:
    """The w that makes ‖slope − w·turns‖ smallest, regularised as much as the turns are in doubt; 0 for zero turns."""
    sizes = jnp.linalg.norm(turns, axis=1)
    scale = jnp.where(sizes > 0, 1 / jnp.where(sizes > 0, sizes, 1), 0)
    unit = turns * scale[:, None]
    least = 100 * jnp.finfo(turns.dtype).eps
    normal = unit @ unit.T + jnp.maximum(0.1 * doubt**2, least) * jnp.eye(turns.shape[0], dtype=turns.dtype)
    return jnp.linalg.solve(normal, unit @ slope) * scale
