"""Judge whether params solve the inner problem, on plain averages beside the run, uncounted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import Diverged
from hyperpush.base.status import AROUND, CHANGED, NEAR, Status
from hyperpush.engines.base import Engine, ambient, surround
from hyperpush.engines.shard import Shard
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.differences import DifferenceProblem
from hyperpush.hypergradients.disagreement import append_disagreement
from hyperpush.hypergradients.own_params import OwnJudge
from hyperpush.hypergradients.systems import SystemSolver, default_tolerance
from hyperpush.hypergradients.tree_cg import TreeCG
from hyperpush.inner.base import InnerSolver
from hyperpush.methods.base import Method
from hyperpush.networks import Network
from hyperpush.programs import Node, ProgramRecipe, Runs, program_of, stack
from hyperpush.programs.report import Report
from hyperpush.solving.judgment import FINEST
from hyperpush.task.problem import Problem
from hyperpush.task.task import Task

PRODUCTS = 200  # limit of the Newton step after training, when no estimate has used the Hessian
DIFFERENT = 3  # two estimates that differ by more than this multiple of their claimed errors disagree
BESIDE = ("clients_per_batch", "compile_fully")  # options of an engine that the judge beside the run shares
CLOSE = "near the solution: a hypergradient will check it"
NOT_CERTIFIED = Status(None, "not certified")


@dataclass(frozen=True)
class OuterSteps:
    """The first and the last outer step of a nested algorithm.

    Args:
        sizes: The clients' ‖v_i‖ of the first; with an estimator that judges params, their rms if it passed.
        first: The task at the first; None if it was judged there, or is not known.
        last: The task at the last estimate; None unless it claims an error without a probe.
        value: That estimate.
    """

    sizes: Array
    first: Task | None
    last: Task | None
    value: PyTree


@dataclass(frozen=True)
class Certifier:
    """Judge of the params of one call of a verb, with the task after the call.

    Args:
        task: The task at the params and hypers to judge.
        given: The method as it was passed to the verb.
        adapted: The method as it ran.
        network: The network of the call; judging sends no messages on it.
        engine: The engine of the call.
        key: The key of the call.
    """

    task: Task
    given: Method
    adapted: Method
    network: Network
    engine: Engine
    key: PRNGKeyArray

    def judge_estimate(self, status: Status, certify: bool = True, value: PyTree = None) -> Status:
        """Return the status of an estimate made at these params; a True is compared with TreeCG's `value`."""
        kind = problem_of(self.given)
        if ambient().engine is not None or not kind:
            return status
        if not certify:
            return status.judged(NOT_CERTIFIED)
        if self._parts_judge():
            return status
        if why := self.unseen():
            return status.judged(Status(None, not_checked(why)))
        if kind == "own":
            return status.judged(self.judge_own())
        found = self._run_tree_cg()
        judged = status.judged(_status(found))
        comparable = self.adapted.info.target == "global"  # TreeCG's own target
        return self._compared(judged, value, found) if comparable and judged.converged else judged

    def judge_end(self, status: Status, certify: bool, steps: "OuterSteps", solved: bool) -> Status:
        """Return the status of a nested algorithm that ends here.

        `solved` is True if the estimator judged its own steps, and the last inner solver certified these params.
        """
        kind = problem_of(self.given)
        if ambient().engine is not None or not kind:
            return status
        if not certify:
            return status.judged(NOT_CERTIFIED)
        if solved and self._parts_judge():
            return status
        if why := self.unseen():
            return status.judged(Status(None, not_checked(why)))
        if kind == "own":
            return status.judged(self._judge_own_end(steps))
        here = self._run_tree_cg(self.task, self._sizes(steps))
        found = _status(here)
        if found.reason == "unsolved" and found.moved is not None and steps.first is not None:
            size = _distance_of(here.value)
            if found.moved * size <= 2 * CHANGED * max(size, _rms(steps.sizes)):  # the first step may decide
                found = _status(self._run_tree_cg(self.task, self._first_sizes(steps.first)))
        judged = status.judged(found)
        if not judged.converged or steps.last is None:
            return judged
        there = self._run_tree_cg(steps.last, self._sizes(steps))
        if (known := _status(there)).converged is False and known.reason != "unsolved":
            return judged.judged(known)
        compared = self._compared(judged, steps.value, there)
        if compared.converged or steps.first is None:
            return compared
        return self._compared(judged, steps.value, there, _rms(self._first_sizes(steps.first)))

    def _parts_judge(self) -> bool:
        return any(part.judges for part in _parts(self.adapted))

    def _judge_own_end(self, steps: "OuterSteps") -> Status:
        """Judge clients that train alone. The first hypergradient counts if its params passed."""
        found = self.judge_own()
        if found.reason != "unsolved" or found.moved is None or steps.first is None:
            return found
        first = replace(self, task=steps.first).judge_own()
        return self.judge_own(_rms(steps.sizes)) if first.converged else found

    def _sizes(self, steps: "OuterSteps") -> Array:
        """Return the size of the first hypergradient where the estimator judged it, else 0."""
        return jnp.full_like(steps.sizes, _rms(steps.sizes) if self._parts_judge() else 0)

    def _first_sizes(self, first: Task) -> Array:
        """Return the size of TreeCG's hypergradient at the first step's params; 0 if they are not solved."""
        found = self._run_tree_cg(first, jnp.zeros(first.clients, jnp.result_type(*jax.tree.leaves(first.params))), 0)
        assert found.size is not None
        return jnp.full_like(found.size, _rms(found.size))

    def _run_tree_cg(self, task: Task | None = None, sizes: Array | None = None, outer: int = 1) -> HypergradientState:
        """Return TreeCG's estimate and judgment at the point of a task, after an outer step if `sizes` are given."""
        solver = next((part for part in _parts(self.adapted) if isinstance(part, SystemSolver)), None)
        options = {} if solver is None else {"singular": solver.singular, "damping": solver.damping}
        known = {} if sizes is None else {"size": sizes, "outer": jnp.full(len(sizes), outer, jnp.int32)}
        at = self if task is None else replace(self, task=task)
        return at._run(_estimate, TreeCG(**options, common=self.task.common), **known)

    def _compared(self, status: Status, value: PyTree, found: HypergradientState, size: float = 0.0) -> Status:
        """Return the status of a converged estimate after comparing it with TreeCG's at the same params.

        `size` is that of the first hypergradient of an algorithm: at an outer optimum the last one vanishes.
        """
        known, terms = _status(found).error or 0.0, np.asarray(found.terms, np.float64)
        kind = jnp.result_type(*jax.tree.leaves(self.task.params))
        scale = max(_distance_of(found.value), float(np.sqrt(jnp.finfo(kind).eps * np.mean(terms**2))), size)
        off = _distance_of(value, found.value) / scale if scale > 0 else 0.0
        estimator = next(part for part in _parts(self.adapted) if isinstance(part, HypergradientEstimator))
        tolerance = estimator.option("tolerance")
        asked = default_tolerance(kind) if tolerance is None else max(float(tolerance), FINEST * jnp.finfo(kind).eps)
        if off <= DIFFERENT * max(asked, (status.error or 0.0) + known):
            return status
        return replace(status, converged=False, reason="inaccurate", error=off, failed=1)

    def judge_params(self, status: Status, certify: bool = True) -> Status:
        """Return the status of params after training, by their distance from solving the inner problem."""

        def measure(build: Any, checker: Any) -> list[Status]:
            return [_status(self._run(build, checker))]

        return self._judge_trained((status,), certify, measure)[0]

    def judge_runs(
        self, statuses: Sequence[Status], params: PyTree, hypers: PyTree, certify: bool = True
    ) -> tuple[Status, ...]:
        """Return the statuses of several runs, whose params and hypers have the runs on axis 0, as `judge_params`."""

        def measure(build: Any, checker: Any) -> list[Status]:
            report = self._run_stacked(build, checker, params, hypers).report
            return [jax.tree.map(lambda leaf, k=k: leaf[:, k], report).status() for k in range(len(statuses))]

        return self._judge_trained(statuses, certify, measure)

    def _judge_trained(
        self, statuses: Sequence[Status], certify: bool, measure: Callable[[Any, Any], list[Status]]
    ) -> tuple[Status, ...]:
        kind, why = problem_of(self.given), self.unseen()
        if ambient().engine is not None or not kind:
            return tuple(statuses)
        if not certify or why:
            unknown = Status(None, self._with_caveat(not_checked(why) if certify else NOT_CERTIFIED.reason))
            return tuple(status.judged(unknown) for status in statuses)
        if kind == "own":
            return tuple(map(self._verdict, statuses, measure(_judge_own, OwnJudge(estimates=False))))
        found = measure(_distance, TreeCG(PRODUCTS))
        hidden = [self._is_near(each) and not self._is_certain(own) for own, each in zip(statuses, found, strict=True)]
        if any(hidden):
            # A weak direction may hide behind a small gradient, and so may a saddle. A probe that is not finished after
            # all products, or that meets a flat direction, leaves the answer open.
            probed = measure(_probed_distance, TreeCG(PRODUCTS))
            unknown = self._with_caveat(CLOSE)
            found = [
                each if not hides else probe if _decides(probe) else replace(each, converged=None, reason=unknown)
                for hides, each, probe in zip(hidden, found, probed, strict=True)
            ]
        return tuple(map(self._verdict, statuses, found))

    def _verdict(self, status: Status, found: Status) -> Status:
        """Return the status of a training by the distance of its params."""
        if not _is_known(found, own=problem_of(self.given) == "own") or found.reason == self._with_caveat(CLOSE):
            return status.judged(found)
        if self._is_near(found):
            judged = status.judged(replace(found, converged=True))
            return judged if judged.converged is False else replace(judged, converged=True, reason="tolerance")
        if _away(found) <= AROUND:
            return status.judged(replace(found, converged=None, reason=self._with_caveat(CLOSE)))
        return status.judged(replace(found, converged=False, reason="unsolved"))

    def _is_near(self, found: Status) -> bool:
        """True if these params count as solved after training."""
        tolerance = self.adapted.option("tolerance")
        own = problem_of(self.given) == "own"
        return _is_known(found, own) and _away(found) <= (NEAR if tolerance is None else float(tolerance))

    def _is_certain(self, status: Status) -> bool:
        """True if the solver's own verdict is True and rests on a random probe."""
        return bool(status.converged) and any(
            isinstance(part, InnerSolver) and part.certifies for part in _parts(self.adapted)
        )

    def _with_caveat(self, reason: str) -> str:
        """Return the reason with the solver's caveat, which explains a remaining bias of its params."""
        caveat = self.adapted.caveat
        return f"{reason}; {caveat}" if caveat else reason

    def judge_own(self, size: float = 0.0) -> Status:
        """Return the status of params that should solve each client's own inner problem.

        `size` is the size of the hypergradient at the first outer step; 0 without an outer step.
        """
        found = self._run(_judge_own, OwnJudge(self.task.common), size=jnp.full(self.task.clients, size))
        return _status(found)

    def is_ill_posed(self) -> bool:
        """True if TreeCG finds the mean Hessian singular or indefinite at these params; False if it cannot run."""
        if ambient().engine is not None or problem_of(self.given) != "shared" or self.unseen():
            return False
        try:
            return _status(self._run(_estimate, TreeCG(common=self.task.common))).reason == "ill-posed"
        except Diverged:
            return False

    def unseen(self) -> str:
        """Reason why one machine cannot see all clients' params; empty if one can."""
        if self.task.privacy is not None:
            return "private data"
        if self.engine.hosts_one:
            return (
                self.engine.no_tree
                or ("" if _trust(self.given) else "members that distrust each other")
                or "among peers"
            )
        return "several processes" if processes.count() > 1 else ""

    def _run(self, build: Any, checker: TreeCG | OwnJudge, **known: Any) -> HypergradientState:
        task, problem = self.task, _with_products(self.given, program_of(self.given, self.task.problem).parts[1])
        report, zeros = Report.none((task.clients,)), jax.tree.map(jnp.zeros_like, task.hypers)
        known |= {"report": report, "terms": jnp.zeros(task.clients), "start": start_of(task)}
        states = HypergradientState(task.params, task.hypers, zeros, **known)
        return self._execute(ProgramRecipe(build, (checker, problem)), states)

    def _run_stacked(self, build: Any, checker: Any, params: PyTree, hypers: PyTree) -> HypergradientState:
        """Run a checker at the points of several runs; states hold the runs on axis 1."""
        task, problem = self.task, _with_products(self.given, program_of(self.given, self.task.problem).parts[1])
        params, hypers = jax.tree.map(lambda leaf: jnp.moveaxis(jnp.asarray(leaf), 0, 1), (params, hypers))
        shape = jax.tree.leaves(params)[0].shape[:2]
        start = start_of(task)
        many = None if start is None else jnp.broadcast_to(start[:, None], shape)
        known = {"report": Report.none(shape), "terms": jnp.zeros(shape), "start": many}
        states = HypergradientState(params, hypers, jax.tree.map(jnp.zeros_like, hypers), **known)
        recipe = ProgramRecipe(_stacked, (build, checker, problem))
        return self._execute(recipe, Runs.start(states, 1)).state

    def _execute(self, recipe: ProgramRecipe, states: PyTree) -> Any:
        options = {name: getattr(self.engine, name) for name in BESIDE if hasattr(self.engine, name)}
        engine = self.engine.without_faults() if isinstance(self.engine, Shard) else Simulate(**options)
        with surround():
            return engine.run(recipe, self.network, states, self.task.data, self.key).states


