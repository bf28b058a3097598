"""Every bilevel algorithm on one task, each with the same grid of step sizes: the shared part of `tune` and `meta`.

A method runs once for every setting; a new step size needs no compilation. Among runs with finite results, the run with
the lowest final outer (validation) cost is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

import hyperpush as hp
from hyperpush.algorithms.base import Algorithm
from hyperpush.base.errors import unknown
from hyperpush.data.batches import full_batch
from hyperpush.networks import Network
from hyperpush.privacy.sensitivity import Constants
from hyperpush.runs.run import StudyRun
from hyperpush.task.problem import Cost, Problem
from hyperpush.verbs.checks import check_links
from hyperpush_papers.common.config import Comparison
from hyperpush_papers.common.methods import NESTED, nested_loops, single_loop, single_loops

Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A task of a comparison, with its metrics and the units of its step sizes."""

    task: hp.Task  # if its `common` is True, all clients have one common hyper
    metrics: Mapping[str, Cost] = field(default_factory=dict)  # metrics of one client, on its validation examples
    of_hypers: Mapping[str, Callable[[PyTree], float]] = field(default_factory=dict)  # metrics of all clients' hypers
    outer_unit: float = 1.0  # factor of all outer step sizes
    inner_unit: float = 1.0  # factor of all inner step sizes: about 1/λ_max of the inner Hessian
    constants: Callable[[float, float], Constants] | None = (
        None  # constants of the costs for privacy, from (clip, radius)
    )

    def measure(self, params: PyTree, hypers: PyTree) -> dict[str, float]:
        """Return the outer cost and all metrics at a point, as means over clients."""
        metrics = ("outer_cost", self.task.problem.outer), *self.metrics.items()
        found = _means(self.task.problem, metrics, params, hypers, self.task.validation)
        means = {name: float(mean) for name, mean in found.items()}
        return means | {name: score(hypers) for name, score in self.of_hypers.items()}


@eqx.filter_jit
def _means(
    problem: Problem, metrics: tuple[tuple[str, Cost], ...], params: PyTree, hypers: PyTree, examples: PyTree
) -> dict[str, Float[Array, ""]]:
    def of_client(params: PyTree, hyper: PyTree, own: PyTree) -> dict[str, Float[Array, ""]]:
        return {name: problem.measure(metric, params, hyper, full_batch(own)) for name, metric in metrics}

    return jax.tree.map(jnp.mean, jax.vmap(of_client)(params, hypers, examples))


@dataclass(frozen=True)
class Compared:
    """A method at its best setting: row of the table, curve, and end point (None if the method was left out)."""

    row: Row
    curve: Row | None = None
    solution: hp.Solution | None = None


def method_names(config: Comparison, network: Network | None = None) -> list[str]:
    """Return the methods of a comparison; refuse unknown names and methods that cannot use the network."""
    known = [*single_loops(), *NESTED]
    for name in config.methods:
        if name not in known:
            raise unknown("methods", name, known)
    wanted = [name for name in known if name in config.methods or not config.methods]
    for name in wanted:
        if network is not None and name not in NESTED:  # nested methods run on any network
            check_links(single_loop(config, name, 0.1, 0.1), network)
    return wanted


def compare(
    config: Comparison, run: StudyRun, network: Network, common: Benchmark, personal: Benchmark | None = None
) -> list[Compared]:
    """Run every method at its best setting of the grid.

    In `common` all clients share one hyper. `personal` is the same task with personal hypers, for methods that support
    them (PDBO). If it is None, these methods also run on `common`.
    """
    found = []
    names = method_names(config, network)
    with run.progress("methods", len(names)) as bar:
        for name in names:
            on = benchmark_of(name, common, personal)
            reason = too_large(config, name, on.task)
            found.append(left_out(name, reason) if reason else best_setting(config, name, network, on))
            run.record(**found[-1].row)
            bar.step()
    return found


