"""Train, estimate the hypergradient, tune, and compare the last estimate with the closed form where there is one."""

from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PyTree

import hyperpush as hp
from hyperpush import spec
from hyperpush.algorithms.pdbo import PDBO
from hyperpush.data.sets import DataSet
from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.hypergradients import oracles
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.imports import load_function
from hyperpush.inner.base import InnerSolver
from hyperpush.registry import find
from hyperpush.runs.report.figures import Curve, error_curves, panels
from hyperpush.runs.run import StudyRun
from hyperpush.studies.common.methods import fitting_options
from hyperpush.studies.solve.config import Estimation, Inner, Solve

STOP = "stop"  # the data set that early stopping looks at, if it is one of its own
DENSE = 500  # params per client up to which the closed form is affordable
ENGINES = {"simulate": hp.Simulate, "shard": hp.Shard, "peer": hp.Threads}


def run(config: Solve, run: StudyRun) -> dict[str, Any]:
    """Solve the task, then estimate the hypergradient once more at the point reached."""
    task = read_task(config)
    method, task = algorithm(config, task)
    network = hp.networks.by_name(config.network, config.clients, config.seed, **config.network_options)
    engine = ENGINES[config.engine]()
    solving_key, checking_key = jax.random.split(jax.random.key(config.seed))
    solution = hp.solve(task, method, network, key=solving_key, every=1, engine=engine)
    # An estimator that trains itself starts where training did.
    at = task.at(hypers=solution.hypers) if method.hypergradient.trains else solution.task
    value = flat(hp.hypergradient(at, method.hypergradient, network, key=checking_key, engine=engine).value)
    truth = None if config.alone else closed_form(solution)
    error = None if truth is None else float(np.linalg.norm(value - truth))
    spread = hyper_spread(solution.hypers) if task.common else None
    columns = solution.history.columns()
    costs = columns["cost"].tolist()
    metric = columns["watched"].tolist() if "watched" in columns else None
    for number, cost in enumerate(costs):
        watched = {} if metric is None else {"metric": metric[number]}
        run.record(outer_step=number, outer_cost=cost, **watched, rounds=int(columns["rounds"][number]))
    run.save_models("params", solution.params, solution.names)
    run.save_models("hypers", solution.hypers, solution.names)
    if len(costs) > 1:
        draw(run, costs)
    result = {
        "outer_costs": costs,
        "best_step": solution.best_step,
        "metric": metric,
        "hyper_spread": spread,
        "hypergradient_norm": float(np.linalg.norm(value)),
        "hypergradient_error": error,
        "rounds": solution.costs.rounds,
        "floats_per_client": solution.costs.floats,
    }
    show(config, run, result)
    return result


def read_task(config: Solve) -> hp.Task:
    """The task that the configuration names."""
    options = {"log_rates": True} if config.problem == "logistic" else {}
    try:
        return spec.read_task({"name": config.problem, "clients": config.clients, "seed": config.seed, **options})
    except InvalidInput as error:
        if error.field != "task.name":
            raise
        raise InvalidInput("problem", error.given, error.allowed) from error


def algorithm(config: Solve, task: hp.Task) -> tuple[PDBO, hp.Task]:
    """The algorithm as configured, and the task as it wants it."""
    kind = find("algorithms", config.outer.form, "outer.form")
    assert issubclass(kind, PDBO)
    options: dict[str, Any] = {
        "inner": solver(config.inner, "LocalSGD" if config.alone else config.inner.method),
        "hypergradient": estimator(config.estimator, "LocalGradient" if config.alone else config.estimator.method),
        "outer": hp.optimizer("adam", learning_rate=config.outer.rate),
        "steps": config.outer.steps,
        "restart": config.outer.restart,
        "pushes": config.outer.pushes,
        "tracked": config.outer.tracked,
    }
    task = task.replace(common=bool(kind.info.fixed_point))
    if config.stop.data is not None:
        examples = DataSet(STOP, load_examples(config, "stop.data", config.stop.data))
        if examples.clients != task.clients:
            raise InvalidInput("stop.data", f"{examples.clients} clients", f"{task.clients} clients, as in problem")
        task = task.replace(_sets={**task._sets, STOP: examples})
    return kind(**fitting_options(kind, options), stop=early_stopping(config, task)), task


