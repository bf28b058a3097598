"""Compute the privacy cost of a run from its program's trace, and the noise that keeps this cost within a budget."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from hyperpush.algorithms.base import Algorithm, BilevelState
from hyperpush.base.checks import check_positive, no_type_check
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.schedules import Power
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.hypergradients.recurrent import find_recurrent
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import Method
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.privacy import ASSUMPTION
from hyperpush.privacy.accountant import compose, least_factor
from hyperpush.privacy.flow import Held, refuse_leaks
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism
from hyperpush.privacy.noise_at_releases import count_releases
from hyperpush.privacy.release import DataSet
from hyperpush.privacy.traces import place
from hyperpush.programs import Node, Path, ProgramRecipe, Role, program_of, visit_leaves
from hyperpush.programs.counting import Work
from hyperpush.task.task import Task, client_shapes


@dataclass(frozen=True)
class LeafReleases:
    """Number of releases (noisy queries) that one leaf of a program makes of one data set.

    In each pass, `count` of the leaf's `often` releases use the data set `on`. A run of the innermost loop around the
    leaf has `passes` passes, and the loop runs `runs` times. Releases are numbered from 0 in each run.
    """

    on: DataSet
    count: int
    often: int
    passes: int
    runs: int

    @property
    def total(self) -> int:
        return self.count * self.passes * self.runs


class Spending(eqx.Module):
    """Releases of one leaf of a program on one data set, with the mechanism that adds their noise."""

    mechanism: Mechanism
    releases: LeafReleases = eqx.field(static=True)

    @property
    def losses(self) -> np.ndarray:
        """Privacy loss 1/noise of every release, as an array.

        The trace does not tell which of a leaf's releases use the data set, so the costliest ones are counted.
        """
        leaf = self.releases
        numbers = np.arange(leaf.passes * leaf.often)
        every = np.broadcast_to(1 / self.mechanism.scale(numbers), numbers.shape).reshape(leaf.passes, leaf.often)
        dearest = np.sort(every, axis=1)[:, leaf.often - leaf.count :]
        return np.tile(dearest.reshape(-1), leaf.runs)


class Budget(eqx.Module):
    """Upper bound on the releases of each client's data and on their privacy cost, as returned by `hp.budget`.

    Release t costs 1/noise(t). Pure ε is the sum of these costs; for a δ above 0, dp-accounting composes them. The cost
    holds for ideal real-valued noise: see `assumes`. The attribute `.privacy` of a result is the budget of all runs
    that led to this result.

    Args:
        parts: Releases of each leaf of the runs' programs, with their noise.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> rows = jnp.ones((3, 50))
        >>> task = hp.Task(inner=lambda x, h, a: (x - a) ** 2, outer=lambda x, h, a: (x - h - a) ** 2, params=0.0,
        ...                hypers=0.0, train=rows, validation=rows).private(clip=1.0, noise=hp.privacy.Laplace(40.0))
        >>> print(hp.budget(task, hp.SGP(steps=20, step_size=0.1)))
        private releases per client: 20 of train
    """

    assumes: ClassVar[str] = ASSUMPTION

    parts: tuple[Spending, ...] = ()

    @property
    def releases(self) -> Mapping[DataSet, int]:
        """Number of releases of each data set."""
        total: Counter[DataSet] = Counter()
        for part in self.parts:
            total[part.releases.on] += part.releases.total
        return dict(total)

    def epsilon(self, delta: float | None = None, by: str | None = None, on: DataSet | None = None) -> float:
        """Return the privacy cost ε, which is the same for all clients.

        Args:
            delta: δ of (ε, δ)-privacy, in (0, 1). None returns pure ε, which exists for Laplace noise only.
            by: The rule that composes Laplace releases for a given δ, as in `Accountant.epsilon`.
            on: The data set whose examples are protected. None protects a person who has one example in every data set.

        Raises:
            InvalidInput: The data set is unknown, δ is out of range, or pure ε is requested for Gaussian noise.
        """
        if on is not None and on not in self.releases:
            raise unknown("on", on, self.releases)
        laplace, gaussian = self._losses(Laplace, on), self._losses(Gaussian, on)
        if delta is None and gaussian.size:
            raise InvalidInput("delta", None, "a number in (0, 1): pure ε does not exist for Gaussian noise")
        if delta is None:
            return float(laplace.sum())
        return compose(laplace, float(np.sqrt(np.sum(gaussian**2))), delta, by)

    def factor(self, epsilon: float, delta: float | None = None) -> float:
        """Return the smallest factor of all noise scales with which the releases cost at most `epsilon` (above 0)."""
        check_positive("epsilon", epsilon)
        return least_factor(lambda factor: self.times(factor).epsilon(delta, "rdp"), epsilon, exact=delta is None)

    def times(self, factor: float) -> "Budget":
        """Return the budget of the same releases with all noise scales multiplied by `factor`."""
        return Budget(tuple(replace(part, mechanism=part.mechanism.times(factor)) for part in self.parts))

    def __add__(self, other: "Budget") -> "Budget":
        """Return the budget of two runs, one after the other, on the same data."""
        return Budget(self.parts + other.parts)

    def to_table(self) -> list[dict[str, Any]]:
        """Return the budget as a list of dictionaries that JSON can store, one for each leaf's releases."""
        return [
            {
                "noise": type(part.mechanism).__name__,
                "scale": float(part.mechanism.scale.scale),
                "exponent": float(part.mechanism.scale.exponent),
                "releases": asdict(part.releases),
            }
            for part in self.parts
        ]

    @staticmethod
    def from_table(table: Sequence[Mapping[str, Any]]) -> "Budget":
        """Return the budget whose `to_table` returned this table."""
        kinds = {"Laplace": Laplace, "Gaussian": Gaussian}
        return Budget(
            tuple(
                Spending(kinds[each["noise"]](Power(each["scale"], each["exponent"])), LeafReleases(**each["releases"]))
                for each in table
            )
        )

    def __str__(self) -> str:
        listed = ", ".join(f"{count:,} of {on}" for on, count in self.releases.items())
        return f"private releases per client: {listed or 'none'}"

    def _losses(self, kind: type, on: DataSet | None) -> np.ndarray:
        parts = [part for part in self.parts if isinstance(part.mechanism, kind) and on in (None, part.releases.on)]
        return np.concatenate([np.zeros(0), *(part.losses for part in parts)])


