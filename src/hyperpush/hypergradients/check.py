"""Whether an estimate can be trusted on a problem: compared with finite differences of the solved problem."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree
from scipy.linalg import eigvalsh_tridiagonal

from hyperpush.checks import check_integer, check_positive, no_type_check
from hyperpush.data.batches import Data, everything
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.errors import Diverged, InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.hgp import HGP
from hyperpush.method import Target
from hyperpush.networks import Network
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Node, Repeat
from hyperpush.results import Estimate
from hyperpush.task import Task
from hyperpush.verbs import check_call, hypergradient

SERIES = 1e-4  # what the suggested number of steps leaves of HGP's series
LENGTH = 1e-3  # of a finite difference, relative to the hypers
SOLVED = 1e-6  # distance from the solution, relative to its size, at which the inner problem counts as solved
FAR = 1e8  # from the start, where the search for it is given up
LANCZOS, NUMBERS = 128, 1 << 26  # products for the ends of the spectrum, and numbers kept for that, at most
ROUNDS, STARTS = 256, 5  # for watching the averaging error


@dataclass(frozen=True)
class Check:
    """An estimate at the solution of the inner problem, what it should be, and what would serve it."""

    estimator: HypergradientEstimator
    network: str
    tolerance: float  # relative, for `passed`
    estimate: Estimate | None  # None: it diverged

    solution: PyTree  # the params where it was taken, clients on axis 0
    solved: bool  # whether these, and those at the ends of the differences, are minima
    gradient_norm: float  # of the inner cost there
    newton_step: float  # the last one's length, relative to the size of the params: the distance from the minimum
    given_gradient_norm: float  # of the inner cost at the mean of the given params
    given_distance: float  # the largest of a client's given params from the solution
    given_spread: float  # the largest of a client's given params from their mean
    given_effect: float  # relative ℓ2 change of the reference if it is taken at the given params

    directions: PyTree  # of the hypers, leaves [directions, clients, …]
    length: float  # h of the finite differences; the uncertainty is the change from h to h/2
    differences: Float[np.ndarray, " directions"]  # of the solved problem
    uncertainties: Float[np.ndarray, " directions"]
    predictions: Float[np.ndarray, " directions"]  # by the estimate
    reference: PyTree  # what it should be: the closed form, by conjugate gradients
    residual: float  # relative, of these
    reference_error: float  # relative ℓ2 distance of the estimate from the reference

    largest: float  # eigenvalues of the mean Hessian at the solution
    smallest: float
    tenfold: float | None  # rounds in which the network's averaging error falls tenfold; None: it does not

    @property
    def difference_error(self) -> float:
        """‖predictions − differences‖ / ‖differences‖."""
        return _relative(self.predictions, self.differences)

    @property
    def passed(self) -> bool:
        """Whether the inner problem is solved and the estimate within `tolerance` of differences and reference."""
        return self.solved and self.difference_error <= self.tolerance and self.reference_error <= self.tolerance

    @property
    def suggested_step_size(self) -> float | None:
        """1/λ_max."""
        return 1 / self.largest if self.largest > 0 else None

    @property
    def suggested_steps(self) -> int | None:
        """log(1e-4)/log(1 − λ_min/λ_max): what HGP needs with that step size; None if it does not converge."""
        return None if self.suggested_step_size is None else self._steps(self.suggested_step_size, SERIES)

    def _steps(self, step_size: float, left: float) -> int | None:
        """Terms of Σ_m (I − ηH)^m after which `left` of it is missing."""
        shrink = max(abs(1 - step_size * self.smallest), abs(1 - step_size * self.largest))
        if not shrink < 1:  # nor for nan
            return None
        return 1 if shrink <= left else math.ceil(math.log(left) / math.log(shrink))

    @property
    def warnings(self) -> list[str]:
        """What keeps the estimate, or this check, from being right."""
        said, name, declared = [], type(self.estimator).__name__, self.estimator.info
        if not self.solved:
            said.append(
                f"The inner problem could not be solved (gradient norm {self.gradient_norm:.1e}, last Newton step "
                f"{self.newton_step:.1e}): is it convex, smooth, bounded from below? The rest here means nothing."
            )
        if self.smallest <= 1e-12 * self.largest:
            said.append(
                f"The mean Hessian is not positive definite (λ_min = {self.smallest:.2g}): the inner solution is not "
                "unique, and the hypergradient not defined."
            )
        if not self.solved:
            return said
        if self.given_effect > self.tolerance:
            said.append(
                f"The given params are {self.given_distance:.1e} from the inner solution (gradient norm "
                f"{self.given_gradient_norm:.1e}); there the hypergradient is off by {self.given_effect:.1e}."
            )
        if self.estimate is None:
            said.append(f"{name} diverged (NaN or infinity).")
        step_size = getattr(self.estimator, "step_size", None)
        if declared.target == "global" and step_size is not None and step_size * self.largest > 2:
            said.append(f"Step size {step_size:.3g} exceeds 2/λ_max = {2 / self.largest:.3g}: {name} will diverge.")
        elif isinstance(self.estimator, HGP):
            said += self._warnings_of_hgp(self.estimator)
        if declared.target == "global" and declared.note:
            aims = f'aims at "{declared.target}, {declared.note}"'
            said.append(f"{name} {aims}: it differs from what it is compared with by design.")
        doubt = _norm(self.uncertainties) / (_norm(self.differences) or sys.float_info.min)
        if doubt > self.tolerance:
            said.append(f"The finite differences are uncertain by {doubt:.1e}: is the outer cost smooth in the hypers?")
        if self.residual > self.tolerance:
            said.append(f"The closed form is uncertain: its residual is {self.residual:.1e}.")
        if self.solved and self.reference_error <= self.tolerance < self.difference_error:
            said.append(
                "The estimate follows the derivatives that the costs give, but not the costs: these derivatives are "
                "wrong (stop_gradient, rounding, a custom rule, …)."
            )
        return said

    def _warnings_of_hgp(self, hgp: HGP) -> list[str]:
        step_size = float(hgp.step_size)
        said, needed = [], self._steps(step_size, self.tolerance)
        if needed is not None and needed > hgp.steps:
            said.append(f"{hgp.steps} steps cut the series off: with step size {step_size:.3g} it needs {needed}.")
        if hgp.averaging != "exact" and self.tenfold is not None:
            needed = math.ceil(-math.log10(self.tolerance) * self.tenfold)
            if needed > hgp.pushes:
                said.append(f"With pushes = {hgp.pushes} averages are far from the mean: take about {needed}.")
        return said

    def __str__(self) -> str:
        step_size, steps = self.suggested_step_size, self.suggested_steps
        rows = {
            "target": self.estimator.info.target,
            "inner problem": f"{'solved' if self.solved else 'NOT SOLVED'}, gradient norm {self.gradient_norm:.1e}",
            "given params": f"{self.given_distance:.1e} from its solution, {self.given_spread:.1e} from their mean, "
            f"gradient norm {self.given_gradient_norm:.1e}; hypergradient there {self.given_effect:.1e} off",
            "closed form": f"estimate {self.reference_error:.1e} off (residual {self.residual:.1e})",
            "differences": f"estimate {self.difference_error:.1e} off (h = {self.length:.1e})",
            "curvature": f"λ_max {self.largest:.4g}, λ_min {self.smallest:.4g}",
            "suggested": "nothing"
            if step_size is None
            else f"step_size {step_size:.4g}, steps {steps} for {SERIES:.0e}",
            "averaging": "does not converge"
            if self.tenfold is None
            else f"error falls tenfold in {math.ceil(self.tenfold)} rounds",
        }
        if self.estimate is not None:
            cost = self.estimate.costs
            rows["each client"] = (
                f"{cost.rounds} rounds, {cost.floats} numbers sent, {cost.hessian_products} Hessian products, "
                f"{cost.jacobian_products} Jacobian products, {cost.gradients} gradients"
            )
        verdict = f"{'passed' if self.passed else 'FAILED'} at tolerance {self.tolerance:.0e}"
        lines = [f"{self.estimator} on {self.network}: {verdict}"]
        lines += [f"  {name:<15}{text}" for name, text in rows.items()]
        lines.append(f"  {'direction':<15}{'difference':>14}{'±':>9}{'estimate':>15}")
        for number, row in enumerate(zip(self.differences, self.uncertainties, self.predictions, strict=True)):
            lines.append(f"  {number + 1:<15}{row[0]:>14.6e}{row[1]:>9.0e}{row[2]:>15.6e}")
        return "\n".join(lines + [f"  ! {sentence}" for sentence in self.warnings])


@no_type_check
def check(
    task: Task,
    method: HypergradientEstimator,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    directions: int = 3,
    tolerance: float = 1e-2,
    newton_steps: int = 50,
    engine: Engine = Simulate(),
) -> Check:
    """Solve the inner problem on one machine and compare an estimate there with what it should be.

    The inner problem is minimized from the mean of the task's params by Newton steps in float64, with products only.
    The estimate is compared with central differences of the mean outer cost along random unit directions of all
    clients' hypers, the inner problem solved anew at each end, and with the closed form. Differences notice derivatives
    that are wrong, the closed form notices every component. Estimators with another target are compared with that:
    each client's own inner problem (`"local"`), params that stay as they are (`"direct"`), one client's outer cost, of
    whose hypers each direction then is (`"client"`). Here one machine sees all data.

    Args:
        task: One client's costs and start, and all clients' data.
        method: The estimator to check.
        network: Who can send to whom, and when.
        key: An integer or a JAX key.
        directions: Finite differences to take.
        tolerance: Largest relative error with which the check passes.
        newton_steps: Newton steps at most.
        engine: Where the clients of the estimate run.

    Returns:
        A `Check`; `print` shows its report.
    """
    check_integer("directions", directions, minimum=1)
    check_integer("newton_steps", newton_steps, minimum=1)
    check_positive("tolerance", tolerance)
    key = check_call(task, method, HypergradientEstimator, network, key, engine)
    if task.privacy is not None:
        raise InvalidInput("task", "a private task", "one without noise: a check compares with exact values")
    problem, params, hypers, data, estimator = task.problem, task.params, task.hypers, task.data, method
    aim, keys = estimator.info.target, [jax.random.fold_in(key, number) for number in range(3)]
    with jax.enable_x64(True):
        given, at, examples = jax.tree.map(_wide, (params, hypers, data))
        found = _solve_inner(problem, aim == "local", given, at, examples, jnp.asarray(newton_steps))
        reference, residual = _reference(problem, aim, found.params, at, examples)
        elsewhere, _ = _reference(problem, aim, given, at, examples)
        moves, weights = _directions(keys[0], at, directions, aim)
        length = LENGTH * (_norm(at) / (math.sqrt(network.clients) if aim == "client" else 1) or 1.0)
        slopes, solved = np.zeros((2, directions)), found.solved
        for halves, d, sign in np.ndindex(2, directions, 2):
            h = (-length if sign else length) / (halves + 1)
            moved = jax.tree.map(lambda leaf, move, d=d, h=h: leaf + h * move[d], at, moves)
            steps = jnp.asarray(0 if aim == "direct" else newton_steps)
            end = _solve_inner(problem, aim == "local", found.params, moved, examples, steps)
            slopes[halves, d] += weights[d] @ np.asarray(end.outer_costs) / (2 * h)
            solved = solved and (aim == "direct" or end.solved)
        smallest, largest = _spectrum(problem, found.params, at, examples, keys[1])
        tenfold = _tenfold(network, getattr(estimator, "averaging", "push"), keys[2])
        given, solution, reference, elsewhere, moves = jax.tree.map(
            np.asarray, (given, found.params, reference, elsewhere, moves)
        )

    here = jax.tree.map(lambda x, like: jnp.asarray(x, jnp.asarray(like).dtype), solution, params)
    try:
        if not np.all(np.isfinite(_flat(here))):
            raise Diverged("Newton's method", newton_steps, "the inner problem has no minimum")
        solved_task = task if estimator.trains else task.at(params=here)
        estimate = hypergradient(solved_task, estimator, network, key=key, engine=engine)
        parts = jax.tree.map(lambda move, v: np.tensordot(move, v, np.ndim(v)), moves, estimate.value)
        predictions = np.sum(jax.tree.leaves(parts), axis=0)
        error = _relative(estimate.value, reference)
    except Diverged:
        estimate, predictions, error = None, np.full(directions, math.inf), math.inf
    mean = jax.tree.map(lambda x: np.broadcast_to(np.mean(x, axis=0), x.shape), given)
    return Check(
        estimator=estimator,
        network=network.name,
        tolerance=tolerance,
        estimate=estimate,
        solution=solution,
        solved=solved,
        gradient_norm=float(found.gradient_norm),
        newton_step=float(found.distance),
        given_gradient_norm=float(found.first_norm),
        given_distance=_farthest(given, solution),
        given_spread=_farthest(given, mean),
        given_effect=_relative(elsewhere, reference),
        directions=moves,
        length=length,
        # The errors of central differences fall fourfold from h to h/2: extrapolate.
        differences=(4 * slopes[1] - slopes[0]) / 3,
        uncertainties=np.abs(slopes[1] - slopes[0]),
        predictions=predictions,
        reference=reference,
        residual=float(residual),
        reference_error=error,
        largest=largest,
        smallest=smallest,
        tenfold=tenfold,
    )


def _wide(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    return array.astype(jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _flat(tree: PyTree) -> Float[np.ndarray, " size"]:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def _norm(tree: PyTree) -> float:
    return float(np.linalg.norm(_flat(tree)))


def _relative(tree: PyTree, truth: PyTree) -> float:
    """‖tree − truth‖ / ‖truth‖; 0 if both are 0."""
    return _norm(jax.tree.map(np.subtract, tree, truth)) / (_norm(truth) or sys.float_info.min)


def _farthest(rows: PyTree, others: PyTree) -> float:
    """The largest distance between a client's params in one and in the other."""
    squares = jax.tree.map(lambda a, b: np.sum((a - b).reshape(len(a), -1) ** 2, axis=1), rows, others)
    return math.sqrt(np.max(np.sum(jax.tree.leaves(squares), axis=0)))