def benchmark_of(name: str, common: Benchmark, personal: Benchmark | None) -> Benchmark:
    """Return the task that a method runs on."""
    return personal if name in NESTED and personal is not None else common


def left_out(name: str, reason: str, **more: Any) -> Compared:
    """Return the row of a method without a result, with the reason."""
    return Compared({"method": name, "left_out": reason, **more})


def too_large(config: Comparison, name: str, task: hp.Task) -> str | None:
    """Return the reason why a method that forms matrices does not run here; None if it runs."""
    if name in NESTED or not single_loops()[name].info.matrices:
        return None
    d, h = (sum(leaf[0].size for leaf in jax.tree.leaves(tree)) for tree in (task.params, task.hypers))
    largest = max(d * d, d * h) if name == "GBDSBO" else d * h
    if largest <= config.most:
        return None
    return (
        f"a matrix of {largest:,} numbers per client, for {d:,} params and {h:,} hypers; the limit is {config.most:,}"
    )


def best_setting(config: Comparison, name: str, network: Network, on: Benchmark) -> Compared:
    """Run a method at all points of the grid; return its best run with the measurements."""
    methods = []
    for a, b in product(config.outer, config.inner):
        outer, inner = a * on.outer_unit, b * on.inner_unit
        if name in NESTED:
            step = on.inner_unit * min(config.inner)
            methods.append((outer, inner, nested_loops(config, name, on.task, config.pushes, outer, inner, step)))
        else:
            methods.append((outer, inner, single_loop(config, name, outer, inner)))
    every = 1 if name in NESTED else rows_apart(methods[0][2].steps, config.points)
    options = {"key": jax.random.key(config.seed), "metrics": on.metrics, "every": every}
    best = best_run(name, on, on.task, network, methods, **options)
    return best if best.solution is None else replace(best, curve=curve_of(name, on, best.solution))


def best_run(
    name: str,
    on: Benchmark,
    task: hp.Task,
    network: Network,
    methods: Sequence[tuple[float, float, Algorithm]],
    **options: Any,
) -> Compared:
    """Return the finite run with the lowest final outer cost; each given method has its outer and inner step size."""
    finite = []
    for outer, inner, method in methods:
        with suppress(hp.Diverged):
            found = hp.solve(task, method, network, certify=False, **options)
            finite.append((on.measure(found.params, found.hypers), found, {"outer_step": outer, "inner_step": inner}))
    tried = {"settings_tried": len(methods), "settings_diverged": len(methods) - len(finite)}
    if not finite:
        return left_out(name, "diverged at every setting", **tried)
    values, best, settings = min(finite, key=lambda each: each[0]["outer_cost"])
    costs = {"floats_per_client": best.costs.floats, "rounds": best.costs.rounds}
    return Compared({"method": name, **values, **costs, "settings": settings, **tried}, solution=best)


def rows_apart(steps: int, points: int) -> int:
    """Return the steps between two points of a curve with at least this many points, the last one included."""
    return next(every for every in range(max(1, steps // points), 0, -1) if steps % every == 0)


def curve_of(name: str, on: Benchmark, found: hp.Solution) -> Row:
    """Return the recorded metrics as lists."""
    history, columns = found.history, found.history.columns()

    def scores(of: Callable[[PyTree], float]) -> list[float | None]:
        """Return a metric of the hypers at each row of the history; None in each row if the history keeps no hypers."""
        if history.hypers is None:
            return [None] * len(history)
        return [of(jax.tree.map(lambda leaf, row=row: leaf[row], history.hypers)) for row in range(len(history))]

    return {
        "method": name,
        "iterations": history.steps.tolist(),
        "floats_per_client": [float(sent) for sent in history.floats],
        "outer_cost": columns["cost"].tolist(),
        **{metric: columns[metric].tolist() for metric in on.metrics},
        **{score: scores(of) for score, of in on.of_hypers.items()},
    }
