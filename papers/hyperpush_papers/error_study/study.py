"""Solve the inner problem once, estimate its hypergradient many times, compare with the closed form."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

import hyperpush as hp
from hyperpush.base.figures import Curve, error_curves, panels
from hyperpush.hypergradients import oracles
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush_papers.common.estimates import current_value
from hyperpush_papers.error_study.config import ErrorStudy

# shares of the steps at which the paper lowers the step size
MILESTONES = (0.6, 0.8, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.998, 0.9998)
ERROR = "error of the hypergradient"


def run(config: ErrorStudy, run: StudyRun) -> dict[str, Any]:
    """Measure errors by order, pushes and batch size; then two trends, by batch size and by error of the params."""
    network = hp.network(config.network, config.clients, config.seed, **config.network_options)
    task = hp.tasks.logistic(config.clients, config.seed, examples=config.examples, rate=config.hyper)
    training_key, estimation_key = jax.random.split(jax.random.key(config.seed))
    params_after = partial(train, config, task, network, training_key)
    errors = partial(estimate_errors, config, task, network, estimation_key)
    at = params_after(config.inner_steps)
    solution = oracles.minimize(task.problem, task.params, task.hypers, task.data)
    truth_here, truth = (oracles.dense(task.problem, x, task.hypers, task.data) for x in (at, solution))
    wanted = sorted({m for m in (10, 50, 100, 200, 500, 1000) if m < config.order} | {config.order})
    rows, figure, axes = [], *panels(len(config.batches))
    with run.progress("estimates", len(config.batches) * len(config.pushes)) as bar:
        for axis, batch in zip(axes, config.batches, strict=True):
            curves = []
            for pushes in config.pushes:
                mean, spread = mean_and_spread(errors(at, pushes, batch, truth_here))
                curves.append(Curve(f"S = {pushes}", np.arange(1, config.order + 1), mean, spread))
                case = {"method": "HGP", "pushes": pushes, "batch": batch}
                run.record(**case, error_mean=mean.tolist(), error_std=spread.tolist())
                rows += [
                    {**case, "order": m, "error_mean": float(mean[m - 1]), "error_std": float(spread[m - 1])}
                    for m in wanted
                ]
                bar.step()
            size = "full batch" if batch >= config.examples else f"batches of {batch}"
            error_curves(axis, curves, x_label="order M", y_label=ERROR, title=size)
    run.figure("errors", figure)
    run.save_models("inner-solution", at)
    by_batch, by_steps = [], []
    with run.progress("trends", len(config.trend_batches) + len(config.trend_inner_steps)) as bar:
        for batch in config.trend_batches:
            by_batch.append({"batch": batch, **last(errors(at, config.trend_pushes, batch, truth_here))})
            bar.step()
        for steps in config.trend_inner_steps:
            inexact = params_after(steps)
            found = last(errors(inexact, config.trend_pushes, config.examples, truth))
            by_steps.append({"inner_steps": steps, **found, "distance": float(np.linalg.norm(inexact - solution))})
            bar.step()
    draw_trends(config, run, by_batch, by_steps)
    result = {
        "true_norm": float(np.linalg.norm(truth)),
        "errors": rows,
        "by_batch": by_batch,
        "by_inner_steps": by_steps,
        # Errors are relative to the closed form at the params that training reached. This is the distance of that
        # closed form to the one at the exact inner solution.
        "inner_distance": float(np.linalg.norm(at - solution)),
        "inner_effect": float(np.linalg.norm(truth_here - truth)),
    }
    show(config, run, result, wanted)
    return result


def train(config: ErrorStudy, task: hp.Task, network: Network, key: Array, steps: int) -> Float[Array, "n d"]:
    """Return the task after `steps` of SGP, with the paper's milestones scaled to this number of steps."""
    step_size = hp.schedule("milestones", config.inner_rate, at=sorted({round(at * steps) for at in MILESTONES}))
    return hp.train(task, hp.SGP(steps, step_size), network, key=key).params


def estimate_errors(
    config: ErrorStudy,
    task: hp.Task,
    network: Network,
    key: Array,
    at: Float[Array, "n d"],
    pushes: int,
    batch: int,
    truth: Float[np.ndarray, "n d"],
) -> Float[np.ndarray, "runs order"]:
    """Return the ℓ2 errors of the estimates of all runs, by order."""
    method = hp.HGP(config.order, pushes, config.step, None if batch >= config.examples else batch)
    record = {"HGP": current_value}
    found = hp.hypergradient(task.at(params=at), method, network, key=key, seeds=config.runs, record=record)
    return np.sqrt(np.sum((np.asarray(found.history["HGP"], np.float64) - truth) ** 2, axis=(2, 3)))


def mean_and_spread(errors: Float[np.ndarray, "runs order"]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and spread of errors over runs, by order."""
    return errors.mean(0), errors.std(0, ddof=1)


def last(errors: Float[np.ndarray, "runs order"]) -> dict[str, float]:
    """Return mean and spread of errors at the largest order."""
    mean, spread = mean_and_spread(errors)
    return {"error_mean": float(mean[-1]), "error_std": float(spread[-1])}


def draw_trends(config: ErrorStudy, run: StudyRun, by_batch: list[dict], by_steps: list[dict]) -> None:
    """Draw errors by batch size, and by the distance of the params to the inner solution."""
    figure, axes = panels(2)
    trends = (by_batch, "batch", "batch size"), (by_steps, "distance", "distance of the inner solution")
    for axis, (points, x, label) in zip(axes, trends, strict=True):
        if points:
            points = sorted(points, key=lambda point: point[x])
            columns = ([point[name] for point in points] for name in (x, "error_mean", "error_std"))
            curve = Curve(f"S = {config.trend_pushes}", *columns)
            error_curves(axis, [curve], x_label=label, y_label=ERROR, log_x=True)
    axes[0].set_xticks(config.trend_batches, labels=[str(batch) for batch in config.trend_batches])
    axes[0].minorticks_off()
    run.figure("trends", figure)


def show(config: ErrorStudy, run: StudyRun, result: dict[str, Any], orders: Sequence[int]) -> None:
    """Show a table of errors by order, with a row for each batch size and number of pushes."""
    cells = {(row["batch"], row["pushes"], row["order"]): f"{row['error_mean']:.1e}" for row in result["errors"]}
    run.table(
        f"error at the inner solution reached, mean of {config.runs} runs; true norm {result['true_norm']:.4g}",
        ("batch", "pushes", *(f"order {m}" for m in orders)),
        [(batch, s, *(cells[batch, s, m] for m in orders)) for batch in config.batches for s in config.pushes],
    )