def _directions(key: PRNGKeyArray, hypers: PyTree, count: int, aim: Target) -> tuple[PyTree, Float[np.ndarray, "d n"]]:
    """Random unit directions of the hypers, and how the clients' outer costs count in the slope along each."""
    leaves, structure = jax.tree.flatten(hypers)
    n = leaves[0].shape[0]
    weights = np.full((count, n), 1 / n if aim == "global" else 1.0)
    if aim == "client":
        weights = np.asarray(jax.nn.one_hot(jax.random.randint(key, (count,), 0, n), n))
    keys = jax.random.split(key, len(leaves))
    moves = [jax.random.normal(k, (count, *leaf.shape)) for k, leaf in zip(keys, leaves, strict=True)]
    if aim == "client":
        moves = [move * weights.reshape(count, n, *(1,) * (move.ndim - 2)) for move in moves]
    sizes = jnp.sqrt(sum(jnp.sum(move.reshape(count, -1) ** 2, axis=1) for move in moves))
    return structure.unflatten([move / sizes.reshape(count, *(1,) * (move.ndim - 1)) for move in moves]), weights


# ------------------------------------------------------------- on one machine


class _Inner(NamedTuple):
    params: PyTree  # clients on axis 0
    gradient_norm: Float[Array, ""]
    first_norm: Float[Array, ""]  # where it started
    distance: Float[Array, ""]  # from the solution, by the last Newton step, relative
    convex: Bool[Array, ""]
    outer_costs: Float[Array, " n"]

    @property
    def solved(self) -> bool:
        return bool(self.convex) and float(self.distance) <= SOLVED


