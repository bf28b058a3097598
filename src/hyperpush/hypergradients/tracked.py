"""Tracked hypergradient push: gradient tracking over push-sum, without the bias of a finite number of pushes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.status import Reason
from hyperpush.data.batches import full_batch, minibatch
from hyperpush.hypergradients.base import (
    HypergradientEstimator,
    HypergradientState,
    outer_gradient_shares,
    subtract_indirect,
)
from hyperpush.hypergradients.differences import DifferenceProblem, transposed_product
from hyperpush.hypergradients.systems import relative_error, scale_of
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import LARGEST, Report
from hyperpush.solving.judgment import Judgment
from hyperpush.solving.secants import Secants
from hyperpush.solving.settings import MOST_PUSHES, largest_curvature, largest_stretch, learn_settings, norm
from hyperpush.solving.tracked import CAUTION, Tracked, TrackedMemory, repeat_pushes, repeat_until_judged
from hyperpush.task.problem import Problem


class _State(Tracked):
    """A client's state during an estimate; `gradient` is H_i · `aim`, without the constant part c_i."""

    params: PyTree
    hyper: PyTree
    mean: Float[Array, " d"] | None  # weighted mean of q, later steps count more; None without mini-batches
    direct: PyTree  # (1/n)∂_λ F_i if the error is judged, or as released on a private task; else None