@no_type_check
def budget(task: Task, method: Method, network: Any = None) -> Budget:
    """Return an upper bound on the privacy cost of one run of a method on a private task, without running it.

    Args:
        task: A private task: `task.private(…)`.
        method: An inner solver, an estimator or an algorithm.
        network: The network, for methods whose number of steps depends on it; None for other methods.

    Returns:
        A `Budget`. Loops that clients may end early are counted at their full length.

    Raises:
        InvalidInput: The task is not private, or the method sends data without noise.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> rows = jnp.ones((3, 50, 2))
        >>> task = hp.Task(inner=lambda x, hyper, a: ((x - a) ** 2).sum(-1), outer=lambda x, hyper, a: a.sum(-1) * x[0],
        ...                params=jnp.zeros(2), hypers=0.0, train=rows, validation=rows)
        >>> private = task.private(clip=1.0, noise=hp.privacy.Laplace(40.0))
        >>> print(round(hp.budget(private, hp.SGP(steps=20, step_size=0.1)).epsilon(), 6))
        0.5
    """
    _noise_of(task)
    check_method(method)
    method.check(task, network)
    method = method if network is None else method.bind(network, None, task)
    return budget_of(task, method, program_of(method, task.problem))


def budget_of(task: Task, method: Method, recipe: ProgramRecipe) -> Budget:
    """Return the privacy cost of one run of a method on a private task; `recipe` builds the program that runs."""
    noise = _noise_of(task)
    found = releases(task, recipe, first_state(task, method))
    return Budget(tuple(Spending(noise.mechanism, leaf) for leaf in found))


@no_type_check
def within_budget(epsilon: float, delta: float | None, task: Task, method: Method, network: Any = None) -> Task:
    """Scale the noise of a private task by one factor, so that a run of the method costs at most `epsilon`.

    Args:
        epsilon: ε, above 0.
        delta: δ, in (0, 1). None bounds pure ε, which exists for Laplace noise only.
        task: A private task: `task.private(…)`. Its noise determines the mechanism and how the scale decays.
        method: As in `budget`.
        network: As in `budget`.

    Returns:
        The same task with rescaled noise. `Budget.assumes` states the assumptions behind ε.

    Raises:
        InvalidInput: As in `budget`, or no noise scale attains this ε.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> rows = jnp.ones((3, 50, 2))
        >>> task = hp.Task(inner=lambda x, hyper, a: ((x - a) ** 2).sum(-1), outer=lambda x, hyper, a: a.sum(-1) * x[0],
        ...                params=jnp.zeros(2), hypers=0.0, train=rows, validation=rows)
        >>> private, method = task.private(clip=1.0, noise=hp.privacy.Laplace(1.0)), hp.SGP(steps=20, step_size=0.1)
        >>> private = hp.within_budget(2.0, None, private, method)
        >>> print(round(private.privacy.mechanism.scale.scale, 6))  # 20 releases of 1/10 each
        10.0
    """
    noise = _noise_of(task)
    return task.replace(privacy=noise.times(budget(task, method, network).factor(epsilon, delta)))


def check_method(method: Any) -> None:
    """Raise InvalidInput unless `method` is a Method; called before anything is traced."""
    if not isinstance(method, Method):
        raise InvalidInput("method", method, "an object such as hp.SGP(steps=…, step_size=…) or hp.PDBO(…)")