def estimate_recipe(given: Method, adapted: Method, task: Task, engine: Engine) -> ProgramRecipe:
    """Return the recipe of an estimator's program; `adapted` is the `given` method bound to its network.

    Peers see one client each, so they average the disagreement of their params along a tree. They skip it if they are
    asynchronous, have private data or distrust each other.
    """
    if engine.hosts_one and not engine.no_tree and _trust(given) and problem_of(given) == "shared":
        return ProgramRecipe(_compared, (adapted, task.problem))
    return program_of(adapted, task.problem)


def not_checked(why: str) -> str:
    """Return the reason of a status whose params could not be judged."""
    return f"params not checked {why}" if why.startswith("among") else f"params not checked: {why}"


def start_of(task: Task) -> Array | None:
    """Return the norm of each client's params before training; None if it is unknown."""
    if task.point is None or task.point.start is None:
        return None
    size = jnp.asarray(task.point.start, jnp.result_type(*jax.tree.leaves(task.params)))
    return size if task.owner is not None else jnp.full(task.clients, size)


def _compared(method: Method, problem: Problem) -> Node:
    program = method.program(problem)
    return program if isinstance(method, TreeCG) else append_disagreement(program)


def _estimate(checker: TreeCG, problem: Problem) -> Node:
    return checker.program_on(problem, "exact")