class TrackedHGP(HypergradientEstimator):
    """Tracked hypergradient push: gradient tracking over push-sum, without the bias of finitely many pushes.

    Together clients solve min_q Σ_k ½qᵀH_k q − c_kᵀq. Here H_k = ∂²_xx f_k is the Hessian of the inner cost, and
    c_k = (1/n) ∂_x F_k. Then each client takes v_i = (1/n) ∂_λ F_i − B_i q_i, with B_i = ∂²_λx f_i. The closed form of
    the hypergradient (`HGP`) contains the solution of this quadratic. With g_i(q) = H_i q − c_i, clients start from
    y = g(q) and repeat at most `steps` times (after Push-DIGing: Nedić, Olshevsky and Shi, arXiv:1607.03218)

        p⁺ = q + Δ,  z ← P(z + ωΔ),  ω ← Pω,  y ← P(y + g(p⁺) − g(p)),  q = z/ω

    Each product with P is `pushes` rounds of push-sum. The only fixed point is the solution, for any choice of the
    displacements Δ. The sums of all pushed values (z, ω, y) are conserved, so lost messages do no harm.

    **The vote.** The distance ‖q − q*‖ to the solution q* is at most ‖y/ω‖/θ, where θ is the smallest eigenvalue of the
    mean Hessian. A client estimates θ by the smallest curvature along recent changes of q, and adds terms for
    unfinished mixing and rounding. So

        ‖v_i − v_i*‖/‖v_i‖ ≲ ‖B_i‖/‖v_i‖ · ((‖y/ω‖ + rounding)/θ + ‖q − p‖),

    The estimate ends when this bound is below the tolerance at every client, and the relative error of q is at most
    0.1. Otherwise the status gives the reason: the limit of steps, no progress (`"stalled"`), rounding
    (`"inaccurate"`), or an inner problem without a minimum (`"ill-posed"`). An ill-posed problem has one of two signs.
    The tracked gradient stays constant while q moves, or the curvature is negative in about half of the changes of q or
    in their sum. Random links hide the first sign; then the status is `"stalled"`.

    **Use it** where averages along a tree (`TreeCG`) are impossible: with mini-batches, on private tasks, among members
    that distrust each other, and among asynchronous peers. **Avoid it** at condition numbers above about 1e3: it then
    reaches the limit of `steps`, and the status says so. **It does not detect** a mean Hessian that is singular along
    directions in which the outer gradient is zero: the
    estimate passes. Then the result is one of many. `hp.check` and
    `TreeCG` detect this by a random probe, which would double the messages here. An estimate holds six vectors per
    client besides the params and the outer gradient, and two more for each change beyond the first that `acceleration`
    keeps. XLA needs 10 vectors per client if clients are computed in turn, as large ones are by default. It needs 18 if
    all clients are computed at once.

    Departures from Push-DIGing:
        1. A step has several pushes, enough for good mixing.
        2. The step Δ = −αy/ω is accelerated by the last change of q and y/ω (Anderson 1965). Each client alone first
           moves along this change to the point with the smallest mean gradient. The move is at most ten times as long
           as the change.
        3. If the tracked gradient has grown a hundredfold, a client returns to the point before and takes plain steps
           of half the size. If it grows again, the client takes steps of a quarter of that size. All clients notice the
           growth within about one step. The return is a displacement like any other. A hundred steps without progress
           also lead to plain steps.
        4. In the first step q stays unchanged, because clients share a direction only after mixing.
        5. Mini-batches allow neither acceleration nor an early end. The result is the mean of q over the steps,
           weighted by their number, and its noise falls with `steps`.
        6. In `hp.solve` each outer step continues from the end of the one before, with the settings found then.
        7. On a private task each step releases a clipped and noisy H_i(p⁺ − p), and g(p) is the sum of these releases.
           The noise is proportional to ‖p⁺ − p‖, so it falls with the steps. Displacements and votes use only released
           values; the search for pushes uses no data. Every outer step restarts and takes steps + 1 releases, and a few
           more with votes. These votes are on the relative error of q, because each product with B_i is a release.

    Args:
        steps: Limit of steps, rounded up to a multiple of five if clients vote. With 0 the result is the direct
            gradient (1/n) ∂_λ F_i.
        step_size: α, above 0; below 1 / λ_max of the Hessians is safe. None takes the inverse of the mean of the
            clients' largest curvatures, and half of that for plain steps. None costs each client ten products and a few
            rounds of scalars. On a private task, None derives α from the bound of curvature and the penalty, without a
            release.
        pushes: Rounds of push-sum per step, at least 1. None finds the number that shrinks differences between
            clients threefold, in a few rounds of scalars; on complete networks it is 1. On lossy links, None takes the
            number of rounds in which a value reaches all clients.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        tolerance: Largest accepted relative error of any client's result, above 0. The true error is usually at most
            a tenth of it. Clients vote every five steps. Values below 1e-4 in float32 (2e-13 in float64) are raised to
            that bound. If rounding prevents a better result, ten times the bound is accepted. None takes all `steps`
            and measures no error.
        acceleration: Number of changes of q and y/ω to use, 0 or more; 0 takes plain steps. More than 1 seldom helps.
        votes: True if clients vote on ending. False takes all `steps` and estimates the error at the end. On lossy
            links votes are impossible, and False is used. Estimates near rounding fluctuate there, so in float32 a
            right result may be flagged.
        products: `"exact"`, by automatic differentiation, or `"difference"`, by central differences of inner gradients,
            for costs without second derivatives. A difference costs two gradients; its relative error is about 1e-5
            in float32 and 1e-10 in float64. Refused on private tasks.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> network = hp.networks.RandomDirected(5)
        >>> task = hp.train(hp.tasks.quadratic(5, seed=0), hp.SGP(200, 0.1), network, key=0).task
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> found = hp.hypergradient(task, hp.TrackedHGP(), network, key=0)
        >>> found.status.error < 1e-3, bool(abs(found.value - exact).max() < 1e-3)
        (True, True)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="two vectors of the size of the params, and three numbers, per push (one without a tolerance)",
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
    acceleration: int = eqx.field(static=True, default=1)
    votes: bool = eqx.field(static=True, default=True)
    products: Literal["exact", "difference"] = eqx.field(static=True, default="exact")

    def __check_init__(self):
        check_integer("TrackedHGP.steps", self.steps, minimum=0)
        check_positive("TrackedHGP.step_size", self.step_size, optional=True)
        check_integer("TrackedHGP.pushes", self.pushes, minimum=1, maximum=MOST_PUSHES, optional=True)
        check_integer("TrackedHGP.batch_size", self.batch_size, minimum=1, optional=True)
        check_positive("TrackedHGP.tolerance", self.tolerance, optional=True)
        check_integer("TrackedHGP.acceleration", self.acceleration, minimum=0)

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        if task.privacy is not None and task.privacy.curvature is None:
            raise InvalidInput("task.private.curvature", None, "a number above 0: products are clipped to it")
        if task.privacy is not None and self.products == "difference":
            raise InvalidInput("TrackedHGP.products", "difference", "'exact' on a private task")

    def bind(self, network: Any, engine: Any = None, task: Any = None) -> "TrackedHGP":
        if engine is None or engine.lossy is None:
            direct = self.pushes is None and network is not None and network.scheduled and network.flood_rounds() <= 1
            return replace(self, pushes=1) if direct else self
        return replace(self, votes=False, pushes=self.pushes or min(network.flood_rounds(), MOST_PUSHES))

    def memory(self, params: PyTree, hyper: PyTree) -> TrackedMemory:
        """Return one client's memory before the first outer step, without any tracking."""
        return TrackedMemory.none(jnp.zeros_like(ravel_pytree(params)[0]))

    def program(self, problem: Problem) -> Node:
        if self.products == "difference":
            problem = DifferenceProblem.of(problem)

        def start(state: HypergradientState, ctx: Context) -> _State:
            return self._start(problem, state, ctx)

        def descend(state: _State, ctx: Context) -> _State:
            secants, change = state.displacement(self.step_size, self._accelerates)
            change = jnp.where(state.count > 0, change, 0)  # a common direction requires mixing
            aim, batch = state.q + change, minibatch(ctx.data.train, self.batch_size, ctx.key)
            if problem.private:
                product = state.gradient + _product(problem.hessian_product, state, batch, aim - state.aim)
            else:
                product = _product(problem.hessian_product, state, batch, aim)
            return state.moved(change, aim, product, secants)

        def stay(state: _State, ctx: Context) -> _State:
            """Return the state after a step that leaves q unchanged, and so needs no product."""
            return replace(state, count=state.count + 1)

        def judge(state: _State, ctx: Context) -> _State:
            return self._judge(problem, state, ctx)

        def finish(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            return self._finish(problem, before, state, ctx)

        mix = [repeat_pushes(self.pushes), *([] if self.batch_size is None else [Local(_add_to_mean)])]
        prepare = learn_settings(self.pushes) if self.pushes is None or self.step_size is None else Sequence()
        if problem.private and self.steps:
            steps = self._private_steps(Local(stay), Local(descend), Sequence(*mix), Local(judge))
        else:
            steps = self._repeat_steps(Sequence(Local(descend), *mix), self.steps, Local(judge))
        return Scope(Sequence(prepare, steps), start, finish)

    def _private_steps(self, stay: Node, descend: Node, mix: Node, judge: Node) -> Node:
        """Return the steps on a private task; the first step leaves q unchanged, so it needs no product.

        On lossy links clients do not vote. There the first step must use the pushes of the loop, because a push
        delivers what the same push lost in an earlier iteration. The pushes after the last step are separate. What they
        lose does not change z/ω once clients agree.
        """
        if self.votes:
            return Sequence(stay, mix, self._repeat_steps(Sequence(descend, mix), self.steps - 1, judge))
        loop = Repeat(Sequence(mix, descend), self.steps - 1, name="TrackedHGP")
        return Sequence(stay, loop, mix, *([judge] if self._judges else []))

    def _repeat_steps(self, body: Node, steps: int, judge: Node) -> Node:
        """Return the loop of all steps, or of fewer if clients agree to end."""

        def has_ended(state: _State, ctx: Context) -> Bool[Array, ""]:
            assert state.judgment is not None
            return state.judgment.ended

        if not self._judges or not self.votes:
            return Sequence(Repeat(body, steps, name="TrackedHGP"), *([judge] if self._judges else []))
        return repeat_until_judged(body, judge, steps, "TrackedHGP", has_ended)

    @property
    def _judges(self) -> bool:
        return self.tolerance is not None and self.batch_size is None

    def _start(self, problem: Problem, state: HypergradientState, ctx: Context) -> _State:
        along_x, direct = outer_gradient_shares(problem, state, ctx)
        source = ravel_pytree(along_x)[0]
        known = self.memory(state.params, state.hyper) if state.memory is None else state.memory
        examples = full_batch(ctx.data.train)
        # Trackers continue from their last values: their sum stays that of the gradients, and mixed values stay mixed.
        anew = state.memory is None or problem.private
        product = jnp.zeros_like(source) if anew else _product(problem.hessian_product, state, examples, known.aim)
        tracker = known.tracker + (product - source) - known.gradient
        q = known.z / known.mass
        own = curvature = jnp.zeros((), q.dtype)
        if self.step_size is None:
            own = largest_curvature(lambda v: _product(problem.bounding_product, state, examples, v), q, ctx.key)
            curvature = known.expected(own)
        return _State(
            params=state.params,
            hyper=state.hyper,
            z=known.z,
            mass=known.mass,
            aim=known.aim,
            gradient=product,
            tracker=tracker,
            secants=Secants.start(max(self.acceleration, 1), q, tracker, known.smallest / CAUTION)
            if self._accelerates or self._judges
            else None,
            mean=None if self.batch_size is None else q,
            count=jnp.zeros((), jnp.int32),
            pushes=known.pushes if self.pushes is None else jnp.asarray(self.pushes, jnp.int32),
            curvature=curvature,
            own=own,
            direct=direct if problem.private or self._judges else None,
            judgment=self._start_judging(problem, state, source, ctx) if self._judges else None,
        )

    @property
    def _accelerates(self) -> bool:
        return self.acceleration > 0 and self.batch_size is None

    def _start_judging(self, problem: Problem, state: HypergradientState, source: Array, ctx: Context) -> Judgment:
        precision = 1.0 if self.products == "exact" else 2 / 3
        if problem.private:
            return Judgment.start(
                jnp.zeros((), source.dtype), source, precision, curvature_signs=False
            )  # noise makes signs meaningless
        examples, back = full_batch(ctx.data.train), ravel_pytree(state.params)[1]
        jacobian_norm = largest_stretch(
            lambda q: problem.jacobian_product(state.params, state.hyper, examples, back(q)),
            lambda v: ravel_pytree(transposed_product(problem, state.params, state.hyper, examples, v))[0],
            source,
            ctx.key,
        )
        return Judgment.start(jacobian_norm, source, precision, curvature_signs=True)

    def _judge(self, problem: Problem, state: _State, ctx: Context) -> _State:
        """Return the state with the distance of q to the solution, the resulting error of v_i, and a verdict."""
        assert state.judgment is not None
        assert state.secants is not None
        assert self.tolerance is not None
        judgment = state.judgment.with_terms(state.slope, state.gradient)
        rise, (away, seen) = norm(state.slope), replace(state, judgment=judgment).away()
        error = self._error_of_result(problem, state, away, ctx)
        error = jnp.where(seen, error, jnp.where(rise > 0, LARGEST, 0))
        return replace(state, judgment=judgment.conclude(error, rise, state.secants, state.count, self.tolerance))

    def _error_of_result(self, problem: Problem, state: _State, away: Float[Array, ""], ctx: Context) -> Array:
        """Return the relative error of v_i for an error `away` of q.

        On a private task return the relative error of q, because the products for v_i would be releases.
        """
        assert state.judgment is not None
        q, jacobian_norm = state.q, state.judgment.jacobian_norm
        if problem.private:
            size = jnp.linalg.norm(q)
            return jnp.minimum(away / jnp.where(size > 0, size, 1), LARGEST)
        back, examples = ravel_pytree(state.params)[1], full_batch(ctx.data.train)
        product = problem.jacobian_product(state.params, state.hyper, examples, back(q))
        value = jax.tree.map(jnp.subtract, state.direct, product)
        return relative_error(jacobian_norm, scale_of(jacobian_norm, state.direct, value, q), away).astype(q.dtype)

    def _finish(self, problem: Problem, before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
        q = ravel_pytree(before.params)[1](state.q if state.mean is None else state.mean)
        judgment = state.judgment if self.steps else None
        report = Report.of(Reason.FIXED_LENGTH) if judgment is None else Report.of(judgment.reason, judgment.error)
        before = replace(before, report=report)
        if problem.private:
            found = {"pushes": state.pushes, "curvature": state.curvature, "own": state.own}
            memory = before.memory and replace(before.memory, **found)
            after = replace(before, memory=memory, value=state.direct)  # released at the start
            return subtract_indirect(problem, after, after.value, q, ctx) if self.steps else after
        along_x, direct = outer_gradient_shares(problem, before, ctx)
        after = subtract_indirect(problem, before, direct, q, ctx)
        if before.memory is None:
            return after
        smallest = before.memory.smallest if state.secants is None else state.secants.remembered
        return replace(after, memory=state.remember(state.gradient - ravel_pytree(along_x)[0], smallest))


def _add_to_mean(state: _State, ctx: Context) -> _State:
    assert state.mean is not None
    return replace(state, mean=state.mean + 2 / (state.count + 1) * (state.q - state.mean))


def _product(
    multiply: Callable[..., PyTree], at: _State | HypergradientState, batch: PyTree, q: Float[Array, " d"]
) -> Float[Array, " d"]:
    """Return the flat result of `multiply`, such as the problem's `hessian_product`, for q at the state's point."""
    unravel = ravel_pytree(at.params)[1]
    return ravel_pytree(multiply(at.params, at.hyper, batch, unravel(q)))[0]
