"""First and later calls of short runs at each level of compiling, in CPU seconds.

    python benchmarks/levels.py                 # some minutes on an idle machine

Each row prints the estimated operations of a run and the level that the rule takes. For each level follow the CPU
seconds of the first call and the median CPU milliseconds of five later calls with other keys and step sizes.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hyperpush as hp
from hyperpush.engines.compiled import compile, effort
from hyperpush.programs.operations import equations

LEVELS: tuple[compile.Level, ...] = ("quick", "light", "full")
LATER = 5


def cases() -> dict[str, Callable[[int], Any]]:
    """Return runs by name; each takes a number for its key and step size."""

    def train(clients: int, steps: int, network: Any) -> Callable[[int], Any]:
        task = hp.tasks.logistic(clients, 0)
        return lambda k: hp.train(task, hp.SGP(steps, 0.1 + k / 1000), network, key=k, certify=False)

    random, ring = hp.networks.RandomDirected, hp.networks.Ring
    task = hp.tasks.logistic(10, 0)
    return {
        "SGP(500), 5 clients, random links": train(5, 500, random(5)),
        "SGP(5000), 20 clients, random links": train(20, 5000, random(20)),
        "SGP(500), 100 clients, random links": train(100, 500, random(100)),
        "SGP(500), 100 clients, ring": train(100, 500, ring(100)),
        "hypergradient(Automatic), 10 clients": lambda k: hp.hypergradient(
            task, hp.Automatic(tolerance=1e-3 + k * 1e-6), random(10), key=k, certify=False
        ),
    }


def cpu(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call and of what it computes."""
    began = time.process_time()
    jax.block_until_ready(jax.tree.leaves(call()))
    return time.process_time() - began


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    rule: Any = effort.Choice.__call__
    for name, each in cases().items():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        row, about = [], []
        for level in LEVELS:

            def fixed(choice: effort.Choice, jaxpr: Any, level: compile.Level = level, about: Any = about) -> Any:
                about[:] = [f"{choice.size:.2g} operations, {equations(jaxpr)} equations: {rule(choice, jaxpr)}"]
                return level

            setattr(effort.Choice, "__call__", fixed)  # noqa: B010, a method by another
            compile.clear()
            first = cpu(lambda each=each: each(0))
            later = [1e3 * cpu(lambda each=each, k=k: each(k)) for k in range(1, LATER + 1)]
            row.append(f"{level} {first:.1f} s, {np.median(later):.1f} ms")
        print(f"{name}: {about[0]}; {'; '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
