"""PDBO: bilevel optimization in nested loops, with personal hypers for each client."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState, Ends
from hyperpush.algorithms.stopping import EarlyStopping, StoppingState
from hyperpush.algorithms.ties import Neighbors, Ties
from hyperpush.base.errors import InvalidInput
from hyperpush.base.ranges import Whole
from hyperpush.base.status import Status
from hyperpush.hypergradients.automatic import Automatic
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.inner.automatic import AutomaticInner
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import Method, MethodInfo
from hyperpush.methods.optimizers import Optimizer, as_transformation, optimizer
from hyperpush.networks import Network
from hyperpush.networks.link_estimates import LinkEstimates, join_links
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import Report
from hyperpush.solving.choice import join_choices
from hyperpush.solving.common import choose
from hyperpush.solving.settings import norm
from hyperpush.task.problem import Problem


class OuterState(eqx.Module):
    """A client's state between two steps of its hyper."""

    first: PyTree  # start of every inner solve, unless it continues
    params: PyTree
    hyper: PyTree
    hypergradient: PyTree  # last estimate
    optimizer: optax.OptState
    links: LinkEstimates | None  # for estimators that reverse links
    memory: PyTree  # memory of the estimator, kept between outer steps
    trained: PyTree  # memory of the inner solver; None if it restarts
    shared: PyTree  # the client's state of the consensus on common hypers; None for personal hypers
    neighbors: Neighbors | None  # last received hypers of the others; None without ties
    watch: StoppingState | None  # None without early stopping
    report: Report  # report of all estimates so far
    size: Float[Array, ""]  # ‖v_i‖ of the first step; with an estimator that judges params, rms ‖v_i‖ if it passed
    start: Float[Array, ""]  # ‖params before training‖
    judge: Bool[Array, ""]  # True: judge params during the run
    ends: Ends  # the first and the last hypergradient so far
    solved: Report  # report of the last inner solve


