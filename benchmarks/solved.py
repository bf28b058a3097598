"""Trained problems: errors that statuses detect, and costs of solvers without settings. Finished cells are kept."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from script import Row, main, option, show
from solved_problems import Drawn, away, drawn, hypergradients, of_readme, relative, solve

import hyperpush as hp

Cell = dict[str, Any]
NETWORKS = {
    "random-directed": lambda n: hp.networks.RandomDirected(n),
    "ring": lambda n: hp.networks.Ring(n),
    "directed-ring": lambda n: hp.networks.DirectedRing(n),
    "one-peer-exponential": lambda n: hp.networks.OnePeerExponential(n),
    "complete": lambda n: hp.networks.FullyConnected(n),
    "star": lambda n: hp.networks.Star(n),
    "static-undirected": lambda n: hp.networks.StaticUndirected(n, 0.5, seed=1),
    "k-out": lambda n: hp.networks.KOut(n, k=2),
}
FOUR = tuple(NETWORKS)[:4]
FALLING = hp.schedule("power", 0.5, 0.6)
SOLVERS = {
    "SGP": lambda rate: hp.SGP(600, rate),
    "DSGD": lambda rate: hp.DSGD(600, rate),
    "LocalSGD": lambda rate: hp.LocalSGD(600, rate),
    "TreeNewton": lambda rate: hp.TreeNewton(),
    "TrackedSGP": lambda rate: hp.TrackedSGP(),
}
RATES = (0.3, 0.1, 0.03, 0.01)
LIMITS = (1e-3, 1e-8)


@dataclass(frozen=True)
class Solved:
    """Errors of training that statuses detect, and costs of solvers without settings."""

    part: str = option("readme", "cells to run", None, ("readme", "random", "cost", "runs", "nested"))
    file: str = option("solved.jsonl", "file of finished cells, which are not run again")
    seconds: float = option(600.0, "CPU seconds after which no further cell starts", 0)
    problems: int = option(200, "random problems", 1)


def run(config: Solved) -> Row:
    """Run the missing cells of a part, as far as time allows."""
    path = Path(config.file)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = {_key(cell["cell"]) for cell in done}
    started, left = time.process_time(), 0
    for cell in PARTS[config.part](config):
        if _key(cell) in keys:
            continue
        if time.process_time() - started > config.seconds:
            left += 1
            continue
        before = time.process_time()
        found = measure(cell)
        row = {"cell": cell, **found, "cpu_seconds": round(time.process_time() - before, 1)}
        with path.open("a") as out:
            out.write(json.dumps(row) + "\n")
        done.append(row)
    rows = [row for row in done if row["cell"]["part"] == config.part]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row if name != "cell"))
        shown = [[" ".join(map(str, row["cell"].values())), *(_short(row.get(name)) for name in names)] for row in rows]
        show(f"{config.part}: {len(rows)} cells, {left} left", ["cell", *names], shown)
    return {"cells": rows, "left": left}


def measure(cell: Cell) -> Row:
    """Measure one cell."""
    with jax.enable_x64(cell.get("wide", False)):
        return MEASURES[cell["part"]](cell)


# ------------------------------------------------------------------ statuses


def readme_cells(config: Solved) -> Iterator[Cell]:
    """Yield the README's first task on four networks, with similar and with different clients."""
    for solver in SOLVERS:
        for network in FOUR:
            for unlike in (False, True):
                if not (solver == "DSGD" and network in ("random-directed", "directed-ring", "one-peer-exponential")):
                    yield {"part": "readme", "solver": solver, "network": network, "unlike": unlike}