def _groups(alone: bool, tree: PyTree) -> PyTree:
    """The clients that share params, one group on each place of a new axis 0: each for itself, or all of them."""
    return jax.tree.map(lambda leaf: leaf[:, None] if alone else leaf[None], tree)


@eqx.filter_jit
def _solve_inner(
    problem: Problem, alone: bool, params: PyTree, hypers: PyTree, data: Data, steps: Int[Array, ""]
) -> _Inner:
    """Every group's minimum of the mean inner cost, by Newton steps from the mean of its params."""

    def solve(params: PyTree, hypers: PyTree, inner: PyTree):
        start, back = ravel_pytree(jax.tree.map(lambda x: jnp.mean(x, axis=0), params))

        def cost(x: Float[Array, " d"]):
            return jnp.mean(
                jax.vmap(lambda hyper, own: problem.inner_cost(back(x), hyper, everything(own)))(hypers, inner)
            )

        x, distance, convex = _minimum(cost, start, steps)
        first, last = (jnp.linalg.norm(jax.grad(cost)(at)) for at in (start, x))
        return back(x), last, first, distance, convex

    x, last, first, distance, convex = jax.vmap(solve)(*_groups(alone, (params, hypers, data.train)))
    found = jax.tree.map(lambda new, old: jnp.broadcast_to(new, old.shape), x, params)
    outer = jax.vmap(lambda x, hyper, own: problem.outer_cost(x, hyper, everything(own)))(found, hypers, data.outer)
    return _Inner(found, jnp.max(last), jnp.max(first), jnp.max(distance), jnp.all(convex), outer)


