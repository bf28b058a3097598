"""Whether an estimate can be trusted on a task: compared with finite differences of the solved problem."""

import math
import sys
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_integer, check_positive, no_type_check
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.errors import Diverged, InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.hgp import HGP
from hyperpush.hypergradients.oracles import Pooled, as_float64
from hyperpush.inner_residual import inner_residual
from hyperpush.method import Target
from hyperpush.networks import Network
from hyperpush.programs import Context, Exchange, Node, Recipe, Repeat
from hyperpush.results import Estimate
from hyperpush.task import Task
from hyperpush.verbs import check_call, hypergradient

SERIES = 1e-4  # what the suggested number of steps leaves of HGP's series
LENGTH = 1e-3  # of a finite difference, relative to the hypers
SOLVED = 1e-6  # distance from the solution, relative to its size, at which the inner problem counts as solved
ROUNDS, STARTS = 256, 5  # for watching the averaging error


@dataclass(frozen=True)
class Check:
    """An estimate at the solution of the inner problem, what it should be, and what would serve it.

    Attributes:
        estimator: The estimator that was checked.
        network: The network's name.
        tolerance: Largest relative error with which it passes.
        estimate: The estimate at the solution; None if it diverged.
        solution: The params where it was taken, clients on axis 0.
        solved: Whether these, and those at the ends of the differences, are minima.
        gradient_norm: Norm of the inner gradient at the solution.
        newton_step: Length of a Newton step from there, relative to the size of the params.
        given_gradient_norm: Norm of the inner gradient at the mean of the given params.
        given_distance: Largest distance of a client's given params from the solution.
        given_spread: Largest distance of a client's given params from their mean.
        given_effect: Relative ℓ2 change of the reference if it is taken at the given params.
        directions: Directions of the hypers, leaves [directions, clients, …].
        length: h of the finite differences.
        differences: Slopes of the solved problem along the directions.
        uncertainties: Changes of these from h to h/2.
        predictions: The estimate's slopes.
        reference: What the estimate should be: the closed form, by conjugate gradients.
        residual: Largest relative residual of these.
        reference_error: Relative ℓ2 distance of the estimate from the reference.
        largest: Largest eigenvalue of the Hessian that the target inverts: the mean one, or the clients' own.
        smallest: The smallest one.
        tenfold: Rounds in which the network's averaging error falls tenfold; None if it does not.
        given_residual: How far the given params are from solved, as in `hp.Status`; None if it does not matter.
        own_smallest: Smallest eigenvalue of any client's own Hessian at the solution.
        sensitivity: Largest change of the solution per change of the hypers along the directions, |dx|/|dλ|.
        window: Rounds after which whatever anyone sends has reached all (repeated connection).
    """

    estimator: HypergradientEstimator
    network: str
    tolerance: float
    estimate: Estimate | None
    solution: PyTree
    solved: bool
    gradient_norm: float
    newton_step: float
    given_gradient_norm: float
    given_distance: float
    given_spread: float
    given_effect: float
    directions: PyTree
    length: float
    differences: Float[np.ndarray, " directions"]
    uncertainties: Float[np.ndarray, " directions"]
    predictions: Float[np.ndarray, " directions"]
    reference: PyTree
    residual: float
    reference_error: float
    largest: float
    smallest: float
    tenfold: float | None
    given_residual: float | None
    own_smallest: float
    sensitivity: float
    window: int

    @property
    def condition(self) -> float:
        """λ_max/λ_min of the Hessian; infinite where it is not positive definite."""
        return self.largest / self.smallest if self.smallest > 0 else math.inf

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
        said = self._warnings_of_the_problem()
        return said + self._warnings_of_the_estimate() + self._warnings_of_the_check() if self.solved else said

    def _warnings_of_the_problem(self) -> list[str]:
        said = []
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
        return said

    def _warnings_of_the_estimate(self) -> list[str]:
        said, name, info = [], type(self.estimator).__name__, self.estimator.info
        if self.given_effect > self.tolerance:
            said.append(
                f"The given params are {self.given_distance:.1e} from the inner solution (gradient norm "
                f"{self.given_gradient_norm:.1e}); there the hypergradient is off by {self.given_effect:.1e}."
            )
        if self.estimate is None:
            said.append(f"{name} diverged (NaN or infinity).")
        step_size = getattr(self.estimator, "step_size", None)
        if info.target == "global" and step_size is not None and step_size * self.largest > 2:
            said.append(f"Step size {step_size:.3g} exceeds 2/λ_max = {2 / self.largest:.3g}: {name} will diverge.")
        elif isinstance(self.estimator, HGP):
            said += self._warnings_of_hgp(self.estimator)
        if info.target == "global" and info.note:
            aims = f'aims at "{info.target}, {info.note}"'
            said.append(f"{name} {aims}: it differs from what it is compared with by design.")
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

    def _warnings_of_the_check(self) -> list[str]:
        said, doubt = [], _norm(self.uncertainties) / (_norm(self.differences) or sys.float_info.min)
        if doubt > self.tolerance:
            said.append(f"The finite differences are uncertain by {doubt:.1e}: is the outer cost smooth in the hypers?")
        if self.residual > self.tolerance:
            said.append(f"The closed form is uncertain: its residual is {self.residual:.1e}.")
        if self.reference_error <= self.tolerance < self.difference_error:
            said.append(
                "The estimate follows the derivatives that the costs give, but not the costs: these derivatives are "
                "wrong (stop_gradient, rounding, a custom rule, …)."
            )
        return said

    def __str__(self) -> str:
        """One screen: the problem, the estimate, and what to change."""
        verdict = f"{'passed' if self.passed else 'FAILED'} at tolerance {self.tolerance:.0e}"
        rows = [f"  {name:<15}{text}" for name, text in self._rows_of_the_problem().items()]
        lines = [f"{self.estimator} on {self.network}: {verdict}", "the problem", *rows, "the estimate"]
        lines += [f"  {name:<15}{text}" for name, text in self._rows_of_the_estimate().items()]
        lines.append(f"  {'direction':<15}{'difference':>14}{'±':>9}{'estimate':>15}")
        for number, row in enumerate(zip(self.differences, self.uncertainties, self.predictions, strict=True)):
            lines.append(f"  {number + 1:<15}{row[0]:>14.6e}{row[1]:>9.0e}{row[2]:>15.6e}")
        return "\n".join([*lines, "what to change", *(f"  {sentence}" for sentence in self._advice())])

    def _rows_of_the_problem(self) -> dict[str, str]:
        own = f"; a client's own down to {self.own_smallest:.2g}{' (indefinite)' if self.own_smallest < 0 else ''}"
        given = "" if self.given_residual is None else f", residual {self.given_residual:.2g}"
        rounds = self.tenfold and math.ceil(self.tenfold)
        contraction = "no step size lets training contract"
        if self.smallest > 0:
            contraction = f"at step size 1/λ_max training contracts by {1 - 1 / self.condition:.4g} per step"
        return {
            "conditioning": f"λ_max {self.largest:.4g}, λ_min {self.smallest:.4g}, κ {self.condition:.3g}{own}",
            "inner problem": f"{'solved' if self.solved else 'NOT SOLVED'}, gradient norm {self.gradient_norm:.1e}",
            "given params": f"{self.given_distance:.1e} from its solution, {self.given_spread:.1e} from their mean"
            f"{given}; hypergradient there {self.given_effect:.1e} off",
            "sensitivity": f"|dx|/|dλ| up to {self.sensitivity:.3g} along the directions below",
            "range": f"the outer gradient is in the Hessian's range up to {self.residual:.1e}",
            "connection": f"whatever is sent reaches all within {self.window} rounds; averaging errors "
            + (f"fall tenfold in {rounds}" if rounds else "do not fall"),
            "contraction": contraction,
        }

    def _rows_of_the_estimate(self) -> dict[str, str]:
        rows = {
            "target": self.estimator.info.target,
            "closed form": f"estimate {self.reference_error:.1e} off (residual {self.residual:.1e})",
            "differences": f"estimate {self.difference_error:.1e} off (h = {self.length:.1e})",
        }
        if self.estimate is not None:
            cost = self.estimate.costs
            rows["status"] = (
                f"{self.estimate.status}{self.estimate.status.chosen and '; ' + self.estimate.status.chosen}"
            )
            rows["each client"] = (
                f"{cost.rounds} rounds, {cost.floats} numbers sent, {cost.hessian_products} Hessian products, "
                f"{cost.jacobian_products} Jacobian products, {cost.gradients} gradients"
            )
        return rows

    def _advice(self) -> list[str]:
        said = [f"! {sentence}" for sentence in self.warnings]
        if self.suggested_step_size is not None and self.suggested_steps is not None:
            said.append(
                f"for HGP: step_size {self.suggested_step_size:.4g}, steps {self.suggested_steps} for {SERIES:.0e}"
            )
        return said or ["nothing"]


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

    The inner problem is minimized from the mean of the task's params by a trust-region Newton method in float64, with
    products only. The estimate is compared with central differences of the mean outer cost along random unit directions
    of all clients' hypers, the inner problem solved anew at each end, and with the closed form. Differences notice
    derivatives that are wrong, the closed form notices every component.

    Estimators with another target are compared with that target. `"local"` takes each client's own inner problem,
    `"direct"` leaves params as they are. For `"client"`, each direction moves the hypers of one client, and the slope
    is that of its own outer cost.

    **Use it** before you trust an estimator on a new kind of task, on a small instance of it. **Avoid it** where data
    must stay with their owners: one machine sees all of them.

    Args:
        task: One client's costs and start, and all clients' data. The inner problem must be convex.
        method: The estimator to check.
        network: Who can send to whom, and when.
        key: An integer or a JAX key.
        directions: Finite differences to take, at least 1. Three are enough to notice wrong derivatives.
        tolerance: Largest relative error with which the check passes, above 0.
        newton_steps: Newton steps at most, at least 1. Raise it where the report says that the inner problem could not
            be solved.
        engine: Where the clients of the estimate run.

    Returns:
        A `Check`; `print` shows its report.

    Raises:
        InvalidInput: An argument is out of range, does not fit the others, or the task is private.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(4, seed=0), hp.networks.FullyConnected(4)
        >>> trained = hp.train(task, hp.SGP(steps=200, step_size=0.2), network, key=0).task
        >>> found = hp.check(trained, hp.HGP(steps=200, pushes=1, step_size=0.2), network, key=0)
        >>> found.passed, found.warnings
        (True, [])
    """
    check_integer("directions", directions, minimum=1)
    check_integer("newton_steps", newton_steps, minimum=1)
    check_positive("tolerance", tolerance)
    key = check_call(task, method, HypergradientEstimator, network, key, engine)
    if task.privacy is not None:
        raise InvalidInput("task", "a private task", "one without noise: a check compares with exact values")
    target, keys = method.info.target, [jax.random.fold_in(key, number) for number in range(3)]
    with jax.enable_x64(True):
        given, hypers, data = as_float64((task.params, task.hypers, task.data))
        pooled = Pooled(task.problem, data, alone=target == "local")
        found = pooled.minimize(given, hypers, newton_steps)
        reference, residual = pooled.hypergradient(target, found.params, hypers)
        elsewhere, _ = pooled.hypergradient(target, given, hypers)
        moves, weights = _directions(keys[0], hypers, directions, target)
        length = LENGTH * (_norm(hypers) / (math.sqrt(network.clients) if target == "client" else 1) or 1.0)
        slopes, missing, sensitivity = np.zeros((2, directions)), found.newton_step, 0.0
        for halves, d, sign in np.ndindex(2, directions, 2):
            h = (-length if sign else length) / (halves + 1)
            moved, end = jax.tree.map(lambda leaf, move, d=d, h=h: leaf + h * move[d], hypers, moves), found
            if target != "direct":
                end = pooled.minimize(found.params, moved, newton_steps)
            outer_costs = np.asarray(pooled.of_each("outer_cost", end.params, moved, on="outer"))
            slopes[halves, d] += weights[d] @ outer_costs / (2 * h)
            missing = max(missing, end.newton_step)
            sensitivity = max(sensitivity, _farthest(end.params, found.params) / abs(h))
        smallest, largest = pooled.spectrum(found.params, hypers, keys[1])
        own_smallest, _ = Pooled(task.problem, data, alone=True).spectrum(found.params, hypers, keys[1])
        given, solution, reference, elsewhere, moves = jax.tree.map(
            np.asarray, (given, found.params, reference, elsewhere, moves)
        )
        tenfold = _tenfold(network, getattr(method, "averaging", "push"), keys[2])
    estimate = _estimate_at(solution, task, method, network, key, engine)
    predictions = np.full(directions, math.inf)
    if estimate is not None:
        parts = jax.tree.map(lambda move, v: np.tensordot(move, v, np.ndim(v)), moves, estimate.value)
        predictions = np.sum(jax.tree.leaves(parts), axis=0)
    mean = jax.tree.map(lambda x: np.broadcast_to(np.mean(x, axis=0), x.shape), given)
    return Check(
        estimator=method,
        network=network.name,
        tolerance=tolerance,
        estimate=estimate,
        solution=solution,
        # A Newton step can lead to a saddle, too: curvatures must not be negative, but for rounding.
        solved=missing <= SOLVED and smallest >= -1e-9 * largest,
        gradient_norm=found.gradient_norm,
        newton_step=found.newton_step,
        given_gradient_norm=found.first_norm,
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
        residual=residual,
        reference_error=math.inf if estimate is None else _relative(estimate.value, reference),
        largest=largest,
        smallest=smallest,
        tenfold=tenfold,
        given_residual=inner_residual(task, method, engine),
        own_smallest=own_smallest,
        sensitivity=sensitivity,
        window=network.flood_rounds(),
    )


def _estimate_at(
    solution: PyTree, task: Task, method: HypergradientEstimator, network: Network, key: PRNGKeyArray, engine: Engine
) -> Estimate | None:
    """The estimate at the inner solution, or where it trained itself; None if it, or the solution, is not finite."""
    here = jax.tree.map(lambda x, like: jnp.asarray(x, jnp.asarray(like).dtype), solution, task.params)
    if not np.all(np.isfinite(_flat(here))):
        return None
    try:
        return hypergradient(task if method.trains else task.at(params=here), method, network, key=key, engine=engine)
    except Diverged:
        return None


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


def _directions(
    key: PRNGKeyArray, hypers: PyTree, count: int, target: Target
) -> tuple[PyTree, Float[np.ndarray, "d n"]]:
    """Random unit directions of the hypers, and how the clients' outer costs count in the slope along each."""
    leaves, structure = jax.tree.flatten(hypers)
    n = leaves[0].shape[0]
    weights = np.full((count, n), 1 / n if target == "global" else 1.0)
    if target == "client":
        weights = np.asarray(jax.nn.one_hot(jax.random.randint(key, (count,), 0, n), n))
    keys = jax.random.split(key, len(leaves))
    moves = [jax.random.normal(k, (count, *leaf.shape)) for k, leaf in zip(keys, leaves, strict=True)]
    if target == "client":
        moves = [move * weights.reshape(count, n, *(1,) * (move.ndim - 2)) for move in moves]
    sizes = jnp.sqrt(sum(jnp.sum(move.reshape(count, -1) ** 2, axis=1) for move in moves))
    return structure.unflatten([move / sizes.reshape(count, *(1,) * (move.ndim - 1)) for move in moves]), weights


