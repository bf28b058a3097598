"""Judge the end of a bilevel algorithm.

The status says whether the params solve the inner problem, how large the hypergradient is, and whether numbers have
grown enormously. It also says whether the algorithm ended at another fixed point (`hyperpush.algorithms.base`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.algorithms.base import Algorithm, BilevelState, Ends
from hyperpush.algorithms.ending import Ending, EndJudge, Given, OtherPoint, solver_for
from hyperpush.base import processes
from hyperpush.base.errors import Diverged, HyperpushError
from hyperpush.base.status import NEAR, STATIONARY, Status
from hyperpush.engines.base import ambient, surround
from hyperpush.hypergradients.tree_cg import TreeCG
from hyperpush.inner.base import InnerSolver
from hyperpush.programs import program_of
from hyperpush.task.task import Task
from hyperpush.verbs.certify import NOT_CERTIFIED, OuterSteps, not_checked, problem_of
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.growing import GROWTH, grown_cost, grown_estimate

if TYPE_CHECKING:
    from hyperpush.verbs.call import Call

TERMS = 1e-6  # a hypergradient smaller than this share of its terms may be a rounding error


def judge_ending(call: "Call", status: Status, after: Task, found: BilevelState, certify: bool) -> tuple[Status, Costs]:
    """Return the status of a bilevel algorithm that ended at the task `after`, and the costs of judging the end."""
    method: Algorithm = call.method
    if ambient().engine is not None:
        return status, Costs()
    if (growing := judge_growth(status, call.task, after)) is not None:
        return growing, Costs()
    if method.nested:
        return (_judge_nested(call, status, after, found, certify) if method.steps else status), Costs()
    if not certify:
        return status.judged(NOT_CERTIFIED), Costs()
    if why := _unseen(call, after):
        return _unknown(status, why), Costs()
    try:
        return _judge_single_loop(call, status, after)
    except Diverged:
        return _unknown(status, "judging the end left the finite numbers"), Costs()
    except HyperpushError as error:
        return _unknown(status, str(error)), Costs()


def judge_growth(status: Status, before: Task, after: Task) -> Status | None:
    """Return the status *growing* if params, hypers or a party's costs grew a millionfold during the run; else None.

    Params and hypers count only if they also exceed the training data a million times.
    """
    if processes.count() > 1:
        return None
    for old, new in ((before.params, after.params), (before.hypers, after.hypers)):
        least = GROWTH * max(_size(old), 1.0)
        if (size := _size(new)) > least and size > GROWTH * _data_scale(before):
            return _growing(status)
    grown = grown_cost(before, after)
    return _growing(status, grown) if grown else None


def judge_estimate_growth(status: Status, task: Task, value: Any) -> Status:
    """Return the status *growing* if a party's hypergradient is far larger than its parts; else `status`."""
    grown = grown_estimate(task, value)
    return _growing(status, grown) if grown else status


def _growing(status: Status, hint: str = "") -> Status:
    return replace(status, converged=False, reason="growing", error=None, failed=max(status.failed, 1), hint=hint)


def _judge_nested(call: "Call", status: Status, after: Task, found: BilevelState, certify: bool) -> Status:
    """Return the status of a nested algorithm, which runs an inner solver and an estimator in every outer step.

    The final params are judged like those of a single estimate. Stationarity is judged by the hypergradients of the
    first and the last step.
    """
    certifier, early = call.certifier(after), status.reason == "early-stopping"
    solver: InnerSolver = call.adapted.inner
    judged = certifier.judge_end(
        status, certify, _outer_steps(call, after, found), not early and _solved(solver, found)
    )
    why = certifier.unseen() or _without_gradient(call.method)
    if not certify or why or found.ends is None:
        return replace(judged, stationary_reason=why)
    first, last = (_host(tree) for tree in (found.ends.first, found.ends.last))
    agree = bool(call.method.info.fixed_point)
    return _with_gradient(judged, first, last, agree, _floor(first, agree, found.ends))


def _solved(solver: InnerSolver, found: BilevelState) -> bool:
    """Return True if the inner solver itself has shown that the final params solve the inner problem."""
    if not solver.certifies or found.solved is None:
        return False
    last = found.solved.status()
    return last.converged is True and last.error is not None and last.error <= NEAR


def _outer_steps(call: "Call", after: Task, found: BilevelState) -> OuterSteps:
    assert found.ends is not None
    assert found.size is not None
    first, last = found.ends.first_params, found.ends.last_point
    return OuterSteps(
        sizes=found.size,
        first=None if first is None else after.at(params=first, hypers=call.task.hypers),
        last=None if last is None else after.at(params=last[0], hypers=last[1]),
        value=found.ends.last,
    )


def _without_gradient(method: Algorithm) -> str:
    """Return the reason why a nested algorithm's hypergradients cannot show stationarity; empty if they can."""
    if method.option("stop") is not None:
        return "early stopping reports another step than the last"
    return "" if method.option("ties") is None else "ties add a penalty to the gradient"


