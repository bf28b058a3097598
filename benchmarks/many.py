"""Time with many clients: against a plain JAX loop on random 3-out graphs, with unequal sizes, with mini-batches."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measured import first, later, peak
from script import Row

import hyperpush as hp
from hyperpush.data.batches import minibatch

TITLE, PROCESSES, FROM_DISK = "Many clients", 1, False
STEPS, WIDTH, STEP_SIZE = 50, 6, 0.1


def train(clients: int) -> Row:
    """Measure the time of a later call per client and round, and that of a plain loop in the same process."""
    task, network = hp.tasks.logistic(clients, 0, features=WIDTH - 1), hp.networks.KOut(clients, k=3)
    found: dict[str, Any] = {}

    def work() -> Any:
        found["result"] = hp.train(task, hp.SGP(STEPS, STEP_SIZE), network, key=0, certify=False)
        return found["result"].params

    row = costs(first(work), found)
    inputs, targets = task.train
    loop = plain_loop(inputs, targets)
    ours, plain = later(work, 3)[1], later(lambda: loop(jax.random.key(0)), 3)[1]
    unit = 1e9 / clients / STEPS
    return row | {"ns_per_client_and_round": ours * unit, "plain_loop_ns": plain * unit, "ratio": ours / plain}


def plain_loop(inputs: Any, targets: Any) -> Callable[[Any], Any]:
    """Return SGP on random 3-out graphs in plain JAX: gradients, three receivers per client, scatter, divide."""
    clients = inputs.shape[0]

    def loss(x: Any, a: Any, y: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-(2 * y - 1) * (a @ x))) + 0.005 * jnp.sum(x**2)

    gradients = jax.vmap(jax.grad(loss))

    def step(t: Any, state: Any) -> Any:
        key, z, mass = state
        z = z - STEP_SIZE * gradients(z / mass[:, None], inputs, targets)
        others = jax.random.randint(jax.random.fold_in(key, t), (clients, 3), 1, clients)
        to = (jnp.arange(clients)[:, None] + others) % clients
        z, mass = z / 4, mass / 4
        add = lambda held, part: held.at[to.ravel()].add(jnp.repeat(part, 3, axis=0))  # noqa: E731
        return key, add(z, z), add(mass, mass)

    @jax.jit
    def run(key: Any) -> Any:
        start = (key, jnp.zeros((clients, inputs.shape[2])), jnp.ones(clients))
        _, z, mass = jax.lax.fori_loop(0, STEPS, step, start)
        return z / mass[:, None]

    return run


def call(verb: str, clients: int) -> Row:
    task, network = hp.tasks.logistic(clients, 0, features=WIDTH - 1), hp.networks.KOut(clients, k=3)
    found: dict[str, Any] = {}

    def work() -> Any:
        if verb == "solve":
            outer = hp.optimizer("sgd", learning_rate=0.01)
            method = hp.PDBO(hp.SGP(STEPS, STEP_SIZE), hp.Automatic(), outer, steps=2)
            found["result"] = hp.solve(task, method, network, key=0, certify=False)
            return found["result"].hypers
        run = hp.influence.scores if verb == "influence.scores" else hp.hypergradient
        found["result"] = run(task, hp.Automatic(), network, key=0)
        return jax.tree.leaves(found["result"].task.params)

    return costs(first(work), found)


def costs(row: Row, found: dict[str, Any]) -> Row:
    result = found["result"]
    return row | {"rounds": result.costs.rounds, "floats": result.costs.floats}


def unequal() -> Row:
    """Compare 1,000 clients of 1 to 10,000 examples with clients of equal sizes and as many examples in total."""
    sizes = np.round(np.geomspace(1, 10_000, 1000)).astype(int)
    equal = np.full(1000, round(sizes.mean()))
    seconds, memory = [], []
    for each in (equal, sizes):
        task = of_sizes(each)
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(task.train))
        run = lambda task=task: hp.train(task, hp.SGP(10, STEP_SIZE), hp.networks.Ring(1000), key=0, certify=False)  # noqa: E731
        seconds.append(later(lambda run=run: run().params, 3)[1])
        memory.append(own / (each.sum() * (WIDTH + 1) * 4))
    return {"memory_over_data": memory[1], "round_over_equal": seconds[1] / seconds[0], "peak_megabytes": peak()}


def small_clients() -> Row:
    """Measure how long a task from a list of 40,000 clients of 1 to 5 examples takes to make."""
    sizes = 1 + np.arange(40_000) % 5
    return first(lambda: jax.tree.leaves(of_sizes(sizes).train))


def of_sizes(sizes: Any) -> hp.Task:
    generator = np.random.default_rng(0)
    rows = [generator.standard_normal((m, WIDTH + 1), np.float32) for m in sizes]
    data = [(each[:, :-1], each[:, -1]) for each in rows]
    few = [(a[:1], y[:1]) for a, y in data]
    return hp.Task(inner=squared, outer=squared, params=jnp.zeros(WIDTH), hypers=0.0, train=data, validation=few)


def squared(x: Any, hyper: Any, batch: Any) -> Any:
    return (batch[0] @ x - batch[1]) ** 2


def drawing(clients: int) -> Row:
    """Measure 50 steps in which each client draws 32 of its 10,000 examples."""
    data = jnp.zeros((10_000, 4))

    @jax.jit
    def draw(key: Any) -> Any:
        def step(total: Any, t: Any) -> Any:
            keys = jax.random.split(jax.random.fold_in(key, t), clients)
            return total + jax.vmap(lambda own: minibatch(data, 32, own).sum())(keys).sum(), None

        return jax.lax.scan(step, 0.0, jnp.arange(STEPS))[0]

    began = time.process_time()
    draw(jax.random.key(0)).block_until_ready()
    row = {"cpu_seconds": time.process_time() - began}
    return row | {"µs_per_client_and_step": later(lambda: draw(jax.random.key(1)))[1] * 1e6 / clients / STEPS}


CASES: dict[str, Callable[[], Row]] = {
    **{f"train, SGP({STEPS}), n = {n:,}": partial(train, n) for n in (1_000, 10_000, 100_000)},
    **{
        f"{verb}, n = {n:,}": partial(call, verb, n)
        for n in (1_000, 10_000)
        for verb in ("hypergradient", "solve", "influence.scores")
    },
    "1,000 clients of 1 to 10,000 examples": unequal,
    "a task of a list of 40,000 clients": small_clients,
    "32 of 10,000 examples, 1 client": partial(drawing, 1),
    "32 of 10,000 examples, 100 clients": partial(drawing, 100),
}