def random_cells(config: Solved) -> Iterator[Cell]:
    """Yield random problems; they share programs, as the family sets the size and the network the number of clients."""
    sizes = dict(zip(NETWORKS, (8, 20, 8, 8, 50, 3, 20, 20), strict=True))
    families = ("regression", "logistic", "softmax", "regression", "logistic", "softmax", "mlp")
    for seed in range(config.problems):
        network = tuple(NETWORKS)[seed // len(families) % len(NETWORKS)]
        family, at_zero = families[seed % len(families)], seed % 10 == 9
        for solver in ("SGP", "falling SGP", "TreeNewton", "TrackedSGP"):
            yield {"part": "random", "family": family, "network": network, "clients": sizes[network], "seed": seed,
                   "at_zero": at_zero, "solver": solver}  # fmt: skip


def judge(cell: Cell) -> Row:
    """Compare the hypergradient after training with the dense one, and the status with the error."""
    made = _problem(cell)
    clients = len(made.hypers)
    network = NETWORKS[cell["network"]](clients)
    solver = hp.SGP(600, FALLING) if cell["solver"] == "falling SGP" else SOLVERS[cell["solver"]](_rate(made))
    trained = hp.train(made.task, solver, network, key=0)
    found = hp.hypergradient(trained.task, hp.Automatic(), network, key=0)
    x = solve(made, np.mean(np.asarray(trained.params, float), axis=0))
    error, status = relative(found.value, hypergradients(made, x)), found.status
    wrong, silent = error > 0.05, status.converged is not False
    return {"error": error, "params": away(trained.params, x), "training": trained.status.converged,
            "training_reason": trained.status.reason, "converged": status.converged, "reason": status.reason,
            "residual": status.residual, "disagreement": status.disagreement, "moved": status.moved,
            "wrong_silent": bool(wrong and silent), "right_flagged": bool(not wrong and not silent),
            "rounds": trained.costs.rounds}  # fmt: skip


def _problem(cell: Cell) -> Drawn:
    if cell["part"] == "readme":
        return of_readme(unlike=cell["unlike"])
    return drawn(cell["family"], cell["clients"], cell["seed"], cell["at_zero"])


def _rate(made: Drawn) -> float:
    """Return a common constant step: 0.1, or less where that would diverge."""
    curvatures = [2 * np.mean(np.sum(np.square(rows), -1)) for rows in made.train[0]]
    return float(min(0.1, 0.5 / max(curvatures)))


# --------------------------------------------------------------------- costs


def cost_cells(config: Solved) -> Iterator[Cell]:
    """Yield solvers without settings, and SGP with the best step of a grid."""
    for network in FOUR:
        for unlike in (False, True):
            for loss in (0.0, 0.2):
                for solver in ("TreeNewton", "TrackedSGP", "SGP"):
                    yield {"part": "cost", "network": network, "unlike": unlike, "loss": loss, "solver": solver,
                           "wide": True}  # fmt: skip


def cost(cell: Cell) -> Row:
    """Count rounds, floats, gradients and products until params are close to the solution."""
    made, clients = of_readme(unlike=cell["unlike"]), 20
    network, x = NETWORKS[cell["network"]](clients), solve(made, np.zeros(5))
    engine = hp.Simulate(faults=hp.Faults(loss=cell["loss"]) if cell["loss"] else None)
    if cell["solver"] == "SGP":
        return _best_of_grid(made, network, engine, x)
    return {f"to {limit:g}": _until(cell, made, network, engine, x, limit) for limit in LIMITS}


def _until(cell: Cell, made: Drawn, network: Any, engine: Any, x: np.ndarray, limit: float) -> Row:
    """Return the cost to a limit: by the solver's tolerance, or by the number of rounds where clients cannot vote."""
    if cell["solver"] == "TreeNewton":
        methods = [hp.TreeNewton(tolerance=limit)]
    elif not cell["loss"]:
        methods = [hp.TrackedSGP(tolerance=limit)]
    else:
        methods = [hp.TrackedSGP(rounds, tolerance=limit) for rounds in (100, 200, 400, 800, 1600, 3200, 5000)]
    around = {"key": 0, "engine": engine, "certify": False}
    found = hp.train(made.task, methods[0], network, **around)
    for method in methods[1:]:
        if away(found.params, x) <= limit:
            break
        found = hp.train(made.task, method, network, **around)
    costs, distance = found.costs, away(found.params, x)
    return {"rounds": costs.rounds, "floats": costs.floats, "accesses": dict(costs.accesses), "params": distance,
            "reason": found.status.reason, "converged": found.status.converged,
            "error": found.status.error}  # fmt: skip


def _best_of_grid(made: Drawn, network: Any, engine: Any, x: np.ndarray) -> Row:
    """Return the fewest of 5,000 rounds of SGP after which params stay close, and the closest end of any step size."""
    goal, rows, closest = jnp.asarray(x), {}, np.inf
    metrics = {"off": lambda params, hyper, batch: jnp.sum((params - goal) ** 2)}
    for rate in RATES:
        try:
            found = hp.train(made.task, hp.SGP(5000, rate), network, key=0, engine=engine, certify=False,
                             metrics=metrics, every=10)  # fmt: skip
        except hp.Diverged:
            continue
        off = np.sqrt(np.asarray(found.history.metrics["off"]).mean(1)) / np.linalg.norm(x)
        closest = min(closest, float(off[-1]))
        for limit in LIMITS:
            above = np.flatnonzero(~(off <= limit))
            if len(above) == 0 or above[-1] < len(off) - 1:
                rounds = 10 * (int(above[-1]) + 1 if len(above) else 0)
                rows.setdefault(f"to {limit:g}", []).append({"rounds": rounds, "floats": rounds * 6, "rate": rate})
    best = {name: min(each, key=lambda row: row["rounds"]) for name, each in rows.items()}
    return {"closest": closest, **best}


def runs_cells(config: Solved) -> Iterator[Cell]:
    """Yield a cell with several runs at once."""
    yield {"part": "runs", "runs": 25, "network": "random-directed", "wide": True}


def several(cell: Cell) -> Row:
    """Solve K problems with different hypers at once, and one after the other."""
    made, network = of_readme(), NETWORKS[cell["network"]](20)
    random = np.random.default_rng(0)
    hypers = [jnp.asarray(random.normal(size=20)) for _ in range(cell["runs"])]
    together = hp.train(made.task, hp.TreeNewton(), network, key=0, runs=hypers)
    alone = [hp.train(made.task.at(hypers=each), hp.TreeNewton(), network, key=0, certify=False) for each in hypers]
    apart = max(
        np.linalg.norm(together.params[k] - each.params) / np.linalg.norm(each.params) for k, each in enumerate(alone)
    )
    return {"rounds": together.costs.rounds, "floats": together.costs.floats,
            "rounds_alone": sum(each.costs.rounds for each in alone),
            "floats_alone": sum(each.costs.floats for each in alone), "apart": float(apart),
            "converged": together.status.converged}  # fmt: skip


# -------------------------------------------------------------------- nested


def nested_cells(config: Solved) -> Iterator[Cell]:
    """Yield cells of PDBO without a setting, with few and many outer steps."""
    for family in ("readme", "logistic", "softmax", "mlp"):
        for steps in (20, 200):
            yield {"part": "nested", "family": family, "steps": steps}


def nested(cell: Cell) -> Row:
    """Compare the end point with that of the same outer steps with dense hypergradients in float64."""
    made = of_readme() if cell["family"] == "readme" else drawn(cell["family"], 8, seed=3)
    network, steps = NETWORKS["random-directed"](len(made.hypers)), cell["steps"]
    found = hp.solve(made.task, hp.PDBO(steps=steps), network, key=0)
    hypers, x = made.hypers.copy(), made.params
    first = second = np.zeros_like(hypers)
    for step in range(1, steps + 1):  # Adam with rate 0.1
        x = solve(made, x, hypers)
        slope = hypergradients(made, x, hypers)
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        hypers = hypers - 0.1 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    x = solve(made, x, hypers)
    status = found.status
    return {"hypers_off": float(np.max(np.abs(np.asarray(found.hypers) - hypers))),
            "params": away(found.params, x), "converged": status.converged, "reason": status.reason,
            "residual": status.residual, "moved": status.moved, "failed": status.failed,
            "rounds": found.costs.rounds, "chosen": status.chosen}  # fmt: skip


PARTS = {"readme": readme_cells, "random": random_cells, "cost": cost_cells, "runs": runs_cells, "nested": nested_cells}
MEASURES = {"readme": judge, "random": judge, "cost": cost, "runs": several, "nested": nested}


def _key(cell: Mapping[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(each)}" for name, each in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(Solved, run)
