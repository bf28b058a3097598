"""Errors after training that statuses detect, and costs of solvers without settings. Finished cells are kept."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from script import Row, main, option, resume, show
from solved_problems import (
    Drawn,
    away,
    descend,
    drawn,
    hypergradients,
    of_digits,
    of_readme,
    relative,
    solve,
)

import hyperpush as hp

# Each network has two numbers of clients for the random problems.
NETWORKS = {
    "random-directed": (lambda n: hp.networks.RandomDirected(n), 8, 50),
    "ring": (lambda n: hp.networks.Ring(n), 3, 20),
    "directed-ring": (lambda n: hp.networks.DirectedRing(n), 8, 50),
    "one-peer-exponential": (lambda n: hp.networks.OnePeerExponential(n), 3, 20),
    "complete": (lambda n: hp.networks.FullyConnected(n), 8, 50),
    "star": (lambda n: hp.networks.Star(n), 3, 20),
    "static-undirected": (lambda n: hp.networks.StaticUndirected(n, 0.5, seed=1), 8, 50),
    "k-out": (lambda n: hp.networks.KOut(n, k=2), 3, 20),
}
FOUR = tuple(NETWORKS)[:4]
SOLVERS = {
    "SGP": lambda rate: hp.SGP(600, rate),
    "falling SGP": lambda rate: hp.SGP(600, hp.schedule("power", 4 * rate, 0.6)),
    "DSGD": lambda rate: hp.DSGD(600, rate),
    "falling DSGD": lambda rate: hp.DSGD(600, hp.schedule("power", 4 * rate, 0.6)),
    "LocalSGD": lambda rate: hp.LocalSGD(600, rate),
    "TreeNewton": lambda rate: hp.TreeNewton(),
    "TrackedSGP": lambda rate: hp.TrackedSGP(),
}
RATES = (0.3, 0.1, 0.03, 0.01)
LIMITS = (1e-3, 1e-8)
WRONG = 0.05  # relative error of a hypergradient above which it should be marked
OUTER = 200  # outer steps after which problems are solved once more
VARIANTS = ("plain", "zero", "outer")
CONVEX = ("regression", "logistic", "softmax")


@dataclass(frozen=True)
class Solved:
    """Errors of training that statuses detect, and costs of solvers without settings."""

    part: str = option("readme", "cells to run", None, ("readme", "random", "right", "cost", "runs", "nested"))
    file: str = option("solved.jsonl", "file of finished cells, which are not run again")
    seconds: float = option(600.0, "CPU seconds after which no further cell starts", 0)
    problems: int = option(
        200, "random convex problems; a quarter as many of each variant, and a quarter as many small networks", 1
    )


def run(config: Solved) -> Row:
    """Run the missing cells of a part, as far as time allows."""
    rows, left = resume(config.file, PARTS[config.part](config), measure, config.seconds)
    title = f"{config.part}: {len(rows)} cells, {left} left"
    if MEASURES[config.part] is judge:
        show(title, *verdicts(rows))
    else:
        names = list(dict.fromkeys(name for row in rows for name in row if name != "cell"))
        shown = [[" ".join(map(str, row["cell"].values())), *(_short(row.get(name)) for name in names)] for row in rows]
        show(title, ["cell", *names], shown)
    return {"cells": rows, "left": left}


def measure(cell: Row) -> Row:
    """Measure one cell."""
    with jax.enable_x64(cell.get("wide", False)):
        return MEASURES[cell["part"]](cell)


# ------------------------------------------------------------------ statuses


def readme_cells(config: Solved) -> Iterator[Row]:
    """Yield the README's first task on four networks, with similar and with different clients."""
    for solver, network, unlike in product(
        ("SGP", "DSGD", "LocalSGD", "TreeNewton", "TrackedSGP"), FOUR, (False, True)
    ):
        if solver != "DSGD" or network == "ring":
            yield {"part": "readme", "solver": solver, "network": network, "unlike": unlike}