def _judge_single_loop(call: "Call", status: Status, after: Task) -> tuple[Status, Costs]:
    """Return the status of an algorithm that is not nested, and the costs of judging it.

    The final params are judged first. Then the inner problem is solved for the hypers at the start and at the end, and
    the hypergradients at both solutions are compared.
    """
    own = problem_of(call.method) == "own"
    point = call.method.info.fixed_point
    other: OtherPoint = point if point in ("x_L", "x_M") else ""
    solver = solver_for(call.network, call.engine, after)
    checker = TreeCG().bind(call.network, call.engine, after)
    recipe = program_of(EndJudge(solver, checker, other), after.problem)
    began, costs = _run(call, recipe, call.task, judge=False)
    first = _host(began.value)
    size = _length(_mean(first)) if after.common else _rms(first)
    ended, more = _run(call, recipe, after, judge=not own, look=True, size=size)
    reported = call.certifier(after).judge_own(size * after.clients) if own else ended.reported.status()
    status = replace(reported, chosen=status.chosen).with_doubts_of(status)
    return _compare(status, began, ended, after.common, other), costs + more


def _compare(status: Status, began: Ending, ended: Ending, agree: bool, other: OtherPoint) -> Status:
    """Return the status with the ratio of the hypergradients at the end and at the start, both at inner solutions."""
    for where, each in (("start", began), ("end", ended)):
        for what, report in (("inner problem", each.training), ("hypergradient", each.estimate)):
            if (known := report.status()).converged is not True:
                return replace(status, stationary_reason=f"{what} at the {where}: {known.reason}")
    first, last = _host(began.value), _host(ended.value)
    ends = Ends(first, last, began.terms, began.estimate.error)
    status = _with_gradient(status, first, last, agree, _floor(first, agree, ends))
    if other and status.stationary is False:
        vanishes = _length(_mean(_host(ended.other))) <= STATIONARY * len(began.terms) * _length(_mean(first))
        status = replace(status, stationary_reason=f"it is at {other}" if vanishes else "")
    return status


def _with_gradient(status: Status, first: PyTree, last: PyTree, agree: bool, floor: float) -> Status:
    """Return the status with `gradient` and `stationary`, from the first and the last hypergradient.

    A first hypergradient of at most `floor` may be a rounding error, so that both fields stay None.
    """
    sizes = [_length(_mean(each)) if agree else _rms(each) for each in (first, last)]
    if sizes[0] <= floor:
        return replace(status, stationary_reason="the start was stationary up to rounding")
    gradient = sizes[1] / sizes[0]
    return replace(status, gradient=gradient, stationary=gradient <= STATIONARY)


def _floor(first: PyTree, agree: bool, ends: Ends) -> float:
    """Return the size below which the first hypergradient may be a rounding error or the error of its estimate."""
    terms = float(np.sqrt(np.mean(np.square(np.asarray(ends.terms, np.float64)))))
    error = max(float(np.max(np.asarray(ends.error))), 0.0) if agree else 0.0
    return max(TERMS * terms, error * _rms(first))


def _run(
    call: "Call", recipe: Any, task: Task, judge: bool, look: bool = False, size: float = 0.0
) -> tuple[Ending, Costs]:
    """Run the judging program from the params and hypers of a task; return its final states and its costs."""
    kind = jnp.result_type(*jax.tree.leaves(task.params))
    start, known = (np.full(task.clients, each, kind) for each in (call.start_size or 0.0, size))
    asked = (np.full(task.clients, each) for each in (judge, look))
    states = Given(task.params, task.hypers, *map(jnp.asarray, (start, known, *asked)))
    step = task.point.step if task.point is not None and task.point.network == call.network else 0
    with surround():
        run = call.engine.run(recipe, call.network, states, task.data, call.key, step=step)
    return run.states, Costs.of(run, task)


def _unseen(call: "Call", after: Task) -> str:
    """Return the reason why the end of an algorithm that is not nested cannot be judged; empty if it can."""
    if call.method.hides:
        return "its messages carry noise, and judging would send clean ones"
    if after.joint:
        return "an outer cost of all clients together"
    if call.method.option("personal"):
        return "hypers of which some are shared and some personal"
    return call.certifier(after).unseen() or call.engine.no_tree


def _unknown(status: Status, why: str) -> Status:
    judged = status.judged(Status(None, not_checked(why)))
    return replace(judged, stationary_reason=why)


def _host(tree: PyTree) -> list[np.ndarray]:
    """Return the leaves of a tree as NumPy arrays in float64, with clients on axis 0."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def _mean(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [leaf.mean(axis=0) for leaf in leaves]


def _length(leaves: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves)))


def _rms(leaves: Sequence[np.ndarray]) -> float:
    """Return the root mean square of the clients' norms."""
    return _length(leaves) / float(np.sqrt(max(len(leaves[0]), 1))) if leaves else 0.0


def _size(tree: PyTree) -> float:
    """Return the largest absolute value in a tree; 0 for an empty tree."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return max((float(np.max(np.abs(leaf))) for leaf in leaves if leaf.size), default=0.0)


def _data_scale(task: Task) -> float:
    """Return the largest absolute number of the training data; 1 on a private task."""
    if task.privacy is not None:
        return 1.0
    leaves = jax.tree.leaves(task.data.train)
    return _size([leaf for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)])