class PDBO(Algorithm):
    """Personalized decentralized bilevel optimization: personal hypers that minimize the mean outer cost.

    Before every step the inner problem is solved. Then client i moves its own hypers along its hypergradient (Terashita
    and Hara, arXiv:2210.02129):

        x ≈ x*(λ);   λ_i ← λ_i + update(d F̄ / dλ_i)

    **Use it** where hypers are personal and an inner solve is affordable. **Avoid it** if all clients must agree on one
    hyper: use `CDBO`.

    Departures from the paper:

    1. Any inner solver, estimator and optimizer can be combined, if the estimator fits the inner problem.
    2. An estimator may continue from its last solution (`remember`).
    3. Hypers of neighbors on a graph may be tied (`ties`). The cost in the history excludes that penalty.

    Args:
        inner: The inner solver. `hp.AutomaticInner()` solves the problem without settings. Solvers of fixed length,
            such as `hp.SGP(steps=600, step_size=0.1)`, stop near the solution.
        hypergradient: The estimator: `hp.Automatic()`, or another such as `hp.HGP(steps=20, pushes=10, step_size=0.2)`.
        outer: The optimizer of the hypers: `hp.optimizer("adam", learning_rate=0.1)`, or an Optax transformation.
            Keep an Optax object between calls: a new one causes a recompilation.
        steps: Steps of the hypers, 0 or more. With 0 only the inner problem is solved.
        restart: True trains from the start before every step. False continues from the last params. None continues with
            solvers that run until the problem is solved, and restarts with solvers of fixed length.
        stop: `hp.EarlyStopping(…)` ends the loop on a metric and returns the best step; None takes all steps.
        remember: True lets the estimator, and an inner solver that does not restart, continue from their last solutions
            if they can. Ignored on lossy links, where part of that state would still be in transit.
        ties: `hp.algorithms.Ties(graph, strength)` adds a penalty Σ a_uv‖λ_u − λ_v‖² over neighbors, which send
            each other their hypers once per step. None: no ties.

    Raises:
        InvalidInput: An option is out of range, or solver and estimator do not fit together.

    Example:
        Three clients share x = mean(λ + a), and each pulls x to its own target: λ ends where the mean of x is 2.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, shift, a: (x - shift - a) ** 2 / 2, outer=lambda x, shift, b: (x - b) ** 2 / 2,
        ...     params=0.0, hypers=0.0, train=jnp.zeros((3, 1)), validation=jnp.array([[1.0], [2.0], [3.0]]),
        ... )
        >>> method = hp.PDBO(
        ...     inner=hp.SGP(steps=30, step_size=0.5), hypergradient=hp.HGP(steps=20, pushes=1, step_size=0.5),
        ...     outer=hp.optimizer("sgd", learning_rate=1.0), steps=30,
        ... )
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(3), key=0)
        >>> print(found.hypers.round(2))
        [2. 2. 2.]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="what the inner solver and the estimator send",
        paper="Terashita and Hara, arXiv:2210.02129",
        example={
            "inner": {"name": "SGP", "steps": 5, "step_size": 0.1},
            "hypergradient": {"name": "HGP", "steps": 3, "pushes": 2, "step_size": 0.1},
            "outer": {"name": "sgd", "learning_rate": 0.1},
            "steps": 2,
        },
    )

    nested: ClassVar[bool] = True

    inner: InnerSolver = AutomaticInner()
    hypergradient: HypergradientEstimator = Automatic()
    outer: Optimizer | optax.GradientTransformation = optimizer("adam", learning_rate=0.1)
    steps: Whole = eqx.field(static=True, default=100)
    restart: bool | None = eqx.field(static=True, default=None)
    stop: EarlyStopping | None = None
    remember: bool = eqx.field(static=True, default=True)
    ties: Ties | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        """Refuse an estimator that does not fit the inner solver, `restart` or `ties`."""
        solver, estimator = type(self.inner).__name__, type(self.hypergradient).__name__
        field, given = f"{type(self).__name__}.hypergradient", f"{estimator} after {solver}"
        target, alone = self.hypergradient.info.target, self.inner.info.network == "none"
        if target == "local" and not alone:
            allowed = "an estimator of the mean outer cost such as HGP, or inner=LocalSGD(…): "
            raise InvalidInput(field, given, allowed + "own derivatives ignore the shared inner problem")
        if target in ("global", "client") and alone:
            allowed = "LocalGradient(): other estimators differentiate the solution of a shared inner problem"
            raise InvalidInput(field, given, allowed)
        if self.hypergradient.trains and self.restart is False:
            allowed = f"True: {estimator} differentiates training from the start"
            raise InvalidInput(f"{type(self).__name__}.restart", False, allowed)
        if self.ties is not None and self.info.fixed_point:
            name = type(self).__name__
            raise InvalidInput(f"{name}.ties", "Ties(…)", f"None, or PDBO: {name} makes all hypers agree")

    def status(self, states: BilevelState) -> Status:
        found = Status() if states.report is None else states.report.status()
        return found if self.stop is None or found.converged is False else replace(found, reason="early-stopping")

    def parts(self) -> Iterator[Method]:
        yield self.inner
        yield self.hypergradient

    @property
    def restarts(self) -> bool:
        """True if every inner solve starts from the initial params."""
        return self.restart if self.restart is not None else self.hypergradient.trains or not self.inner.solves

    def choice(self, engine: Any, task: Any, network: Any = None) -> str:
        return join_choices([part.choice(engine, task, network) for part in self.parts()])

    def bind(self, network: Network, engine: Any = None, task: Any = None) -> "PDBO":
        lossy = engine is not None and engine.lossy is not None
        if self.stop is not None and lossy:
            given = "early stopping on links that lose messages"
            raise InvalidInput(f"{type(self).__name__}.stop", given, "reliable links, for votes on the end; or None")
        stop = None if self.stop is None else replace(self.stop, agreement=network.flood_rounds())
        inner, estimator = self.hypergradient.after(self.inner)
        parts = {"inner": inner.bind(network, engine, task), "hypergradient": estimator.bind(network, engine, task)}
        ties = self.ties if self.ties is None or task is None else self.ties.among(task)
        return replace(self, stop=stop, remember=self.remember and not lossy, ties=ties, **parts)

    def check(self, task: Any, network: Network | None = None) -> None:
        super().check(task, network)
        for part in self.parts():
            part.check(task, network)
        if self.ties is not None and network is not None:
            self.ties.check_network(network, task)
        if self.stop is not None:
            self.stop.check_task(f"{type(self).__name__}.stop", task)

    def start_consensus(self, hyper: PyTree) -> PyTree:
        """Return a client's initial part of the consensus on hypers; None if hypers need not agree."""
        return None

    def move(self, outer: optax.GradientTransformation, problem: Problem) -> Node:
        """Return the node that moves hypers along the hypergradient."""
        ties = self.ties

        def improve(state: OuterState, ctx: Context) -> OuterState:
            gradient = state.hypergradient
            if ties is not None:
                gradient = ties.add_pull(gradient, state, problem, ctx)
            updates, optimizer = outer.update(gradient, state.optimizer, state.hyper)
            return replace(state, hyper=optax.apply_updates(state.hyper, updates), optimizer=optimizer)

        return Local(improve) if ties is None else Sequence(ties.exchange(problem), Local(improve))

    def _keeps(self, problem: Problem) -> tuple[bool, bool]:
        """Return whether to keep the first estimate's params, and the last one's point, for judging after the run."""
        estimator = self.hypergradient
        judged = not (estimator.judges or estimator.trains or problem.private)
        claims = estimator.info.target == "global" and estimator.option("tolerance") is not None
        return judged, judged and claims

    def program(self, problem: Problem) -> Node:
        outer, stop, estimator = as_transformation("outer", self.outer), self.stop, self.hypergradient
        continues = self.remember and not self.restarts
        keeps = self._keeps(problem)

        def enter(state: BilevelState, ctx: Context) -> OuterState:
            start = norm(state.params)
            return OuterState(
                first=state.params,
                params=state.params,
                hyper=state.hyper,
                hypergradient=optax.tree.zeros_like(state.hyper),
                optimizer=outer.init(state.hyper),
                links=state.links,
                memory=estimator.memory(state.params, state.hyper) if self.remember else None,
                trained=self.inner.memory(state.params, state.hyper) if continues else None,
                shared=self.start_consensus(state.hyper),
                neighbors=None if self.ties is None else self.ties.start(state.hyper, problem),
                watch=None if stop is None else StoppingState.start(state.params, state.hyper),
                report=Report.none(),
                size=jnp.zeros_like(start),
                start=start,
                judge=jnp.ones((), bool) if state.judge is None else state.judge,
                ends=_no_ends(state, *keeps),
                solved=Report.none(),
            )

        def leave(before: BilevelState, state: OuterState, ctx: Context) -> BilevelState:
            kept = {"report": state.report, "size": state.size, "ends": state.ends, "solved": state.solved}
            before = replace(before, links=state.links, **kept)
            if state.watch is None:
                return replace(before, params=state.params, hyper=state.hyper)
            best = state.watch
            return replace(before, params=best.params, hyper=best.hyper, best_step=best.best_step)

        def start_inner(state: OuterState, ctx: Context) -> InnerState:
            return InnerState(state.first if self.restarts else state.params, state.hyper, memory=state.trained)

        def end_inner(state: OuterState, trained: InnerState, ctx: Context) -> OuterState:
            links, solved = join_links(state.links, trained.links), trained.report
            solved = Report.none() if solved is None else solved
            report = state.report if estimator.judges else state.report.at_params(solved)
            found = {"links": links, "report": report, "solved": solved, "trained": trained.memory}
            return replace(state, params=trained.params, **found)

        def start_estimate(state: OuterState, ctx: Context) -> HypergradientState:
            params = state.first if estimator.trains else state.params
            zeros = optax.tree.zeros_like(state.hyper)
            ends = (ctx.round == 0) | (ctx.round == self.steps - 1)
            known = {"start": state.start, "outer": ctx.round, "size": state.size, "terms": state.ends.terms}
            return HypergradientState(
                params, state.hyper, zeros, state.links, state.memory, Report.none(), ends & state.judge, **known
            )

        def end_estimate(state: OuterState, found: HypergradientState, ctx: Context) -> OuterState:
            report = state.report if found.report is None else state.report.worst(found.report)
            size = found.size
            if not estimator.judges and not problem.private:  # params of private tasks are not judged
                size = jnp.where(ctx.round == 0, norm(found.value).astype(state.size.dtype), state.size)
            ends = state.ends if problem.private else _add_end(state, found, ctx)
            return replace(state, hypergradient=found.value, memory=found.memory, report=report, size=size, ends=ends)

        solve: Node = Scope(self.inner.program(problem), start_inner, end_inner)
        estimate = Scope(estimator.program(problem), start_estimate, end_estimate)
        until = None
        if stop is not None:
            solve = Sequence(solve, stop.program(problem))
            until = lambda state, ctx: stop.has_ended(state.watch)  # noqa: E731
        loop = Repeat(Sequence(estimate, self.move(outer, problem), solve), self.steps, until, name=LOOP)
        return Scope(Sequence(Repeat(solve, 1, name="start"), loop), enter, leave)


def _no_ends(state: BilevelState, keeps_first: bool, keeps_last: bool) -> Ends:
    """Return the empty record of the first and the last hypergradient, before the first step."""
    zeros, zero = optax.tree.zeros_like(state.hyper), jnp.zeros_like(norm(state.params))
    kept = (state.params if keeps_first else None, (state.params, state.hyper) if keeps_last else None)
    return Ends(zeros, zeros, zero, zero - 1, *kept)


def _add_end(state: OuterState, found: HypergradientState, ctx: Context) -> Ends:
    """Return the record of the first and the last hypergradient after another estimate."""
    ends = state.ends
    known = ends.terms if found.terms is None else found.terms.astype(ends.terms.dtype)
    error = jnp.full_like(ends.error, -1) if found.report is None else found.report.error.astype(ends.error.dtype)
    params = None if ends.first_params is None else state.params
    latest = Ends(found.value, found.value, known, error, params, ends.last_point)
    point = None if ends.last_point is None else (state.params, state.hyper)
    return replace(choose(ctx.round == 0, latest, ends), last=found.value, last_point=point)