def _minimum(
    cost: Callable[[Float[Array, " d"]], Float[Array, ""]], start: Float[Array, " d"], steps: Int[Array, ""]
) -> tuple[Float[Array, " d"], Float[Array, ""], Bool[Array, ""]]:
    """Newton steps, each found by conjugate gradients and halved until it helps.

    Where they end, the length of the last, relative to the size of the point, and whether only positive curvatures were
    met on the way to it.
    """
    both = jax.value_and_grad(cost)

    def improve(state):
        number, x, *_ = state
        value, slope = both(x)
        step, convex = _conjugate_gradients(lambda v: jax.jvp(jax.grad(cost), (x,), (v,))[1], slope)

        def bad(length):
            there, slope_there = both(x - length * step)
            # Where costs differ by rounding only, the gradient still tells.
            flat = jnp.abs(there - value) <= 1e-12 * (1 + jnp.abs(value))
            lower = there <= value - 1e-4 * length * slope @ step
            good = lower | (flat & (jnp.linalg.norm(slope_there) < jnp.linalg.norm(slope)))
            near = jnp.linalg.norm(x - length * step) <= FAR * (1 + jnp.linalg.norm(start))
            return ~(good & near) & (length > 1e-9)

        length = jax.lax.while_loop(bad, lambda length: length / 2, jnp.ones_like(value))
        helps = length > 1e-9
        relative = jnp.linalg.norm(step) / (1 + jnp.linalg.norm(x))
        return number + 1, jnp.where(helps, x - length * step, x), relative, convex, helps

    first = (jnp.zeros_like(steps), start, jnp.array(jnp.inf), jnp.array(True), jnp.array(True))
    _, x, distance, convex, _ = jax.lax.while_loop(lambda state: (state[0] < steps) & state[4], improve, first)
    return x, distance, convex


