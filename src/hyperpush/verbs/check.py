"""Check a hypergradient estimate on a task against finite differences of the outer cost at inner solutions."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer, check_positive, no_type_check
from hyperpush.base.errors import Diverged, InvalidInput
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.oracles import Pooled, as_float64
from hyperpush.hypergradients.recurrent import Recurrent
from hyperpush.methods.base import Target
from hyperpush.networks import Network
from hyperpush.programs import Context, Exchange, Node, ProgramRecipe, Repeat
from hyperpush.task.task import Task
from hyperpush.verbs.check_report import Check, flatten, norm, relative_error
from hyperpush.verbs.fit import fit
from hyperpush.verbs.hypergradient import hypergradient
from hyperpush.verbs.results import Estimate

LENGTH = 1e-3  # length of a finite difference, relative to the hypers
SOLVED = 1e-6  # distance from the solution, relative to its size, at which the inner problem counts as solved
ROUNDS, STARTS = 256, 5  # communication rounds and random starts in the measurement of the averaging error


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
    """Solve the inner problem on one machine, and compare a hypergradient estimate at the solution with its target.

    A trust-region Newton method minimizes the inner problem in float64 from the mean of the task's params. It uses
    Hessian-vector products only. The estimate is compared with the closed form and with central differences of the mean
    outer cost. Each difference follows a random unit direction of all clients' hypers, and the inner problem is solved
    again at both ends. Differences reveal wrong derivatives; the closed form checks every component.

    The comparison follows the estimator's target. For `"local"`, each client's own inner problem is solved. For
    `"direct"`, the params stay fixed. For `"client"`, each direction changes the hypers of one client, and the slope
    is that of this client's own outer cost.

    **Use it** on a small instance of a new kind of task, before you trust an estimator on it. **Avoid it** where data
    must stay with their owners: one machine sees all of them.

    Args:
        task: One client's costs and start, and all clients' data. The inner problem must be convex.
        method: The estimator to check.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key.
        directions: Number of finite differences, at least 1. Three are enough to reveal wrong derivatives.
        tolerance: Largest relative error with which an estimate passes the check, above 0.
        newton_steps: Largest number of Newton steps, at least 1. Raise it if the report says that the inner
            problem could not be solved.
        engine: The engine that runs the estimate's clients.

    Returns:
        A `Check`; `print` shows its report.

    Raises:
        InvalidInput: An argument is out of range or does not fit another argument, or the task is private.

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
    key = fit(task, method, network, engine, kind=HypergradientEstimator, key=key, verb=check).key
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
        length = LENGTH * (norm(hypers) / (math.sqrt(network.clients) if target == "client" else 1) or 1.0)
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
        tenfold = _tenfold(network, method.option("averaging"), keys[2])
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
        # Newton steps can also end at a saddle point, so the smallest eigenvalue must not be negative, up to rounding.
        solved=missing <= SOLVED and smallest >= -1e-9 * largest,
        gradient_norm=found.gradient_norm,
        newton_step=missing,
        given_gradient_norm=found.first_norm,
        given_distance=_farthest(given, solution),
        given_spread=_farthest(given, mean),
        given_effect=relative_error(elsewhere, reference),
        directions=moves,
        length=length,
        # Richardson extrapolation: the error of a central difference falls fourfold from h to h/2.
        differences=(4 * slopes[1] - slopes[0]) / 3,
        uncertainties=np.abs(slopes[1] - slopes[0]),
        predictions=predictions,
        reference=reference,
        residual=residual,
        reference_error=math.inf if estimate is None else relative_error(estimate.value, reference),
        largest=largest,
        smallest=smallest,
        tenfold=tenfold,
        own_smallest=own_smallest,
        sensitivity=sensitivity,
        window=network.flood_rounds(),
    )


def _estimate_at(
    solution: PyTree, task: Task, method: HypergradientEstimator, network: Network, key: PRNGKeyArray, engine: Engine
) -> Estimate | None:
    """Return the estimate at the inner solution; None if the solution is not finite or the estimate diverges.

    An estimator that trains params itself starts from the task's params instead. A `Recurrent` estimator takes the true
    mean weights of the links, because no training on this network has measured them.
    """
    if isinstance(method, Recurrent):
        method = method.with_options(links="means")
    here = jax.tree.map(lambda x, like: jnp.asarray(x, jnp.asarray(like).dtype), solution, task.params)
    if not np.all(np.isfinite(flatten(here))):
        return None
    try:
        return hypergradient(task if method.trains else task.at(params=here), method, network, key=key, engine=engine)
    except Diverged:
        return None


def _farthest(rows: PyTree, others: PyTree) -> float:
    """Return the largest ℓ2 distance, over clients, between a client's params in `rows` and in `others`."""
    squares = jax.tree.map(lambda a, b: np.sum((a - b).reshape(len(a), -1) ** 2, axis=1), rows, others)
    return math.sqrt(np.max(np.sum(jax.tree.leaves(squares), axis=0)))


def _directions(
    key: PRNGKeyArray, hypers: PyTree, count: int, target: Target
) -> tuple[PyTree, Float[np.ndarray, "d n"]]:
    """Return random unit directions of the hypers, and the weights of the clients' outer costs along each direction."""
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


def _tenfold(network: Network, averaging: str | None, key: PRNGKeyArray) -> float | None:
    """Return the communication rounds in which averaging brings random numbers ten times closer to their mean.

    The result is the median over a few random starts; None if the distance does not shrink.
    """
    n, program = network.clients, ProgramRecipe(_averaging, ("gossip" if averaging == "gossip" else "push",))
    values = jax.random.normal(key, (n, STARTS))
    outcome = Simulate().run(program, network, (values, jnp.ones(n)), jnp.zeros((n, 1)), key, record={"loop": _value})
    course = np.concatenate([np.asarray(values)[None], np.asarray(outcome.history["loop"])])
    errors = np.linalg.norm(course - course[0].mean(axis=0), axis=1)
    decades = np.log10(errors[0] / np.maximum(errors, 1e-6 * errors[0]))  # smaller errors are mostly rounding
    ends = np.argmax(decades == decades.max(axis=0), axis=0)
    digits = np.take_along_axis(decades, ends[None], axis=0)[0]
    return float(np.median(ends / digits)) if np.all(digits > 0.1) else None