def releases(task: Task, recipe: ProgramRecipe, state: PyTree) -> tuple[LeafReleases, ...]:
    """Return a program's releases of a private task's data; raise InvalidInput if it sends data without noise.

    `state` is one client's first state (arrays or shapes). Results are cached by structure and shapes.
    """
    shapes = jax.eval_shape(lambda *trees: trees, state, client_shapes(task, task.data))
    leaves, structure = jax.tree.flatten((recipe.shapes(), *shapes))
    found, constants = _releases(structure, tuple(leaves), task.clients, jax.config.read("jax_enable_x64"))
    refuse_copies(task, [("a method or a cost", leaf) for leaf in jax.tree.leaves(recipe)] + constants)
    return found


@lru_cache(maxsize=256)
def _releases(structure: Any, leaves: tuple[Any, ...], clients: int, wide: bool) -> tuple[Any, Any]:
    recipe, state, data = structure.unflatten(leaves)
    return program_releases(recipe, state, data, clients)


def program_releases(
    program: Node | ProgramRecipe, state: PyTree, data: PyTree, clients: int
) -> tuple[tuple[LeafReleases, ...], list[tuple[str, Any]]]:
    """Return an upper bound on the releases of a program's leaves, and the arrays that these leaves close over.

    Each array comes with the place in the code where it was found. The leaves of a private problem's program are
    checked for data without noise when they are traced. A loop that clients may agree to end early is counted at its
    full length.
    """
    found: list[tuple[Path, Work]] = []
    constants: list[tuple[str, Any]] = []

    def visit(path: Path, role: Role, f: Callable[..., Any], jaxpr: ClosedJaxpr | None, shapes: PyTree) -> None:
        if jaxpr is None:  # the input of `f` is computed on the host: only its type can be checked before the run
            refuse_leaks(f, {"": Held.MIXED})
            return
        # A loop tests after each pass whether it ends, so the test counts like a leaf of the loop's body.
        found.append(((*path, 0) if role is Role.UNTIL else path, count_releases(jaxpr.jaxpr)))
        constants.extend((place(f), value) for value in jaxpr.consts)

    profile = visit_leaves(program, state, data, clients, visit)
    passes: dict[Path, tuple[int, int]] = {(): (1, 1)}  # loop body: (passes in one run of the loop, runs of the loop)
    for body, around, loop in profile.loops:
        passes[body] = loop.at_most, math.prod(passes[around])
    made = []
    for path, counts in found:
        body = max((body for body in passes if path[: len(body)] == body), key=len)
        made += [LeafReleases(on, count, counts.total(), *passes[body]) for on, count in counts.items()]
    return tuple(each for each in made if each.total), constants


def refuse_copies(task: Task, held: Iterable[tuple[str, Any]]) -> None:
    """Raise InvalidInput if an array that a method, a cost or a penalty closes over contains examples of the task.

    Results computed from such arrays would lack noise. Only exact copies of examples are found: a mean of examples goes
    unnoticed.
    """
    arrays = [(where, np.asarray(each)) for where, each in held if eqx.is_array(each) and not isinstance(each, Tracer)]
    for leaf in jax.tree.leaves(task.data):
        # Single numbers may match by chance. If examples are single numbers, compare all numbers of a client together.
        row = leaf.shape[2 if task.owner is None else 1 :] or leaf.shape[-1:]
        alike = [(where, each) for where, each in arrays if each.shape[each.ndim - len(row) :] == row]
        if not alike or leaf.dtype.kind != "f" or not getattr(leaf, "is_fully_addressable", True):
            continue
        rows = np.asarray(leaf).reshape(-1, math.prod(row))
        # Constant rows and rows of zeros and ones may match by chance.
        telling = (np.ptp(rows, axis=1) > 0) & ~np.isin(rows, (0, 1)).all(axis=1)
        examples = {each.tobytes() for each in rows[telling]}
        for where, each in alike:
            if any(copy.tobytes() in examples for copy in each.astype(rows.dtype).reshape(-1, math.prod(row))):
                allowed = "functions that get data through their arguments alone, where noise is added"
                raise InvalidInput(f"task.private: {where}", "an array that holds the task's own examples", allowed)


def first_state(task: Task, method: Method) -> PyTree:
    """Return the initial state of one client for a method, with shapes and dtypes in place of arrays."""

    def start(params: PyTree, hyper: PyTree) -> PyTree:
        links = None if find_recurrent(method) is None else LinkEstimates.none(task.clients)
        if isinstance(method, InnerSolver):
            return InnerState(params, hyper)
        if isinstance(method, HypergradientEstimator):
            return HypergradientState(params, hyper, hyper, links)
        if isinstance(method, Algorithm):
            return BilevelState(params, hyper, links, jnp.zeros((), jnp.int32))
        raise InvalidInput("method", method, "an inner solver, a hypergradient estimator or an algorithm")

    return jax.eval_shape(start, client_shapes(task, task.params), client_shapes(task, task.hypers))


def _noise_of(task: Any) -> Any:
    if not isinstance(task, Task) or task.privacy is None:
        raise InvalidInput("task", task, "a private task: task.private(clip=…, noise=hp.privacy.Gaussian(…))")
    return task.privacy