def random_cells(config: Solved) -> Iterator[Row]:
    """Yield random problems, one network and number of clients after the other, as these decide the programs."""
    solvers = ("SGP", "falling SGP", "LocalSGD", "TreeNewton", "TrackedSGP")
    linear = [(name, clients, size) for name, (_, *counts) in NETWORKS.items()
              for clients, size in zip(counts, (6, 12), strict=True)]  # fmt: skip
    small = [(name, counts[0], 2 + place % 2) for place, (name, (_, *counts)) in enumerate(NETWORKS.items())]
    groups = ((linear, CONVEX, config.problems), (small, ("mlp",), config.problems // 4))
    # Each network before any again, so that an unfinished run has all of them.
    for turn, (programs, families, problems) in ((0, groups[0]), (None, groups[1]), (1, groups[0])):
        for place, (network, clients, size) in enumerate(programs):
            if turn is not None and (place // 2 + place) % 2 != turn:
                continue
            for variant in VARIANTS:
                count = problems if variant == "plain" else problems // 4
                for seed, solver in product(range(place, count, len(programs)), solvers):
                    family = families[seed // len(programs) % len(families)]
                    yield {"part": "random", "network": network, "clients": clients, "size": size, "family": family,
                           "variant": variant, "seed": seed, "solver": solver}  # fmt: skip


def right_cells(config: Solved) -> Iterator[Row]:
    """Yield problems that constant and falling steps solve: clients alike, complete networks."""
    for clients, seed in product(NETWORKS["complete"][1:], range(config.problems // 4)):
        for solver in ("SGP", "falling SGP", "DSGD", "falling DSGD"):
            yield {"part": "right", "network": "complete", "clients": clients, "size": 6 if clients == 8 else 12,
                   "family": CONVEX[seed % 3], "variant": "like", "seed": seed, "solver": solver}  # fmt: skip


def judge(cell: Row) -> Row:
    """Compare the hypergradient after training with the dense one, and the status with the error."""
    made = _problem(cell)
    network = NETWORKS[cell["network"]][0](len(made.hypers))
    try:
        trained = hp.train(made.task, SOLVERS[cell["solver"]](_rate(made)), network, key=0)
    except hp.Diverged:
        return {"training": False, "training_reason": "diverged", "converged": False, "reason": "diverged"}
    found = hp.hypergradient(trained.task, hp.Automatic(), network, key=0)
    x = solve(made, np.mean(np.asarray(trained.params, float), axis=0))
    error, status = relative(found.value, hypergradients(made, x)), found.status
    return {"error": error, "params": away(trained.params, x), "training": trained.status.converged,
            "training_reason": trained.status.reason, "converged": status.converged, "reason": status.reason,
            "residual": status.residual, "disagreement": status.disagreement, "moved": status.moved,
            "rounds": trained.costs.rounds}  # fmt: skip


def _problem(cell: Row) -> Drawn:
    if cell["part"] == "readme":
        return of_readme(unlike=cell["unlike"])
    return _random(*(cell[name] for name in ("family", "clients", "size", "seed", "variant")))


@lru_cache(1)  # the solvers of a problem follow each other, and its outer steps take longer than they do
def _random(family: str, clients: int, size: int, seed: int, variant: str) -> Drawn:
    made = drawn(family, clients, size, seed, variant == "zero", variant == "like")
    return descend(made, OUTER)[0] if variant == "outer" else made


VERDICTS = ("results", "wrong", "silent", "up to 2 %", "marked", "2 to 3 %", "marked", "3 to 5 %", "marked", "diverged")


def verdicts(rows: Iterable[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return a table of results by their true error, and of those that are marked, by kind, variant and solver."""
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        cell = {"family": "", "variant": "", **row["cell"]}
        kind = ("convex" if cell["family"] in CONVEX else cell["family"], cell["variant"], cell["solver"])
        counts.setdefault(kind, Counter())[_verdict(row)] += 1
    table = []
    for kind, found in counts.items():
        wrong = found["wrong, marked"] + found["wrong"]
        bins = [count for name in ("2", "3", "5") for count in (found[name] + found[f"{name}, marked"],
                                                               found[f"{name}, marked"])]  # fmt: skip
        table.append([" ".join(kind), found.total(), wrong, found["wrong"], *bins, found["diverged"]])
    return ["", *VERDICTS], table


def _verdict(row: Row) -> str:
    if "error" not in row:
        return "diverged"
    error = row["error"]
    name = "2" if error <= 0.02 else "3" if error <= 0.03 else "5" if error <= WRONG else "wrong"
    return f"{name}, marked" if row["converged"] is False else name


def _rate(made: Drawn) -> float:
    """Return a common constant step: 0.1, or less where that would diverge."""
    curvatures = [2 * np.mean(np.sum(np.square(rows), -1)) for rows in made.train[0]]  # of a class, mostly
    return float(min(0.1, 0.5 / max(curvatures)))


# --------------------------------------------------------------------- costs


def cost_cells(config: Solved) -> Iterator[Row]:
    """Yield solvers without settings, and SGP with the best step of a grid."""
    for network, loss, solver, unlike in product(FOUR, (0.0, 0.2), ("TreeNewton", "TrackedSGP", "SGP"), (False, True)):
        yield {"part": "cost", "network": network, "unlike": unlike, "loss": loss, "solver": solver, "wide": True}


def cost(cell: Row) -> Row:
    """Count rounds, floats, gradients and products until params are close to the solution."""
    made, clients = of_readme(unlike=cell["unlike"]), 20
    network, x = NETWORKS[cell["network"]][0](clients), solve(made, np.zeros(5))
    engine = hp.Simulate(faults=hp.Faults(loss=cell["loss"]) if cell["loss"] else None)
    if cell["solver"] == "SGP":
        return _best_of_grid(made, network, engine, x)
    return {f"to {limit:g}": _until(cell, made, network, engine, x, limit) for limit in LIMITS}


def _until(cell: Row, made: Drawn, network: Any, engine: Any, x: np.ndarray, limit: float) -> Row:
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


def runs_cells(config: Solved) -> Iterator[Row]:
    """Yield a cell with several runs at once."""
    yield {"part": "runs", "runs": 25, "network": "random-directed", "wide": True}


def several(cell: Row) -> Row:
    """Solve K problems with different hypers at once, and one after the other."""
    made, network = of_readme(), NETWORKS[cell["network"]][0](20)
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


def nested_cells(config: Solved) -> Iterator[Row]:
    """Yield cells of PDBO without a setting, with few and many outer steps."""
    for steps, family in product((20, 200), ("readme", "logistic", "softmax", "mlp", "digits")):
        if (family, steps) != ("digits", 200):
            yield {"part": "nested", "family": family, "steps": steps}


def nested(cell: Row) -> Row:
    """Compare the end point with that of the same outer steps with dense hypergradients in float64."""
    named = {"readme": of_readme, "digits": of_digits}
    family, size = cell["family"], 3 if cell["family"] == "mlp" else 12
    made = named[family]() if family in named else drawn(family, 8, size, seed=3)
    network = NETWORKS["random-directed"][0](len(made.hypers))
    found = hp.solve(made.task, hp.PDBO(steps=cell["steps"]), network, key=0)
    end, x = descend(made, cell["steps"])
    status = found.status
    return {"hypers_off": float(np.max(np.abs(np.asarray(found.hypers) - end.hypers))),
            "params": away(found.params, x), "converged": status.converged, "reason": status.reason,
            "residual": status.residual, "moved": status.moved, "failed": status.failed,
            "rounds": found.costs.rounds, "chosen": status.chosen}  # fmt: skip


PARTS = {"readme": readme_cells, "random": random_cells, "right": right_cells, "cost": cost_cells, "runs": runs_cells,
         "nested": nested_cells}  # fmt: skip
MEASURES = {"readme": judge, "random": judge, "right": judge, "cost": cost, "runs": several, "nested": nested}


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(each)}" for name, each in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(Solved, run)