def _conjugate_gradients(
    product: Callable[[Float[Array, " d"]], Float[Array, " d"]], right: Float[Array, " d"]
) -> tuple[Float[Array, " d"], Bool[Array, ""]]:
    """The solution of product(q) = right, and whether all curvatures were positive; it ends at the first that is not.

    Then q is as far as it came, or `right` itself: still a direction of descent.
    """
    most, size = min(10 * right.size, 2000), right @ right

    def go_on(state):
        number, _, residual, _, convex = state
        return (number < most) & (residual @ residual > 1e-20 * size) & convex

    def improve(state):
        number, q, residual, direction, _ = state
        image, before = product(direction), residual @ residual
        curvature = direction @ image
        length = jnp.where(curvature > 0, before / curvature, 0)
        after = residual - length * image
        ahead = after + after @ after / before * direction
        return number + 1, q + length * direction, after, ahead, curvature > 0

    first = (0, jnp.zeros_like(right), right, right, jnp.array(True))
    number, q, _, _, convex = jax.lax.while_loop(go_on, improve, first)
    return jnp.where(convex | (number > 1), q, right), convex


@eqx.filter_jit
def _reference(
    problem: Problem, aim: Target, params: PyTree, hypers: PyTree, data: Data
) -> tuple[PyTree, Float[Array, ""]]:
    """What an estimator with that aim should find, and the relative residual of the systems solved for it."""

    def solve(params: PyTree, hypers: PyTree, data: Data):
        along_x, along_hyper = jax.vmap(lambda x, hyper, own: problem.outer_gradients(x, hyper, everything(own)))(
            params, hypers, data.outer
        )
        back = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], params))[1]
        rights = jax.vmap(lambda row: ravel_pytree(row)[0])(along_x)
        n = len(rights)
        if aim != "client":
            rights = jnp.mean(rights, axis=0, keepdims=True)

        def hessian(vector: Float[Array, " d"]):
            return _mean_hessian(problem, params, hypers, data.train, vector)

        q, _ = jax.vmap(lambda right: _conjugate_gradients(hessian, right))(rights)
        missing = jnp.linalg.norm(jax.vmap(hessian)(q) - rights, axis=1)
        products = jax.vmap(lambda x, hyper, own, q: problem.jacobian_product(x, hyper, everything(own), back(q)))(
            params, hypers, data.train, jnp.broadcast_to(q, (n, q.shape[1]))
        )
        direct, indirect = (1, n) if aim == "client" else (n, n)
        value = jax.tree.map(lambda own, product: own / direct - product / indirect, along_hyper, products)
        return value, missing / jnp.maximum(jnp.linalg.norm(rights, axis=1), jnp.finfo(q).tiny)

    if aim == "direct":
        along = jax.vmap(lambda x, hyper, own: problem.outer_gradients(x, hyper, everything(own))[1])
        return along(params, hypers, data.outer), jnp.zeros(())
    value, residuals = jax.vmap(solve)(*_groups(aim == "local", (params, hypers, data)))
    return jax.tree.map(lambda v, like: v.reshape(like.shape), value, hypers), jnp.max(residuals)


