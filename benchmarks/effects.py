"""Effects of whole parties on the others: first order and a Newton step against retraining, on tables of many sites.

Finished cells are lines of a JSON file, so that an interrupted run continues. Seconds are CPU seconds of a second call,
without compilation; the first call is timed as well.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from script import Row, main, option, show

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
    """R² of effects on the others against retraining, over random directed links."""

    tables: tuple[str, ...] = option(tuple(LABELS), "tables in HYPERPUSH_DATA/multisite", choices=tuple(LABELS))
    seeds: int = option(3, "splits and networks per table", 1)
    l2: float = option(0.01, "L2 rate of the heads", 1e-12)
    out: str = option("effects.jsonl", "the file of finished cells")


def run(config: EffectsOfParties) -> dict[str, Any]:
    """Compute the missing cells, and compare all with retraining."""
    file, done = Path(config.out), {}
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        cell = json.loads(line)
        done[cell["table"], cell["seed"], cell["l2"], cell["way"]] = cell
    for name in config.tables:
        for seed in range(config.seeds):
            if all((name, seed, config.l2, way) in done for way in WAYS):
                continue
            for cell in cells(name, seed, config.l2):
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(cell) + "\n")
                done[name, seed, config.l2, cell["way"]] = cell
    rows = [row for name in config.tables for row in compare(name, config, done)]
    show("effects of a leaving party on the others, against retraining", COLUMNS, [list(row.values()) for row in rows])
    return {"rows": rows}


def cells(name: str, seed: int, l2: float) -> Iterator[Row]:
    """Yield all ways of one table, one split and one network."""
    tables = read(name)
    network = hp.networks.RandomDirected(len(tables.names), seed=seed)
    task = tables.task(network, key=seed, split=(0.7, 0.3, 0.0), l2=l2)
    trained = hp.train(task, hp.TreeNewton(), network, key=seed)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.params)) // task.clients
    for way in WAYS:
        (first, _), (again, found) = (timed(trained.task, network, seed, way) for _ in range(2))
        assert found.parties is not None
        yield {
            "table": name, "seed": seed, "l2": l2, "way": way, "params": size,
            "solved": trained.status.converged, "status": str(found.parties.status), "warnings": len(found.warnings),
            "by_site": found.by_site.tolist(), "rounds": found.costs.rounds, "floats": found.costs.floats,
            "seconds": again, "first_seconds": first,
        }  # fmt: skip


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


def compare(name: str, config: EffectsOfParties, done: dict[Any, Row]) -> Iterator[Row]:
    """Yield a row for each way: means over seeds."""
    for way in WAYS:
        own = [done[name, seed, config.l2, way] for seed in range(config.seeds)]
        true = [done[name, seed, config.l2, "retrain"] for seed in range(config.seeds)]
        pairs = [(np.array(each["by_site"]), np.array(other["by_site"])) for each, other in zip(own, true, strict=True)]
        scored = [judge(*pair) for pair in pairs]
        mean = {key: round(float(np.mean([row[key] for row in scored])), 3) for key in scored[0]}
        costs = {key: float(np.mean([each[key] for each in own])) for key in ("rounds", "floats", "seconds")}
        yield {"table": name, "way": way, "parties": len(pairs[0][0]), "params": own[0]["params"], **mean, **costs}


def judge(found: np.ndarray, true: np.ndarray) -> Row:
    """Return R² of effects on the others, R² of single cells with another site, and the share of right signs."""
    away = ~np.eye(len(true), dtype=bool)
    others, real = (np.sum(each * away, axis=1) for each in (found, true))
    signs = float(np.mean((others < 0) == (real < 0)))
    return {"others": agreement(others, real)["r2"], "sites": agreement(found[away], true[away])["r2"], "signs": signs}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(EffectsOfParties, run)
