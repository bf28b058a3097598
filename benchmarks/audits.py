"""Findings of `hp.audit` on real tables with natural parties: `python benchmarks/audits.py KIND … [--out FILE]`.

Kinds are `effects`, `shuffled`, `flipped`, `plain`, `fit`. HYPERPUSH_DATA names the folder with `multisite/`. Each
finished cell is a JSON line; the same command continues where it ended. `python benchmarks/audits.py table` prints a
summary of the file.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import hyperpush as hp

TABLES = ("heart", "chile", "randhie", "contraception", "exam")
TWO_CLASSES = ("heart", "randhie", "contraception")
LARGE = 0.2  # least share of all records that a site needs to have its labels flipped


def load(name: str) -> hp.tables.Tables:
    path = Path(os.environ["HYPERPUSH_DATA"]) / "multisite" / f"{name}.csv"
    return hp.tables.read(path, label="label", party="party")


def shuffle(tables: hp.tables.Tables, seed: int) -> hp.tables.Tables:
    """Deal the same records to parties of the same sizes at random."""
    order = np.random.default_rng(seed).permutation(sum(tables.counts))
    ends = np.cumsum(tables.counts)[:-1]
    inputs, labels = (np.concatenate(own)[order] for own in (tables.inputs, tables.labels))
    return replace(tables, inputs=tuple(np.split(inputs, ends)), labels=tuple(np.split(labels, ends)))


def flip(tables: hp.tables.Tables, party: int) -> hp.tables.Tables:
    labels = [1 - own if place == party else own for place, own in enumerate(tables.labels)]
    return replace(tables, labels=tuple(labels))


def r_squared(predicted: Any, actual: Any) -> float:
    predicted, actual = np.asarray(predicted), np.asarray(actual)
    return float(1 - np.sum((actual - predicted) ** 2) / np.sum((actual - actual.mean()) ** 2))


def effects(name: str, seed: int) -> dict[str, Any]:
    """Compare effects by one Newton step with exact retraining over random directed links."""
    tables = load(name)
    network = hp.networks.RandomDirected(len(tables.names))
    step, exact = (hp.audit(tables, network, key=seed, l2=0.01, effects=each) for each in ("newton", "retrain"))
    found = {
        rows: r_squared([row.gain for row in getattr(step, rows)], [row.gain for row in getattr(exact, rows)])
        for rows in ("without", "cells")
    }
    both = zip(step.cells, exact.cells, strict=True)
    return {"r2": found, "verdicts_differ": sum(mine.verdict != theirs.verdict for mine, theirs in both)}


def shuffled(name: str, seed: int) -> dict[str, Any]:
    """Count claims if parties are random parts of the same records."""
    found = hp.audit(shuffle(load(name), seed), key=seed, l2=0.01)
    rows = {"cells": found.cells, "without": found.without, "join": found.join}
    claims = {kind: sum(row.verdict != "cannot say" for row in own) for kind, own in rows.items()}
    tests = {kind: len(own) for kind, own in rows.items()}
    return {"claims": claims, "tests": tests, "named": [row.party for row in found.named]}


def flipped(name: str, seed: int) -> dict[str, Any]:
    """Record which parties are named if each large site's labels are flipped in turn, and if none are."""
    tables, named = load(name), {}
    large = [place for place, count in enumerate(tables.counts) if count >= LARGE * sum(tables.counts)]
    for place in [None, *large]:
        given = tables if place is None else flip(tables, place)
        found = hp.audit(given, key=seed, l2=0.01)
        named["" if place is None else tables.names[place]] = [row.party for row in found.named]
    return {"named": named}


def plain(name: str, seed: int) -> dict[str, Any]:
    """Run a whole audit with the default settings."""
    found = hp.audit(load(name), key=seed)
    verdicts = {
        kind: {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("helps", "hurts", "cannot say")}
        for kind, rows in (("join", found.join), ("without", found.without), ("cells", found.cells))
    }
    costs = {"rounds": found.costs.rounds, "bytes": found.costs.bytes, "pooled_bytes": found.pooled_bytes}
    said = {"named": [row.party for row in found.named], "small": list(found.small), "status": str(found.status)}
    return {**costs, **said, "verdicts": verdicts, "warnings": list(found.warnings), "effects": found.about["effects"]}


