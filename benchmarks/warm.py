"""Time of later calls with and without the status, and of hypergradients on one machine (a9a) against jaxopt."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measured import later
from script import Row

import hyperpush as hp

TITLE, PROCESSES, FROM_DISK = "Later calls", 1, False
FEATURES, RATE = 123, -4.0


def call(verb: str) -> Row:
    """Return ms of a later call with `certify=False` and with the status: logistic regression, ten clients."""
    task, network = hp.tasks.logistic(10, 0), hp.networks.RandomDirected(10)
    engine, keys = hp.Simulate(compile_fully=True), iter(range(1000))
    solver = hp.SGP(100, 0.1)
    method = hp.PDBO(solver, hp.HGP(10, 3, 0.1), hp.optimizer("sgd", learning_rate=0.01), steps=1)

    def run(certify: bool) -> Any:
        options: dict[str, Any] = {"key": next(keys), "engine": engine, "certify": certify}
        if verb == "train":
            return hp.train(task, solver, network, **options).params
        if verb == "solve":
            return hp.solve(task, method, network, **options).hypers
        return hp.hypergradient(task, hp.Automatic(), network, **options).value

    (bare, _), (judged, _) = (later(lambda certify=certify: run(certify)) for certify in (False, True))
    return {"ms": 1e3 * bare, "with_status_ms": 1e3 * judged, "status_ratio": judged / bare}


def a9a() -> Row:
    """Compare a later hypergradient of the L2 rate at the solution with jaxopt's implicit differentiation by CG."""
    from jaxopt import implicit_diff, linear_solve  # pyright: ignore[reportMissingImports]

    train, test = (read(name) for name in ("a9a", "a9a.t"))
    data = [jax.tree.map(lambda leaf: leaf[None], each) for each in (train, test)]
    task = hp.Task(
        inner=loss, penalty=l2, outer=loss, params=jnp.zeros(FEATURES), hypers=RATE, train=data[0], validation=data[1]
    )
    network, engine = hp.networks.FullyConnected(1), hp.Simulate(compile_fully=True)
    task = hp.train(task, hp.AutomaticInner(), network, key=0).task
    x, found = task.params[0], {}

    def ours() -> Any:
        run = hp.hypergradient(task, hp.Automatic(), network, key=0, engine=engine, certify=False)
        found["ours"] = run.value
        return run.value

    solve = partial(linear_solve.solve_cg, tol=1e-4)

    @jax.jit
    def implicit(x: Any, h: Any, train: Any, test: Any) -> Any:
        optimality = jax.grad(lambda x, h: jnp.mean(loss(x, h, train)) + l2(x, h))
        along = jax.grad(lambda x: jnp.mean(loss(x, h, test)))(x)
        return implicit_diff.root_vjp(optimality, x, (h,), along, solve=solve)[0]

    def theirs() -> Any:
        found["jaxopt"] = implicit(x, jnp.asarray(RATE), train, test)
        return found["jaxopt"]

    (own, _), (other, _) = later(ours), later(theirs)
    gap = abs(float(found["ours"].ravel()[0] / found["jaxopt"]) - 1)
    return {"ms": 1e3 * own, "jaxopt_ms": 1e3 * other, "speed_over_jaxopt": other / own, "relative_gap": gap}


def read(name: str) -> tuple[Any, Any]:
    """Return the inputs and signs (labels) of a file in LIBSVM's format."""
    folder = os.environ.get("HYPERPUSH_DATA")
    if folder is None:
        raise SystemExit("HYPERPUSH_DATA is not set")
    lines = [line.split() for line in (Path(folder) / "a9a" / name).read_text().splitlines()]
    inputs = np.zeros((len(lines), FEATURES), np.float32)
    for row, (_, *parts) in zip(inputs, lines, strict=True):
        row[[int(part.split(":")[0]) - 1 for part in parts]] = 1
    return jnp.asarray(inputs), jnp.asarray([float(line[0]) for line in lines])


def loss(x: Any, hyper: Any, batch: Any) -> Any:
    return jax.nn.softplus(-batch[1] * (batch[0] @ x))


def l2(x: Any, hyper: Any) -> Any:
    return jnp.exp(hyper) * jnp.sum(x**2)


CASES: dict[str, Callable[[], Row]] = {
    **{verb: partial(call, verb) for verb in ("train", "hypergradient(Automatic)", "solve")},
    "hypergradient on one machine, a9a": a9a,
}
