"""The search for wrong labels on scikit-learn's digits."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from numpy.random import Generator

import hyperpush as hp
from hyperpush import influence
from hyperpush.influence.label_noise import share_found
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush.task.problem import L2
from hyperpush.task.task import Task
from hyperpush_papers.common.data.partition import iid, split, stack
from hyperpush_papers.common.data.sources import load
from hyperpush_papers.influence.config import Hunt, InfluenceStudy

# share of a client's examples that is searched for wrong labels: the worst 10 % and 20 %
WORST = {"worst_10": 0.1, "worst_20": 0.2}
# number of clients, number of these with wrong labels, and share of wrong labels there
CLIENTS, NOISY, SHARE = (5, 2, 0.1)
RATE, L2_RATE = 0.5, 1e-3  # the first step size of SGP, and the rate of the L2 penalty
WAYS = ("influence", "shared loss", "local loss", "random")


def softmax_losses(params: PyTree, rate: PyTree, examples: PyTree) -> Float[Array, " m"]:
    """Cross-entropy of every example under softmax regression."""
    inputs, labels = examples
    scores = inputs.reshape(len(inputs), -1) @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def l2(params: PyTree, rate: Array) -> Float[Array, ""]:
    """Return the L2 penalty ½·rate·‖params‖²."""
    return L2(rate)(params, None)


def noisy_digits(kind: str, seed: int) -> tuple[Task, list[np.ndarray], Generator]:
    """Return the task on digits, a mask of wrong training labels for each noisy client, and the random generator."""
    found, generator = load("digits"), np.random.default_rng(seed)
    parts = split(iid(len(found.labels), CLIENTS, generator), generator)
    labels = found.labels.copy()
    flips = []
    for own in parts.train[:NOISY]:
        many = max(1, round(SHARE * len(own)))
        if kind == "random":
            chosen, shift = generator.choice(own, many, replace=False), generator.integers(1, found.classes, many)
        else:  # systematic errors: all examples of one label, or of two consecutive labels
            by_label = own[np.argsort(labels[own], kind="stable")]
            chosen, shift = np.roll(by_label, -generator.integers(len(own)))[:many], 1
        labels[chosen] = (labels[chosen] + shift) % found.classes
        flips.append(np.isin(own, chosen))
    made = hp.Task(
        inner=softmax_losses,
        outer=softmax_losses,
        penalty=l2,
        params={"weight": jnp.zeros((64, found.classes)), "bias": jnp.zeros(found.classes)},
        hypers=L2_RATE,
        train=stack(found._replace(labels=labels), parts.train),
        validation=stack(found, parts.validation),
    )
    return made, flips, generator


def hunt_wrong_labels(config: InfluenceStudy, solver: hp.SGP, run: StudyRun) -> dict[str, Any]:
    """Return shares of wrong labels found by influence, by the loss under the shared or own model, and by chance."""
    hunt, rows = config.hunt, []
    network = hp.network(config.network, CLIENTS, config.seed, **config.network_options)
    with run.progress("wrong labels", hunt.seeds * len(hunt.kinds)) as bar:
        for kind, seed in product(hunt.kinds, range(config.seed, config.seed + hunt.seeds)):
            rows += _hunt(hunt, network, solver, kind, seed)
            bar.step()
    means = []
    for kind, way in product(hunt.kinds, WAYS):
        own = [row for row in rows if (row["wrong"], row["by"]) == (kind, way)]
        means.append({"wrong": kind, "by": way, **{name: float(np.mean([row[name] for row in own])) for name in WORST}})
    run.table(
        f"share of wrong labels found, mean of {hunt.seeds} seeds and {NOISY} clients with {SHARE:.0%} wrong",
        ("wrong labels", "by", "in the worst 10 %", "in the worst 20 %"),
        [tuple(row.values()) for row in means],
    )
    return {"found": means, "rows": rows, "share": SHARE, "noisy_clients": NOISY, "clients": CLIENTS}


def _hunt(hunt: Hunt, network: Network, solver: hp.SGP, kind: str, seed: int) -> list[dict[str, Any]]:
    """Return the wrong labels found by each method at each noisy client."""
    task, flips, generator = noisy_digits(kind, seed)
    key, second = jax.random.split(jax.random.key(seed))
    shared = hp.train(task, solver, network, key=key)
    alone = hp.train(task, hp.LocalSGD(solver.steps, solver.step_size), network, key=key)
    options: Any = {"key": second, "damping": hunt.damping, "curvature_steps": 0}
    scores = influence.scores(shared.task, hp.TrackedHGP(), network, parties=None, **options)
    losses = jax.jit(jax.vmap(softmax_losses))
    by_shared, by_own = (np.asarray(losses(each.params, task.hypers, task.train.examples)) for each in (shared, alone))
    rows = []
    for client, flipped in enumerate(flips):
        size = len(flipped)
        ranked = (
            scores.examples[client],
            -by_shared[client, :size],
            -by_own[client, :size],
            generator.permutation(size),
        )
        for way, own in zip(WAYS, ranked, strict=True):
            found = {name: share_found(np.asarray(own, float), flipped, share) for name, share in WORST.items()}
            rows.append({"wrong": kind, "seed": seed, "client": client, "by": way, **found})
    return rows