def fit(name: str, seed: int) -> dict[str, Any]:
    """Compare the held-out score with scikit-learn's on the pooled table, at the same L2 rate."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    tables, draw = load(name), np.random.default_rng(seed)
    held = [draw.random(count) < 0.25 for count in tables.counts]
    model = hp.tables.fit(tables.take([np.nonzero(~each)[0] for each in held]), key=seed)
    rows, labels = np.concatenate(tables.inputs), np.concatenate(tables.labels)
    test = np.concatenate(held)
    mean = np.nanmean(rows[~test], axis=0)
    scaler = StandardScaler().fit(np.where(np.isnan(rows[~test]), mean, rows[~test]))
    scaled = np.asarray(scaler.transform(np.where(np.isnan(rows), mean, rows)))
    oracle = LogisticRegression(C=1 / (np.sum(~test) * model.l2), tol=1e-10, max_iter=10_000)
    oracle.fit(scaled[~test], labels[~test])
    inputs = model.scaling.apply(rows[test])
    scores = inputs @ model.params[:, :-1].T + model.params[:, -1]
    mine = float(np.mean((scores[:, 0] > 0) == labels[test]))
    found = {"accuracy": mine, "scikit_learn": float(oracle.score(scaled[test], labels[test])), "l2": model.l2}
    return {**found, "status": str(model.status)}


KINDS = {"effects": effects, "shuffled": shuffled, "flipped": flipped, "plain": plain, "fit": fit}


def cells(kind: str, seeds: int, only: list[str]) -> Iterator[tuple[str, int]]:
    names = {"flipped": TWO_CLASSES, "fit": ("heart",)}.get(kind, TABLES)
    for name in names:
        if not only or name in only:
            yield from ((name, seed) for seed in range(seeds))


def run(kinds: list[str], out: Path, seeds: int, only: list[str]) -> None:
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["kind"], row["table"], row["seed"]) for row in lines}
    for kind in kinds:
        for name, seed in cells(kind, seeds, only):
            if (kind, name, seed) in done:
                continue
            start, wall = time.process_time(), time.time()
            found = KINDS[kind](name, seed)
            used = {"cpu_seconds": round(time.process_time() - start, 2), "seconds": round(time.time() - wall, 2)}
            with out.open("a") as file:
                file.write(json.dumps({"kind": kind, "table": name, "seed": seed, **found, **used}) + "\n")
            print(kind, name, seed, found, used, flush=True)


def table(out: Path) -> None:
    """Print a summary of the cells by kind and table."""
    groups = defaultdict(list)
    for line in out.read_text().splitlines():
        row = json.loads(line)
        groups[row["kind"], row["table"]].append(row)
    for (kind, name), rows in sorted(groups.items()):
        seconds = sorted(row["cpu_seconds"] for row in rows)
        print(f"{kind} {name}: {len(rows)} seeds, CPU seconds {seconds[0]} to {seconds[-1]};", summary(kind, rows))


def summary(kind: str, rows: list[dict[str, Any]]) -> str:
    if kind == "effects":
        least = {each: min(row["r2"][each] for row in rows) for each in ("without", "cells")}
        return "least R² " + ", ".join(f"{each} {value:.4f}" for each, value in least.items())
    if kind == "shuffled":
        claims = {each: sum(row["claims"][each] for row in rows) for each in ("cells", "without", "join")}
        tests = {each: sum(row["tests"][each] for row in rows) for each in claims}
        named = sum(bool(row["named"]) for row in rows)
        return ", ".join(f"{each} {claims[each]} of {tests[each]} claimed" for each in claims) + f"; named in {named}"
    if kind == "flipped":
        sites = rows[0]["named"]
        right = {site: sum(row["named"][site] == ([site] if site else []) for row in rows) for site in sites}
        return ", ".join(f"{site or 'none flipped'}: {count} of {len(rows)} exact" for site, count in right.items())
    if kind == "fit":
        return ", ".join(f"{row['accuracy']:.4f} (scikit-learn {row['scikit_learn']:.4f})" for row in rows)
    return f"{rows[0]['rounds']} rounds, {rows[0]['bytes']} bytes, {rows[0]['verdicts']}, {rows[0]['status']}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=[*KINDS, "table"])
    parser.add_argument("--out", type=Path, default=Path("audits.jsonl"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    if given.kinds == ["table"]:
        table(given.out)
    else:
        run(given.kinds, given.out, given.seeds, given.only)