def _judge_own(checker: OwnJudge, problem: Problem) -> Node:
    return checker.program(problem)


def _distance(checker: TreeCG, problem: Problem) -> Node:
    return checker.distance_on(problem, "exact")


def _probed_distance(checker: TreeCG, problem: Problem) -> Node:
    return checker.distance_on(problem, "exact", probed=True)


def _away(found: Status) -> float:
    """Return the Newton step and the disagreement together, relative to the params."""
    return (found.residual or 0.0) + (found.disagreement or 0.0)


def _is_known(found: Status, own: bool = False) -> bool:
    """True if the Newton step was measured, and the disagreement, which clients that train alone lack."""
    return found.residual is not None and (own or found.disagreement is not None)


def _decides(probe: Status) -> bool:
    """True if a probe found the distance from solved, or a direction of negative curvature."""
    return _is_known(probe) or probe.reason == "ill-posed"


def _stacked(build: Any, checker: Any, problem: Problem) -> Node:
    return stack(build(checker, problem))


def _parts(method: Method) -> tuple[Method, ...]:
    return (method, *method.parts())


def _status(found: HypergradientState) -> Status:
    assert found.report is not None
    return found.report.status()


def _distance_of(one: PyTree, other: PyTree = None) -> float:
    """Return the root mean square over clients of the difference of two estimates, or of one estimate."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(one)]
    others = [0.0] * len(leaves) if other is None else [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(other)]
    squares = sum(float(np.sum(np.square(a - b))) for a, b in zip(leaves, others, strict=True))
    return float(np.sqrt(squares / len(leaves[0])))


def _rms(sizes: Array) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(sizes, np.float64)))))


def _trust(method: Method) -> bool:
    return all(part.option("trust") is not False for part in _parts(method))


def problem_of(method: Method) -> Literal["", "shared", "own"]:
    """Return the inner problem that a method's result depends on: the shared one, each client's own, or none."""
    parts = _parts(method)
    solver = next((part for part in parts if isinstance(part, InnerSolver)), None)
    estimator = next((part for part in parts if isinstance(part, HypergradientEstimator)), None)
    leading = estimator or method
    if (estimator is not None and estimator.trains) or leading.info.target == "direct":
        return ""
    alone = (leading if solver is None else solver).info.network == "none"
    own = leading.info.target in ("local", "inner") and (alone or method.info.fixed_point == "x_L")
    return "own" if own else "shared"


def _with_products(method: Method, problem: Problem) -> Problem:
    """Return the problem with the method's products: differences of gradients if it asks for them."""
    differ = any(part.option("products") == "difference" for part in _parts(method))
    return DifferenceProblem.of(problem) if differ else problem
