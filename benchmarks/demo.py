"""The demo over seeds, with and without planted labels: named parties and records, and learned weights with controls.

    python benchmarks/demo.py --seeds 10 --out docs/results/data/demo.jsonl

Finished seeds are lines of the file; the same command continues.
"""

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

import hyperpush as hp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
demo: Any = import_module("hospitals")


def measure(seed: int, plant: bool) -> dict:
    """Run one seed: the audit's findings and the test accuracy of every row and control."""
    train, checked, test, wrong = demo.deal(seed, plant)
    audit = hp.audit(hp.tables.read(train, label="benign"), demo.NETWORK, key=seed, l2=demo.L2, records=True)
    named = [each.party for each in audit.named]
    worst = [each.line for each in audit.records if each.party == "B"][: demo.PLANTED]
    found = {"seed": seed, "planted": plant, "named": named, "converged": audit.status.converged}
    found |= {"among_worst": int(np.isin(worst, wrong).sum()), "rounds": audit.costs.rounds}
    return found | (compare(train, checked, test, wrong, named, worst, seed) if plant else {})


def compare(train: dict, checked: dict, test: dict, wrong: np.ndarray, named: list, worst: list, seed: int) -> dict:
    """Return test accuracy by row; three controls get the checked records, as learned weights do."""
    task, predict = demo.pose(train, checked, seed)
    singles = [([name], ()) for name in train]
    others = [name for name in named if name != "B"]
    removals = [((), ()), *singles, (named, ()), (others, worst), (["D"], wrong)]
    params = np.asarray(demo.train_without(task, removals, seed).params)[:, 0]
    losses = [checked_loss(task, own) for own in params[: 1 + len(train)]]
    worse = [name for name, loss in zip(train, losses[1:], strict=True) if loss < losses[0]]
    filtered = contradicted(train, checked)
    dropped = np.asarray(demo.train_without(task, [(worse, ()), (filtered, ())], seed).params)[:, 0]
    learned = demo.learn_weights(task, seed)
    models = {"together": params[0], "without the named": params[-3], "without D and B's worst records": params[-2]}
    models |= {"if one knew": params[-1], "retraining without each": dropped[0], "trusted-data filter": dropped[1]}
    models |= {"learned weights": np.asarray(learned.params)[0]}
    scores = {name: demo.accuracy(predict(each), test) for name, each in models.items()}
    scores["alone"] = demo.accuracy(demo.fit_alone(train), test)
    weights = (2 * jax.nn.sigmoid(learned.hypers)).tolist()
    about = {"weights": weights, "learned_converged": learned.status.converged}
    return {"accuracy": scores, **about, "dropped_by_retraining": worse, "dropped_by_filter": filtered}


def checked_loss(task: hp.Task, params: np.ndarray) -> float:
    """Return the mean loss of all hospitals' checked records, equally many at each."""
    own = [jax.tree.map(lambda leaf, k=k: leaf[k], task.data.sets["validation"]) for k in range(task.clients)]
    return float(np.mean([task.problem.measure(task.outer, params, 0.0, hp.extend.full_batch(each)) for each in own]))


def contradicted(train: dict, checked: dict) -> list[str]:
    """Return the hospitals most of whose labels contradict a model of the checked records."""
    predict = hp.tables.fit(hp.tables.read(checked, label="benign"), l2=demo.L2).predict
    pairs = {name: demo.split(own) for name, own in train.items()}
    return [name for name, (columns, labels) in pairs.items() if np.mean(predict(columns) == labels) < 0.5]


def summarize(rows: list[dict]) -> str:
    """Return the tables of the results page, from the lines of the file."""
    planted = [row for row in rows if row["planted"]]
    plain = [row for row in rows if not row["planted"]]
    unnamed = [row for row in planted if "B" not in row["named"]]
    said = [
        f"planted, {len(planted)} seeds: D named in {sum('D' in row['named'] for row in planted)}, "
        f"B in {len(planted) - len(unnamed)}, A, C or E in {sum(bool({*row['named']} & {*'ACE'}) for row in planted)}",
        f"nothing planted, {len(plain)} seeds: none named in {sum(not row['named'] for row in plain)}",
        "planted among B's eight worst: "
        + ", ".join(str(row["among_worst"]) for row in planted)
        + f" (mean {np.mean([row['among_worst'] for row in planted]):.1f})",
        "",
        "| model | test accuracy, % | learned weights − it | ahead in |",
        "|---|---|---|---|",
    ]
    learned = np.array([row["accuracy"]["learned weights"] for row in planted])
    for name in planted[0]["accuracy"] if planted else ():
        own = np.array([row["accuracy"][name] for row in planted])
        gap = learned - own
        error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else np.nan
        said.append(
            f"| {name} | {own.mean():.1f} | {gap.mean():+.1f} ± {error:.1f} | {np.sum(gap > 0)} of {len(gap)} |"
        )
    return "\n".join(said)


def main() -> None:
    """Measure the seeds that the file lacks, one line each; print the tables of all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/results/data/demo.jsonl"))
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    done = {(row["seed"], row["planted"]) for row in map(json.loads, lines)}
    for seed, plant in ((seed, plant) for plant in (True, False) for seed in range(given.seeds)):
        if (seed, plant) not in done:
            start = time.process_time()
            row = measure(seed, plant)
            with given.out.open("a") as file:
                file.write(json.dumps({**row, "cpu_seconds": round(time.process_time() - start, 1)}) + "\n")
    print(summarize([json.loads(line) for line in given.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
