"""Five hospitals train one model. One codes its labels the other way round, and eight records of another are wrong.

The audit finds both without seeing a record. Run it with `make demo`; `--seed` deals other records out.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from sklearn.datasets import load_breast_cancer

import hyperpush as hp
from hyperpush.runs.tables import table

SHARES = {"A": 0.25, "B": 0.20, "C": 0.20, "D": 0.25, "E": 0.10}  # of the records
PLANTED = 8  # records of B whose label is wrong
TEST = 0.25  # of a hospital's records; their labels are right
L2, NETWORK = 0.01, hp.networks.Exponential(len(SHARES))


def deal(seed, plant=True):
    """Training records and test records by hospital, and the numbers of B's wrong records."""
    records = load_breast_cancer(as_frame=True)
    draw = np.random.default_rng(seed)
    order, ends = draw.permutation(len(records.data)), np.cumsum(list(SHARES.values()))
    parts = np.split(order, (ends[:-1] * len(order)).round().astype(int))
    frame = records.data.assign(benign=records.target)
    tests = {name: frame.iloc[own[: int(TEST * len(own))]] for name, own in zip(SHARES, parts, strict=True)}
    train = {name: frame.iloc[own[int(TEST * len(own)) :]].copy() for name, own in zip(SHARES, parts, strict=True)}
    wrong = draw.permutation(len(train["B"]))[:PLANTED] if plant else np.zeros(0, int)
    train["B"].iloc[wrong, -1] ^= 1
    if plant:
        train["D"]["benign"] ^= 1
    return train, tests, wrong


def learn_weights(tables, seed):
    """Learn one weight per hospital: hypergradients lower the mean loss on held-out records of all hospitals."""
    task = tables.task(NETWORK, key=seed, l2=L2, split=(0.7, 0.3, 0.0))

    def weighted(params, weight, batch):
        return 2 * jax.nn.sigmoid(weight) * task.inner(params, weight, batch)

    def penalty(params, weight):
        return task.penalty(params, jnp.log(L2))

    start = task.replace(inner=weighted, penalty=penalty).at(hypers=jnp.zeros(len(SHARES)))
    outer = hp.optimizer("adam", learning_rate=0.5)
    method = hp.PDBO(inner=hp.TreeNewton(), hypergradient=hp.TreeCG(), outer=outer, steps=12)
    solution = hp.solve(start, method, NETWORK, key=seed)
    return task, solution


def accuracy(predict, tests):
    """The mean over hospitals of right answers on their test records, in percent."""
    return 100 * np.mean([np.mean(predict(own.drop(columns="benign")) == own["benign"]) for own in tests.values()])


def fitted(train, keep=None):
    """A function that predicts labels, of one model fitted to these hospitals' records without those left out."""
    kept = {name: own.drop(index=own.index[(keep or {}).get(name, [])]) for name, own in train.items()}
    return hp.tables.fit(hp.tables.read(kept, label="benign"), l2=L2).predict
