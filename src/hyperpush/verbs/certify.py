"""Judge whether params solve the inner problem, with exact averages on one machine, whose work no costs include."""

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

PRODUCTS = 200  # largest number of Hessian products in the Newton step that judges params after training
DIFFERENT = 3  # two estimates disagree if they differ by more than this multiple of their claimed errors
BESIDE = ("clients_per_batch", "compile_fully")  # options of the call's engine that the judging engine also uses
CLOSE = "near the solution: a hypergradient will check it"
NOT_CERTIFIED = Status(None, "not certified")


@dataclass(frozen=True)
class OuterSteps:
    """The first and the last outer step of a nested algorithm.

    Args:
        sizes: The norm of each client's hypergradient at the first step. If the estimator judges params and passed, the
            root mean square of these norms.
        first: The task at the first step; None if it was judged during the run, or is not known.
        last: The task at the last estimate; None unless this estimate claims an error without a random probe.
        value: The last estimate of the hypergradient.
    """

    sizes: Array
    first: Task | None
    last: Task | None
    value: PyTree


@dataclass(frozen=True)
class Certifier:
    """Judge of the params that one call of a verb has reached.

    Args:
        task: The task at the params and hypers to judge.
        given: The method as it was passed to the verb.
        adapted: The method as it ran, with its settings for the network, engine and task.
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
        """Return the status of a hypergradient estimate at these params.

        If the status is converged and the target is global, the estimate `value` is also compared with TreeCG's.
        """
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
        """Return the status of a nested algorithm that ends at these params.

        `solved` is True if the last inner solver has shown that these params are solved. If the estimator also judged
        its own steps, nothing more is computed.
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
            # Relative to TreeCG's hypergradient at the first step, the change may still be small enough.
            if found.moved * size <= 2 * CHANGED * max(size, _rms(steps.sizes)):
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
        """Return the status of a nested algorithm whose clients solve their own inner problems.

        The change of the hypergradient by a Newton step decides. If it is too large, it is compared with the size of
        the hypergradient at the first step, provided that the params there pass.
        """
        found = self.judge_own()
        if found.reason != "unsolved" or found.moved is None or steps.first is None:
            return found
        first = replace(self, task=steps.first).judge_own()
        return self.judge_own(_rms(steps.sizes)) if first.converged else found

    def _sizes(self, steps: "OuterSteps") -> Array:
        """Return the size of the first hypergradient for every client if the estimator judged it, else 0."""
        return jnp.full_like(steps.sizes, _rms(steps.sizes) if self._parts_judge() else 0)

    def _first_sizes(self, first: Task) -> Array:
        """Return the size of TreeCG's hypergradient at the params of the first step; 0 if they are not solved."""
        found = self._run_tree_cg(first, jnp.zeros(first.clients, jnp.result_type(*jax.tree.leaves(first.params))), 0)
        assert found.size is not None
        return jnp.full_like(found.size, _rms(found.size))

    def _run_tree_cg(self, task: Task | None = None, sizes: Array | None = None, outer: int = 1) -> HypergradientState:
        """Return TreeCG's estimate and its judgment of the params of a task, by default of this certifier's task.

        With `sizes`, which is the size of the first hypergradient, the params count as those after `outer` outer steps.
        """
        solver = next((part for part in _parts(self.adapted) if isinstance(part, SystemSolver)), None)
        options = {} if solver is None else {"singular": solver.singular, "damping": solver.damping}
        known = {} if sizes is None else {"size": sizes, "outer": jnp.full(len(sizes), outer, jnp.int32)}
        at = self if task is None else replace(self, task=task)
        return at._run(_estimate, TreeCG(**options, common=self.task.common), **known)

    def _compared(self, status: Status, value: PyTree, found: HypergradientState, size: float = 0.0) -> Status:
        """Return the status of a converged estimate after comparing it with TreeCG's at the same params.

        `size` is the size of an algorithm's first hypergradient. Errors are also compared with it, because the last
        hypergradient vanishes at an outer optimum.
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
        """Return the statuses of several runs, each judged like `judge_params`.

        `params` and `hypers` have the runs on axis 0.
        """

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
        """Return the status of a training, given the measured distance (`found`) of its params from the solution."""
        if not _is_known(found, own=problem_of(self.given) == "own") or found.reason == self._with_caveat(CLOSE):
            return status.judged(found)
        if self._is_near(found):
            judged = status.judged(replace(found, converged=True))
            return judged if judged.converged is False else replace(judged, converged=True, reason="tolerance")
        if _away(found) <= AROUND:
            return status.judged(replace(found, converged=None, reason=self._with_caveat(CLOSE)))
        return status.judged(replace(found, converged=False, reason="unsolved"))

    def _is_near(self, found: Status) -> bool:
        """Return True if params at this measured distance count as solved after training."""
        tolerance = self.adapted.option("tolerance")
        own = problem_of(self.given) == "own"
        return _is_known(found, own) and _away(found) <= (NEAR if tolerance is None else float(tolerance))

    def _is_certain(self, status: Status) -> bool:
        """Return True if the solver itself reports convergence, and has verified it with a random probe."""
        return bool(status.converged) and any(
            isinstance(part, InnerSolver) and part.certifies for part in _parts(self.adapted)
        )

    def _with_caveat(self, reason: str) -> str:
        """Return the reason, followed by the solver's caveat, which explains a remaining bias of its params."""
        caveat = self.adapted.caveat
        return f"{reason}; {caveat}" if caveat else reason

    def judge_own(self, size: float = 0.0) -> Status:
        """Return the status of params that should solve each client's own inner problem.

        `size` is the size of the hypergradient at the first outer step; 0 without an outer step.
        """
        found = self._run(_judge_own, OwnJudge(self.task.common), size=jnp.full(self.task.clients, size))
        return _status(found)

    def is_ill_posed(self) -> bool:
        """Return True if TreeCG finds the mean Hessian singular or indefinite here; False also if it cannot run."""
        if ambient().engine is not None or problem_of(self.given) != "shared" or self.unseen():
            return False
        try:
            return _status(self._run(_estimate, TreeCG(common=self.task.common))).reason == "ill-posed"
        except Diverged:
            return False

    def unseen(self) -> str:
        """Return the reason why one machine cannot see all clients' data and params; empty if it can."""
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
        """Run a checker at the params and hypers of several runs at once; states have the runs on axis 1."""
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

    Each peer holds the params of one client. Peers therefore average the disagreement of their params along a tree.
    They skip this if they are asynchronous, have private data or distrust each other.
    """
    if engine.hosts_one and not engine.no_tree and _trust(given) and problem_of(given) == "shared":
        return ProgramRecipe(_compared, (adapted, task.problem))
    return program_of(adapted, task.problem)


def not_checked(why: str) -> str:
    """Return the reason for the status of a result whose params could not be judged; `why` says why not."""
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
    """Return the sum of the Newton step's length and the disagreement, both relative to the size of the params."""
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
    """Return the root mean square over clients of the norm of the difference of two estimates, or of one estimate."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(one)]
    others = [0.0] * len(leaves) if other is None else [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(other)]
    squares = sum(float(np.sum(np.square(a - b))) for a, b in zip(leaves, others, strict=True))
    return float(np.sqrt(squares / len(leaves[0])))


def _rms(sizes: Array) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(sizes, np.float64)))))


def _trust(method: Method) -> bool:
    return all(part.option("trust") is not False for part in _parts(method))


def problem_of(method: Method) -> Literal["", "shared", "own"]:
    """Return which inner problem a method's result depends on.

    `"shared"` is the problem of all clients together, and `"own"` each client's own problem. The result is empty if it
    does not depend on an inner solution.
    """
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
    """Return the problem with Hessian products computed as the method does: by differences of gradients if it asks."""
    differ = any(part.option("products") == "difference" for part in _parts(method))
    return DifferenceProblem.of(problem) if differ else problem