def _averaging(weights: Literal["push", "gossip"]) -> Node:
    return Repeat(Exchange(lambda held, ctx: held, lambda held, inbox, ctx: inbox.mix(held), weights), ROUNDS)


def _value(held: tuple[Float[Array, " starts"], Float[Array, ""]], ctx: Context) -> Float[Array, " starts"]:
    return held[0] / held[1]


def _tenfold(network: Network, averaging: str, key: PRNGKeyArray) -> float | None:
    """Rounds in which the distance from the mean falls tenfold, for random numbers; the median of a few starts."""
    n, program = network.clients, Recipe(_averaging, ("gossip" if averaging == "gossip" else "push",))
    values = jax.random.normal(key, (n, STARTS))
    outcome = Simulate().run(program, network, (values, jnp.ones(n)), jnp.zeros((n, 1)), key, record={"loop": _value})
    course = np.concatenate([np.asarray(values)[None], np.asarray(outcome.history["loop"])])
    errors = np.linalg.norm(course - course[0].mean(axis=0), axis=1)
    falls = np.log10(errors[0] / np.maximum(errors, 1e-6 * errors[0]))  # beyond that, rounding is near
    ends = np.argmax(falls == falls.max(axis=0), axis=0)
    digits = np.take_along_axis(falls, ends[None], axis=0)[0]
    return float(np.median(ends / digits)) if np.all(digits > 0.1) else None
