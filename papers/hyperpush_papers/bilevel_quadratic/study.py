"""Run every method, and measure how far it ends from its own fixed point and from the minimizer."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import hyperpush as hp
from hyperpush.algorithms.base import Algorithm
from hyperpush.base.errors import unknown
from hyperpush.runs.run import StudyRun
from hyperpush.tasks.quadratic import outer_fixed_points
from hyperpush_papers.bilevel_quadratic.config import BilevelQuadratic
from hyperpush_papers.common.figures import draw_errors

power = partial(hp.schedule, "power")


def run(config: BilevelQuadratic, run: StudyRun) -> dict[str, Any]:
    """Solve with every method; return a row and a curve of its distance to the closed forms."""
    known = [(label, label.replace(",", "").split()[0], method) for label, method in algorithms(config)]
    names = {name for _, name, _ in known}
    for name in config.methods:
        if name not in names:
            raise unknown("methods", name, names)
    chosen = [(label, method) for label, name, method in known if name in config.methods or not config.methods]
    network = hp.network(config.network, config.clients, config.seed)
    task = hp.tasks.quadratic(config.clients, config.seed, common=True)
    task = task.at(hypers=jnp.zeros_like(task.hypers))
    points = outer_fixed_points(task.train, task.validation)
    rows, curves = [], []
    with run.progress("methods", len(chosen)) as bar:
        for label, method in chosen:
            found = hp.solve(task, method, network, key=config.seed, certify=False)
            aim, history = method.info.fixed_point, found.history
            rows.append(
                {
                    "method": label,
                    "fixed_point": aim,
                    "distance": float(farthest(found.hypers, points[aim])),
                    "distance_to_global": float(farthest(found.hypers, points["x_G"])),
                    "floats_per_client": found.costs.floats,
                    "rounds": found.costs.rounds,
                }
            )
            curves.append(
                {
                    "method": label,
                    "iterations": history.steps.tolist(),
                    "floats_per_client": history.floats.tolist(),
                    "distance": farthest(history.hypers, points[aim]).tolist(),
                }
            )
            run.record(**rows[-1])
            bar.step()
    title = f"distances relative to the start's, {config.network}"
    run.table(title, list(rows[0]), [list(row.values()) for row in rows])
    for name, by_step in {"constant-steps": False, "by-step": True}.items():
        group = {curve["method"]: curve for curve in curves if ("step" in curve["method"]) == by_step}
        draw_errors(run, name, group, "distance", ("iterations", "floats_per_client"), "distance from its fixed point")
    gaps = {
        name: float(np.linalg.norm(at - points["x_G"]) / np.linalg.norm(points["x_G"])) for name, at in points.items()
    }
    return {"rows": rows, "fixed_points_from_global": gaps, "curves": curves}


def farthest(hypers: Array | np.ndarray, point: Float[np.ndarray, " h"]) -> Float[np.ndarray, "..."]:
    """Return the farthest client's distance from a point, divided by the distance at the start, which is zero."""
    distances = np.linalg.norm(np.asarray(hypers, np.float64) - point, axis=-1).max(-1)
    return np.asarray(distances / np.linalg.norm(point))


def algorithms(config: BilevelQuadratic) -> list[tuple[str, Algorithm]]:
    """Return every bilevel algorithm with a common hyper, with its step sizes."""
    a, many, fall, slow = hp.algorithms, config.iterations, power(0.5, 0.8), power(1.0, 0.7)
    found: list[tuple[str, Algorithm]] = [
        ("INTERACT", a.INTERACT(many, 0.05, 0.2)),
        ("SVRINTERACT", a.SVRINTERACT(many, 0.05, 0.15, period=7)),
        ("SPDB", a.SPDB(many, 0.15, 0.2, penalty=0.8)),
        ("FedBiO", a.FedBiO(many, 0.05, 0.2)),
        ("FedBiO, 5 local steps", a.FedBiO(config.falling, fall, 0.2, local_steps=5)),
        ("FedBiOAcc", a.FedBiOAcc(many, 0.05, 0.2, forget=0.5)),
        ("MDBO", a.MDBO(many, 0.05, 0.1, 0.7, 0.9, 0.8)),
        ("VRDBO", a.VRDBO(many, 0.05, 0.1, 0.7, 0.9, 0.8)),
        ("BSA", a.BSA(many, 0.1, 0.2)),
        ("TTSA", a.TTSA(many, 0.05, 0.2)),
        ("FedNest", a.FedNest(many, 0.05, 0.2, inner_steps=3)),
        ("DSBOJHIP, tracked", a.DSBOJHIP(many, 0.1, 0.15, 0.2, tracked=True)),
        ("MADSBO, tracked", a.MADSBO(many, 0.1, 0.15, 0.2, tracked=True)),
        ("GBDSBO, tracked", a.GBDSBO(many, 0.1, 0.15, tracked=True)),
    ]
    constant = [(f"step {step:g}", max(1, round(config.passes / step)), power(step)) for step in config.steps]
    for label, long, step in (("falling steps", config.falling, fall), *constant):
        found += [
            (f"DSBOJHIP, {label}", a.DSBOJHIP(long, step, step, step, 3, 3)),
            (f"MADSBO, {label}", a.MADSBO(long, step, step, step, 3, 3)),
            (f"GBDSBO, {label}", a.GBDSBO(long, step, step, slow if step is fall else step)),
            (f"LDPDSBO, {label}", a.LDPDSBO(long, step, use="reused")),
        ]
    # reduces the bias, of order γ, to about 1e-3 of that at γ = 0.1
    decay = hp.schedule("milestones", 0.1, at=(60, 600))
    nested: Any = {"steps": config.outer_steps, "restart": False, "pushes": 5}
    shared = {**nested, "inner": hp.SGP(4000, decay), "outer": hp.optimizer("sgd", learning_rate=0.3)}
    alone = {**nested, "inner": hp.LocalSGD(1000, 0.2), "outer": hp.optimizer("sgd", learning_rate=0.05)}
    return [
        *found,
        ("CDBO + HGP", hp.CDBO(hypergradient=hp.HGP(40, 20, 0.4), **shared)),
        ("CDBO + TrackedHGP", hp.CDBO(hypergradient=hp.TrackedHGP(), **shared)),
        ("CDBOLocal", a.CDBOLocal(hypergradient=hp.hypergradients.LocalGradient(), **alone)),
    ]
