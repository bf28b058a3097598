"""One of four members lies in all its messages, in nine ways; the results of the honest members are tabulated.

`python -m deploy.liars`, from the folder of the tests, prints the table of the guide on faults.
"""

import sys
import threading
from dataclasses import replace

import jax
import numpy as np
from deploy.digits import accuracy, digits
from engines.peer.parties import together

import hyperpush as hp
from hyperpush.base.processes.starter import free_ports
from hyperpush.engines.transport import wire

NAMES, LIAR = ("alice", "bob", "carol", "dave"), 3
SEED = 0
KINDS = ("constant", "tenfold", "sign", "noise", "stale", "nan", "infinite", "weight", "shape")
encode = wire.encode
once = threading.Lock()


def method(mode):
    inner = hp.SGP(steps=150, step_size=0.3)
    found = hp.HGP(steps=20, pushes=2, step_size=0.3)
    if mode == "asynchronous":
        found = hp.TrackedHGP(steps=20, pushes=2, step_size=0.3, tolerance=None)
    return hp.PDBO(inner=inner, hypergradient=found, outer=hp.optimizer("adam", learning_rate=0.1), steps=1)


class Lies:
    """Replacement of `wire.encode` that falsifies the liar's messages."""

    def __init__(self, kind):
        self.kind, self.random, self.first, self.told = kind, np.random.default_rng(SEED), {}, 0

    def __call__(self, header, tree):
        if header.sender != LIAR or header.kind.acknowledges:
            return encode(header, tree)
        self.told += 1
        if self.kind == "weight" and header.kind == wire.Kind.MESSAGE:
            return encode(replace(header, weight=header.weight * 10), tree)
        if header.kind != wire.Kind.MESSAGE:  # an accumulated total, whose last number is its mass
            return encode(header, self.total(np.array(tree), header))
        leaves, structure = jax.tree.flatten(tree)
        changed = [self.vector(np.array(leaf), (header.node, place)) for place, leaf in enumerate(leaves)]
        return encode(header, structure.unflatten(changed))

    def total(self, total, header):
        if self.kind == "weight":
            return np.append(total[:-1], 10 * total[-1])
        if self.kind == "constant":
            return np.append(np.full(total.size - 1, float(header.counter)), total[-1])
        if self.kind == "shape":
            return np.append(total, 0.0)
        return np.append(self.vector(total[:-1], header.node), total[-1])

    def vector(self, leaf, where):
        if leaf.dtype.kind != "f" or not leaf.ndim:
            return leaf
        changes = {
            "constant": lambda: np.ones_like(leaf),
            "tenfold": lambda: 10 * leaf,
            "sign": lambda: -leaf,
            "noise": lambda: (leaf + self.random.normal(size=leaf.shape)).astype(leaf.dtype),
            "stale": lambda: self.first.setdefault(where, leaf.copy()),
            "nan": lambda: spoiled(leaf, np.nan),
            "infinite": lambda: spoiled(leaf, np.inf),
            "shape": lambda: np.concatenate([leaf, leaf[:1]]),
        }
        return changes.get(self.kind, lambda: leaf)()


def spoiled(leaf, value):
    leaf = leaf.copy()
    leaf.reshape(-1)[0] = value
    return leaf


def run(mode, kind, folder=None):
    """Return each party's exit code and message, or its solution, and the number of lies sent."""
    ports = free_ports(len(NAMES))
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, ports, strict=True)}
    task, network = digits(len(NAMES), SEED).replace(names=NAMES), hp.networks.FullyConnected(len(NAMES))
    lies = Lies(kind)

    def party(client):
        options = {"mode": mode, "patience": 20.0, "close_after": 20.0, "longest_wait": 0.3}
        engine = hp.Peers(NAMES[client], addresses, tls=False, **options)
        try:
            return hp.solve(task.for_client(NAMES[client]), method(mode), network, key=0, engine=engine, certify=False)
        except hp.HyperpushError as error:
            return error.exit_code, str(error)

    with once:
        wire.encode = lies
        try:
            return together(len(NAMES), party), lies.told
        finally:
            wire.encode = encode


def reached(found, clients):
    """Return the mean accuracy in percent of some parties' models."""
    params = {key: np.stack([np.asarray(found[client].params[key]) for client in clients]) for key in ("w", "b")}
    hypers = np.stack([np.asarray(found[client].hypers) for client in clients])
    return accuracy(params, hypers, len(NAMES), SEED, clients)


HONEST = tuple(client for client in range(len(NAMES)) if client != LIAR)


def outcome(found):
    """Return (liar detected, exit codes, accuracy) of the honest parties; accuracy is of those with a model."""
    honest = [found[client] for client in HONEST]
    codes = [each[0] if isinstance(each, tuple) else 0 for each in honest]
    said = [each[1] if isinstance(each, tuple) else str(each.status) for each in honest]
    named = all(NAMES[LIAR] in line and "refused" in line for line in said)
    left = [client for client in HONEST if not isinstance(found[client], tuple)]
    return named, codes, reached(found, tuple(left)) if left else None, said


def main():
    for mode in sys.argv[1:] or ("synchronous", "asynchronous"):
        for kind in ("none", *KINDS):
            found, _ = run(mode, kind)
            named, codes, percent, said = outcome(found)
            sizes = [
                max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(each.params))
                for each in found[:3]
                if not isinstance(each, tuple)
            ]
            print(mode, kind, named, codes, percent, sizes, said[0], sep=" | ", flush=True)


if __name__ == "__main__":
    main()
