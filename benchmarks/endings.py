"""Statuses of all bilevel algorithms on quadratics whose end points are known, after few steps and after many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from script import Row, main, option, show

import hyperpush as hp
from hyperpush.networks import Network
from hyperpush.tasks.quadratic import outer_fixed_points

CLIENTS = 4
RING, SERVER = hp.networks.Ring(CLIENTS), hp.networks.FullyConnected(CLIENTS)


def _nested(kind: Any) -> Callable[[int], Any]:
    outer = hp.optimizer("sgd", learning_rate=0.3)
    return lambda steps: kind(hp.TreeNewton(), hp.TreeCG(), outer, steps=steps)


METHODS: dict[str, tuple[Callable[[int], Any], Network]] = {
    "BSA": (lambda t: hp.algorithms.BSA(t, 0.2, 0.3, inner_steps=3), SERVER),
    "TTSA": (lambda t: hp.algorithms.TTSA(t, 0.2, 0.3), SERVER),
    "FedNest": (lambda t: hp.algorithms.FedNest(t, 0.1, 0.1, inner_steps=3), SERVER),
    "DSBOJHIP": (lambda t: hp.algorithms.DSBOJHIP(t, 0.1, 0.15, 0.2, tracked=True), RING),
    "MADSBO": (lambda t: hp.algorithms.MADSBO(t, 0.1, 0.15, 0.2, tracked=True), RING),
    "GBDSBO": (lambda t: hp.algorithms.GBDSBO(t, 0.1, 0.15, tracked=True), RING),
    "LDPDSBO": (lambda t: hp.algorithms.LDPDSBO(t, hp.schedule("power", 0.5, 0.8), use="reused"), RING),
    "FedBiO": (lambda t: hp.algorithms.FedBiO(t, 0.1, 0.2), SERVER),
    "FedBiOAcc": (lambda t: hp.algorithms.FedBiOAcc(t, 0.1, 0.2, forget=0.5), SERVER),
    "SPDB": (lambda t: hp.algorithms.SPDB(t, 0.15, 0.2, penalty=0.8), RING),
    "INTERACT": (lambda t: hp.algorithms.INTERACT(t, 0.05, 0.15), RING),
    "SVRINTERACT": (lambda t: hp.algorithms.SVRINTERACT(t, 0.05, 0.15, period=10), RING),
    "MDBO": (lambda t: hp.algorithms.MDBO(t, 0.05, 0.1, step_scale=0.7), RING),
    "VRDBO": (lambda t: hp.algorithms.VRDBO(t, 0.05, 0.1, step_scale=0.7), RING),
    "PDBO": (_nested(hp.PDBO), RING),
    "CDBO": (_nested(hp.CDBO), RING),
}


@dataclass(frozen=True)
class Endings:
    """Statuses of all bilevel algorithms on quadratics with known end points."""

    steps: tuple[int, ...] = option((3, 2000), "numbers of steps", 1)
    seed: int = option(0, "decides the quadratics", 0)
    wide: bool = option(True, "compute in float64")


def run(config: Endings) -> Row:
    """Yield one row for each algorithm and number of steps."""
    with jax.enable_x64(config.wide):
        rows = [measure(name, steps, config.seed) for steps in config.steps for name in METHODS]
    show("statuses at the end", list(rows[0]), [list(map(_shown, row.values())) for row in rows])
    return {"rows": rows}


def measure(name: str, steps: int, seed: int) -> Row:
    """Return the status of one run, the true gradient, and the distances to the points x_G, x_L and x_M."""
    make, network = METHODS[name]
    task = hp.tasks.quadratic(CLIENTS, seed=seed, common=name != "PDBO")
    found = hp.solve(task, make(steps), network, key=0, every=steps)
    status, hypers = found.status, np.asarray(found.hypers, np.float64)
    ends = outer_fixed_points(task.train, task.validation)
    away = {point: float(np.linalg.norm(hypers - end, axis=1).max()) for point, end in ends.items()}
    true = gradient(task, hypers, name != "PDBO") / gradient(task, np.asarray(task.hypers), name != "PDBO")
    return {"method": name, "steps": steps, "converged": status.converged, "reason": status.reason,
            "gradient": status.gradient, "stationary": status.stationary, "at": status.stationary_reason,
            "true_gradient": true, **away}  # fmt: skip


def gradient(task: hp.Task, hypers: np.ndarray, agree: bool) -> float:
    """Return the hypergradient's size at the exact inner solution, by NumPy: norm of the mean, or root mean square."""
    first, second = (
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), part) for part in (task.train, task.validation)
    )
    hessian, pull = first["hessian"].mean(0), np.einsum("nhd,nh->nd", first["coupling"], hypers)
    params = np.linalg.solve(hessian, (first["linear"] - pull).mean(0))
    slopes = np.einsum("nij,ni->nj", second["map"], second["map"] @ params - second["target"])
    along = first["coupling"] @ np.linalg.solve(hessian, slopes.mean(0))
    values = hypers - second["hyper_target"] - along
    return float(np.linalg.norm(values.mean(0)) if agree else np.linalg.norm(values))


def _shown(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(Endings, run)