def load_examples(config: Solve, field: str, name: str) -> PyTree:
    """What the user's function of (clients, seed) returns."""
    function = load_function(field, name)
    try:
        return function(config.clients, config.seed)
    except HyperpushError:
        raise
    except Exception as error:  # the function is the user's: whatever it raises, say so
        said = f"{name}, which fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of (clients, seed)") from error


def early_stopping(config: Solve, task: hp.Task) -> hp.EarlyStopping | None:
    """The early stopping that the configuration asks for."""
    given = config.stop
    if given.patience is None:
        return None
    metric = "cost" if given.metric == "outer-cost" else load_function("stop.metric", given.metric)
    on = task.outer_on if given.data is None else STOP
    return hp.EarlyStopping(metric, on, given.patience, given.mode, given.rounds, given.weighted)


def solver(given: Inner, name: str) -> InnerSolver:
    """The inner solver of this name, as configured."""
    rate = hp.schedule("milestones", given.rate, at=given.milestones) if given.milestones else given.rate
    kind = find("inner", name, "inner.method")
    options = {"steps": given.steps, "step_size": rate, "batch_size": given.batch}
    return kind(**fitting_options(kind, {**options, "variant": given.order, "epochs": given.epochs}))


def estimator(given: Estimation, name: str) -> HypergradientEstimator:
    """The estimator of this name, as configured."""
    kind = find("hypergradients", name, "estimator.method")
    options = {"steps": given.order, "pushes": given.pushes, "step_size": given.step, "batch_size": given.batch}
    options |= {"averaging": given.averaging, "keep_mass": given.keep_mass}
    step = given.step or 0.5
    required = {"pushes": 10, "step_size": step, "solver": hp.SGP(given.order, step, batch_size=given.batch)}
    return kind(**fitting_options(kind, options, required))


def closed_form(solution: hp.Solution) -> Float[np.ndarray, " hypers"] | None:
    """All clients' exact hypergradients of everybody's mean cost; None where that is too large or does not exist."""
    task = solution.task
    if sum(leaf[0].size for leaf in jax.tree.leaves(task.params)) <= DENSE:
        with suppress(np.linalg.LinAlgError):  # a singular Hessian has no closed form to compare with
            return flat(oracles.dense(task.problem, task.params, solution.hypers, task.data))
    return None


def flat(tree: PyTree) -> Float[np.ndarray, " numbers"]:
    """All numbers of a pytree in one float64 vector."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def hyper_spread(hypers: PyTree) -> float:
    """The largest difference between any two clients' hypers."""
    return float(max(np.ptp(leaf, 0).max() for leaf in jax.tree.leaves(hypers)))


def draw(run: StudyRun, costs: list[float]) -> None:
    """The outer cost by outer step."""
    figure, (axes,) = panels()
    curve = Curve("mean over clients", range(len(costs)), costs)
    error_curves(axes, [curve], x_label="outer step", y_label="outer cost")
    run.figure("outer-cost", figure)


def show(config: Solve, run: StudyRun, result: dict[str, Any]) -> None:
    """The result as a table; what there is not is left out."""
    costs, best = result["outer_costs"], result["best_step"]
    stopped = f"{best} of {len(costs) - 1}" if result["metric"] is not None else None
    rows = {
        "outer cost before": costs[0],
        "outer cost after": costs[best],
        "best outer step": stopped,
        "largest difference of clients' hypers": result["hyper_spread"],
        "norm of the hypergradient": result["hypergradient_norm"],
        "its error against the closed form": result["hypergradient_error"],
        "rounds": result["rounds"],
        "numbers sent per client": result["floats_per_client"],
    }
    present = [(name, value) for name, value in rows.items() if value is not None]
    run.table(f"{config.problem} on {config.network}", ("quantity", "value"), present)
