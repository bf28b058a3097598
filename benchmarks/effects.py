"""Effects of whole parties on the others: first order and a Newton step against retraining, on tables of many sites.

Finished cells stay in a file. Seconds are CPU seconds of a second call, without compilation.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from script import Row, main, option, resume, show

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.influence import Influence, agreement

LABELS: dict[str, Any] = {
    "heart": "classes",
    "exam": "numbers",
    "contraception": "classes",
    "chile": "classes",
    "randhie": "classes",
}
WAYS = ("first order", "newton", "retrain")
FEWEST = 20  # least records of a party that is kept: fewer would leave none for validation
COLUMNS = ("table", "way", "parties", "params", "R² others", "R² sites", "right signs", "rounds", "floats", "CPU s")


@dataclass(frozen=True)
class EffectsOfParties:
    """Options: agreement of predicted effects of parties with retraining, over random directed links."""

    tables: tuple[str, ...] = option(tuple(LABELS), "tables in HYPERPUSH_DATA/multisite", choices=tuple(LABELS))
    seeds: int = option(3, "splits and draws of links per table, which share programs", 1)
    l2: float = option(0.01, "L2 rate of the heads", 1e-12)
    file: str = option("effects.jsonl", "file of finished cells, which are not run again")
    seconds: float = option(600.0, "CPU seconds after which no further cell starts", 0)


def run(config: EffectsOfParties) -> Row:
    """Run the missing cells, and compare all with retraining."""
    cells = [{"table": name, "seed": seed, "l2": config.l2} for name in config.tables for seed in range(config.seeds)]
    rows, left = resume(config.file, cells, measure, config.seconds)
    found = [row for name in config.tables for row in compare([each for each in rows if each["cell"]["table"] == name])]
    show(f"effects of a leaving party on the others, {left} cells left", COLUMNS, [list(row.values()) for row in found])
    return {"rows": found, "left": left}


def measure(cell: Row) -> Row:
    """Return the effects by all methods (`ways`), for one table, one split and one network."""
    tables, seed = read(cell["table"]), cell["seed"]
    network = hp.networks.RandomDirected(len(tables.names))
    task = tables.task(network, key=seed, split=(0.7, 0.3, 0.0), l2=cell["l2"])
    trained = hp.train(task, hp.TreeNewton(), network, key=seed)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.params)) // task.clients
    ways = {way: [timed(trained.task, network, seed, way) for _ in range(2)] for way in WAYS}
    true = ways["retrain"][1][1].by_site
    return {"parties": task.clients, "params": size, "solved": trained.status.converged,
            "ways": {way: report(calls, true) for way, calls in ways.items()}}  # fmt: skip


def report(calls: list[tuple[float, Influence]], true: np.ndarray) -> Row:
    """Return the agreement of one method with retraining, its costs, and CPU seconds of a first and a second call."""
    (first, _), (again, found) = calls
    assert found.parties is not None
    return {**judge(found.by_site, true), "status": str(found.parties.status), "warnings": len(found.warnings),
            "rounds": found.costs.rounds, "floats": found.costs.floats, "seconds": again,
            "first_seconds": first}  # fmt: skip


def timed(task: hp.Task, network: hp.networks.Network, seed: int, way: Any) -> tuple[float, Influence]:
    """Return CPU seconds of one call, and its result."""
    begun = time.process_time()
    found = hp.influence.scores(task, hp.Automatic(), network, key=seed, parties=way)
    return time.process_time() - begun, found


def read(name: str) -> hp.tables.Tables:
    """Read a table by party, without parties that have few records."""
    import pandas

    folder = os.environ.get("HYPERPUSH_DATA")
    path = Path(folder or "") / "multisite" / f"{name}.csv"
    if not folder or not path.exists():
        raise InvalidInput("HYPERPUSH_DATA", folder, f"a folder with multisite/{name}.csv")
    frame: Any = pandas.read_csv(path)
    kept = frame[frame.groupby("party")["label"].transform("count") >= FEWEST]
    parties = {str(party): own.drop(columns="party") for party, own in kept.groupby("party", sort=False)}
    return hp.tables.read(parties, label="label", kind=LABELS[name])


def compare(rows: list[Row]) -> Iterator[Row]:
    """Yield a row for each method on one table: means over seeds."""
    for way in WAYS if rows else ():
        own = [row["ways"][way] for row in rows]
        scores = {key: round(float(np.mean([each[key] for each in own])), 3) for key in ("others", "sites", "signs")}
        costs = {key: float(np.mean([each[key] for each in own])) for key in ("rounds", "floats", "seconds")}
        yield {"table": rows[0]["cell"]["table"], "way": way, **{key: rows[0][key] for key in ("parties", "params")},
               **scores, **costs}  # fmt: skip


def judge(found: np.ndarray, true: np.ndarray) -> Row:
    """Return R² of summed effects on the others, R² of effects on single other sites, and the share of right signs."""
    away = ~np.eye(len(true), dtype=bool)
    others, real = (np.sum(each * away, axis=1) for each in (found, true))
    signs = float(np.mean((others < 0) == (real < 0)))
    return {"others": agreement(others, real)["r2"], "sites": agreement(found[away], true[away])["r2"], "signs": signs}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(EffectsOfParties, run)