@eqx.filter_jit
def _mean_hessian(
    problem: Problem, params: PyTree, hypers: PyTree, inner: PyTree, vector: Float[Array, " d"]
) -> Float[Array, " d"]:
    """(1/n) Σ_k H_k · vector."""
    back = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], params))[1]
    images = jax.vmap(lambda x, hyper, own: problem.hessian_product(x, hyper, everything(own), back(vector)))(
        params, hypers, inner
    )
    return ravel_pytree(jax.tree.map(lambda image: jnp.mean(image, axis=0), images))[0]


def _spectrum(problem: Problem, params: PyTree, hypers: PyTree, data: Data, key: PRNGKeyArray) -> tuple[float, float]:
    """The smallest and largest eigenvalue of the mean Hessian, by Lanczos steps that are kept orthogonal.

    Exact when there are as many steps as dimensions; otherwise from inside, the largest soon very close.
    """
    size = sum(leaf[0].size for leaf in jax.tree.leaves(params))
    steps = min(size, LANCZOS, max(2, NUMBERS // size))
    basis, diagonal, beside = np.zeros((steps, size)), [], []
    vector = np.asarray(jax.random.normal(key, (size,)))
    for number in range(steps):
        vector = vector / np.linalg.norm(vector)
        basis[number] = vector
        image = np.asarray(_mean_hessian(problem, params, hypers, data.train, jnp.asarray(vector)))
        if not np.all(np.isfinite(image)):
            return math.nan, math.nan
        diagonal.append(vector @ image)
        for _ in range(2):  # once loses orthogonality to rounding
            image = image - basis[: number + 1].T @ (basis[: number + 1] @ image)
        beside.append(np.linalg.norm(image))
        if beside[-1] <= 1e-10 * max(np.abs(diagonal)):  # nothing new is left
            break
        vector = image
    values = eigvalsh_tridiagonal(np.array(diagonal), np.array(beside[: len(diagonal) - 1]))
    return float(values[0]), float(values[-1])


@lru_cache(maxsize=2)
def _averaging(weights: Literal["push", "gossip"]) -> Node:
    return Repeat(Exchange(lambda held, ctx: held, lambda held, inbox, ctx: inbox.mix(held), weights), ROUNDS)


def _value(held: tuple[Float[Array, " starts"], Float[Array, ""]], ctx: Context) -> Float[Array, " starts"]:
    return held[0] / held[1]


def _tenfold(network: Network, averaging: str, key: PRNGKeyArray) -> float | None:
    """Rounds in which the distance from the mean falls tenfold, for random numbers; the median of a few starts."""
    n, program = network.clients, _averaging("gossip" if averaging == "gossip" else "push")
    values = jax.random.normal(key, (n, STARTS))
    outcome = Simulate().run(program, network, (values, jnp.ones(n)), jnp.zeros((n, 1)), key, record={"loop": _value})
    course = np.concatenate([np.asarray(values)[None], np.asarray(outcome.history["loop"])])
    errors = np.linalg.norm(course - course[0].mean(axis=0), axis=1)
    falls = np.log10(errors[0] / np.maximum(errors, 1e-6 * errors[0]))  # beyond that, rounding is near
    ends = np.argmax(falls == falls.max(axis=0), axis=0)
    digits = np.take_along_axis(falls, ends[None], axis=0)[0]
    return float(np.median(ends / digits)) if np.all(digits > 0.1) else None
