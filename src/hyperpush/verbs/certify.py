"""Judge whether params solve the inner problem, on plain averages beside the run, uncounted."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import Diverged
from hyperpush.base.status import AROUND, NEAR, Status
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
from hyperpush.programs import Node, ProgramRecipe, program_of
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

    def judge_estimate(
        self,
        status: Status,
        certify: bool = True,
        sizes: Array | None = None,
        again: bool = False,
        value: PyTree = None,
    ) -> Status:
        """Return the status of an estimate at these params, or of a solution that ends here.

        `sizes` are the clients' ‖v_i‖ at the first outer step; None for a single estimate. `again` judges
        even after an estimator that judges itself, because its last estimate was made elsewhere. `value` is the
        estimate if it was made here: if its status converged and its target is global, it is compared with TreeCG's.
        """
        kind = problem_of(self.given)
        if ambient().engine is not None or not kind:
            return status
        if not certify:
            return status.judged(NOT_CERTIFIED)
        if not again and any(part.judges for part in _parts(self.adapted)):
            return status
        if why := self.unseen():
            return status.judged(Status(None, f"params not checked: {why}"))
        if kind == "own":
            return status.judged(self.judge_own(0.0 if sizes is None else _rms(sizes)))
        solver = next((part for part in _parts(self.adapted) if isinstance(part, SystemSolver)), None)
        options = {} if solver is None else {"singular": solver.singular, "damping": solver.damping}
        outer = {}
        if sizes is not None:
            outer = {"size": jnp.full_like(sizes, _rms(sizes)), "outer": jnp.ones(self.task.clients, jnp.int32)}
        found = self._run(_estimate, TreeCG(**options, common=self.task.common), **outer)
        judged = status.judged(_status(found))
        comparable = value is not None and self.adapted.info.target == "global"  # TreeCG's own target
        return self._compared(judged, value, found) if comparable and judged.converged else judged

    def _compared(self, status: Status, value: PyTree, found: HypergradientState) -> Status:
        """Return the status of a converged estimate after comparing it with TreeCG's at the same params."""
        known, terms = _status(found).error or 0.0, np.asarray(found.terms, np.float64)
        kind = jnp.result_type(*jax.tree.leaves(self.task.params))
        scale = max(_distance_of(found.value), float(np.sqrt(jnp.finfo(kind).eps * np.mean(terms**2))))
        off = _distance_of(value, found.value) / scale if scale > 0 else 0.0
        tolerance = self.adapted.option("tolerance")
        asked = default_tolerance(kind) if tolerance is None else max(float(tolerance), FINEST * jnp.finfo(kind).eps)
        if off <= DIFFERENT * max(asked, (status.error or 0.0) + known):
            return status
        return replace(status, converged=False, reason="inaccurate", error=off, failed=1)

    def judge_params(self, status: Status, certify: bool = True) -> Status:
        """Return the status of params after training, by their distance from solving the inner problem."""
        kind = problem_of(self.given)
        if ambient().engine is not None or not kind:
            return status
        if not certify:
            return status.judged(Status(None, self._with_caveat(NOT_CERTIFIED.reason)))
        if why := self.unseen():
            return status.judged(Status(None, self._with_caveat(f"params not checked: {why}")))
        if kind == "own":
            found = _status(self._run(_judge_own, OwnJudge(estimates=False)))
        else:
            found = _status(self._run(_distance, TreeCG(PRODUCTS)))
        if found.residual is None or (kind == "shared" and found.disagreement is None):
            return status.judged(found)
        away = found.residual + (found.disagreement or 0.0)
        tolerance = self.adapted.option("tolerance")
        if away <= (NEAR if tolerance is None else float(tolerance)):
            judged = status.judged(replace(found, converged=True))
            return judged if judged.converged is False else replace(judged, converged=True, reason="tolerance")
        if away <= AROUND:
            found = replace(found, converged=None, reason=self._with_caveat(CLOSE))
        else:
            found = replace(found, converged=False, reason="unsolved")
        return status.judged(found)

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
            return self.engine.no_tree or ("" if _trust(self.given) else "members that distrust each other") or "peers"
        return "several processes" if processes.count() > 1 else ""

    def _run(self, build: Any, checker: TreeCG | OwnJudge, **known: Any) -> HypergradientState:
        task, problem = self.task, _with_products(self.given, program_of(self.given, self.task.problem).parts[1])
        report, zeros = Report.none((task.clients,)), jax.tree.map(jnp.zeros_like, task.hypers)
        known |= {"report": report, "terms": jnp.zeros(task.clients), "start": start_of(task)}
        states = HypergradientState(task.params, task.hypers, zeros, **known)
        options = {name: getattr(self.engine, name) for name in BESIDE if hasattr(self.engine, name)}
        engine = self.engine.without_faults() if isinstance(self.engine, Shard) else Simulate(**options)
        with surround():
            found = engine.run(ProgramRecipe(build, (checker, problem)), self.network, states, task.data, self.key)
        return found.states


def estimate_recipe(given: Method, adapted: Method, task: Task, engine: Engine) -> ProgramRecipe:
    """Return the recipe of an estimator's program; `adapted` is the `given` method bound to its network.

    Peers see one client each, so they average the disagreement of their params along a tree. They skip it if they are
    asynchronous, have private data or distrust each other.
    """
    if engine.hosts_one and not engine.no_tree and _trust(given) and problem_of(given) == "shared":
        return ProgramRecipe(_compared, (adapted, task.problem))
    return program_of(adapted, task.problem)


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
