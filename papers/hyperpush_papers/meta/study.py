"""Measure the references and every method: accuracy on new tasks, by iteration and by floats sent."""

from contextlib import suppress
from math import comb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush.task.problem import L2
from hyperpush_papers.common.comparison import Benchmark, Row, compare, method_names
from hyperpush_papers.common.data.sources import available, load
from hyperpush_papers.common.report import report
from hyperpush_papers.meta.config import Meta
from hyperpush_papers.meta.representation import (
    curvature,
    draw_tasks,
    examples,
    features,
    few_shot_accuracy,
    fit_head,
    misfit,
    representation,
    shrink_images,
)


class Drawn(NamedTuple):
    """Images, and row numbers of tasks: the clients' tasks, and new tasks with new combinations or new classes."""

    inputs: Float[np.ndarray, "m d"]
    labels: Int[np.ndarray, " m"]
    known: Int[np.ndarray, " classes"]
    training: Int[np.ndarray, "clients tasks ways each"]
    tests: dict[str, Int[np.ndarray, "tests ways each"]]  # row numbers of new tasks, by metric
    described: dict[str, Any]


def run(config: Meta, run: StudyRun) -> dict[str, Any]:
    """Compare all methods, then repeat those that support privacy with noise."""
    network = hp.network(config.network, config.clients, config.seed)
    method_names(config, network)  # raises errors before data are loaded
    drawn = draw_images(config)
    on = benchmark(config, drawn)
    references = {"random": judge(config, on, on.task.hypers), "joint": joint(config, network, drawn, on)}
    found = compare(config, run, network, on)
    metrics = ("accuracy", "accuracy_new_classes", "outer_cost")
    found = report(config, run, network, found, (on, None), "meta", drawn.described["data"], references, metrics)
    return {**drawn.described, "references": references, **found}


def draw_images(config: Meta) -> Drawn:
    """Split images, classes and combinations of classes, so that new tasks share none of them with training."""
    name = config.data
    if name == "auto":
        name = "cifar10" if available("cifar10") else "digits"
    found, generator = load(name), np.random.default_rng(config.seed)
    most = found.classes - config.ways - 1
    if not config.ways <= config.new_classes <= most:
        allowed = f"from {config.ways} (ways) to {most}, so that there are tasks of known and of new classes"
        raise InvalidInput("new_classes", config.new_classes, allowed)
    order = generator.permutation(found.classes)
    new, known = order[: config.new_classes], order[config.new_classes :]
    rows = {c: generator.permutation(np.flatnonzero(found.labels == c)) for c in order}
    # For testing: a fifth of the combinations of known classes, at most twenty, and a fifth of the images.
    unseen: set[frozenset[int]] = set()
    while len(unseen) < min(20, -(-comb(len(known), config.ways) // 5)):
        unseen.add(frozenset(generator.choice(len(known), config.ways, replace=False).tolist()))
    ends = {c: len(rows[c]) // 5 for c in known}
    ways, each, tests = config.ways, config.shots + config.queries, config.shots + config.test_queries
    training = [
        draw_tasks(
            generator, [rows[c][ends[c] + k :: config.clients] for c in known], ways, each, config.tasks, never=unseen
        )
        for k in range(config.clients)
    ]
    seen_classes, new_classes = [rows[c][: ends[c]] for c in known], [rows[c] for c in new]
    new_tasks = {
        "accuracy": draw_tasks(generator, seen_classes, ways, tests, config.test_tasks, only=unseen, again=True),
        "accuracy_new_classes": draw_tasks(generator, new_classes, ways, tests, config.test_tasks, again=True),
    }
    described = {
        "data": name,
        "known_classes": known.tolist(),
        "new_classes": new.tolist(),
        "training_images_per_client": config.tasks * ways * each,
    }
    return Drawn(
        shrink_images(found.inputs, config.side), found.labels, known, np.stack(training), new_tasks, described
    )


def benchmark(config: Meta, drawn: Drawn) -> Benchmark:
    """Return the clients' task, with the accuracy of heads of new tasks on a client's representation as metrics."""
    key, options = jax.random.key(config.seed), {"widths": config.widths, "l2": config.l2, "loss": config.loss}
    task = representation(drawn.inputs, drawn.training, config.shots, key, common=True, **options)

    def metric(tests: Int[np.ndarray, "tests ways each"]):
        new = tests[:, None]  # an axis for a batch of one task each
        support, query = (examples(drawn.inputs, part) for part in (new[..., : config.shots], new[..., config.shots :]))

        def accuracy(params, hyper, batch):
            return jnp.mean(few_shot_accuracy(hyper, support, query, config.ways, config.l2, config.loss))

        return accuracy

    most = curvature(config.l2 / (config.clients * config.tasks), config.loss)

    def constants(clip: float, radius: float) -> hp.privacy.Constants:
        # Quantities that depend on the size of the heads are bounded by clipping only.
        return hp.privacy.Constants(C_y=clip, C_b=clip, C_x=clip, R=radius, C_H=most, C_Jz=clip * radius)

    metrics = {name: metric(tests) for name, tests in drawn.tests.items()}
    # Each head has 1/k of a client's examples, so its curvature is about that of one example divided by k.
    return Benchmark(task, metrics, inner_unit=config.tasks / curvature(0, config.loss), constants=constants)


def judge(config: Meta, on: Benchmark, hypers: PyTree) -> dict[str, float]:
    """Measure a representation with the best heads for it."""
    task = on.task

    @jax.jit
    @jax.vmap
    def heads(hyper, support):
        by_task = jax.tree.map(lambda leaf: leaf.reshape(config.tasks, -1, *leaf.shape[1:]), support)
        return jax.vmap(lambda own: fit_head(hyper, own, config.ways, config.l2, config.loss))(by_task)

    found = heads(hypers, task.train).reshape(task.params.shape[1:])
    return on.measure(jnp.broadcast_to(found, task.params.shape), hypers)


def joint(config: Meta, network: Network, drawn: Drawn, on: Benchmark) -> Row:
    """Train one classifier of all known classes by SGP on all clients' examples, from the same first representation.

    As for the methods, the step size is selected whose representation has the lowest outer cost on the training tasks.
    """

    def losses(params, hyper, batch):
        return misfit(config.loss, features(params[0], batch[0]) @ params[1], batch[1])

    chosen = drawn.training.reshape(config.clients, -1)
    number = np.zeros(drawn.labels.max() + 1, np.int32)
    number[drawn.known] = np.arange(len(drawn.known))
    data = jnp.asarray(drawn.inputs[chosen], jnp.zeros(()).dtype), jnp.asarray(number[drawn.labels[chosen]])
    heads = jnp.zeros((config.clients, config.widths[-1] + 1, len(drawn.known)))
    start = hp.per_client((on.task.hypers, heads))
    task = hp.Task(inner=losses, outer=losses, penalty=L2(1e-3), params=start, hypers=0.0, train=data, validation=data)
    tried = []
    for rate in config.outer:
        with suppress(hp.Diverged):
            trained = hp.train(task, hp.SGP(config.joint_steps, rate), network, key=config.seed)
            costs = {"floats_per_client": trained.costs.floats, "rounds": trained.costs.rounds}
            tried.append({**judge(config, on, trained.params[0]), **costs, "settings": {"rate": rate}})
    return min(tried, key=lambda each: each["outer_cost"], default={"left_out": "diverged at every rate"})
