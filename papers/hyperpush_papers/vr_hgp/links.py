"""Errors of estimators that observe link frequencies in training, compared with true frequencies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray

import hyperpush as hp
from hyperpush.engines.simulate import evaluate
from hyperpush.hypergradients import oracles
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.recurrent import Recurrent, known_links
from hyperpush.inner.base import InnerState, ObservingSolver
from hyperpush.networks import Network
from hyperpush.programs import program_of
from hyperpush.runs.run import StudyRun
from hyperpush.task.task import Task
from hyperpush_papers.vr_hgp.config import VRStudy

AFTER: Any = {"variant": "gradient-after"}


def paper_networks(clients: int, seed: int, mixing: str) -> list[tuple[Network, type[ObservingSolver]]]:
    """Return the papers' four kinds of network with their inner solvers: gossip on constant undirected links."""
    made = hp.networks
    return [
        (made.FullyConnected(clients), hp.SGP),
        (made.StaticUndirected(clients, 0.4, seed, mixing), hp.DSGD),
        (made.RandomUndirected(clients, (0.4, 0.8), seed), hp.SGP),
        (made.RandomDirected(clients, (0.4, 0.8), seed), hp.SGP),
    ]


def compare_links(config: VRStudy, run: StudyRun, task: Task) -> list[dict[str, Any]]:
    """Return errors with observed link frequencies and with true ones, by network, estimator and training steps.

    All estimates are at the params of the longest training, so that only the knowledge of links differs.
    """
    rows = []
    keys = jax.random.split(jax.random.key(config.seed), config.link_runs)
    kinds = hp.hypergradients.DirectedRB, hp.hypergradients.VRHGP
    with run.progress("links", 4 * len(config.trainings)) as bar:
        for network, trainer in paper_networks(task.clients, config.seed, config.mixing):
            solvers = [trainer(steps, config.step, observe=True, **AFTER) for steps in sorted(config.trainings)]
            at = hp.train(task, solvers[-1], network, key=keys[0]).task
            point = (at.problem, at.params, at.hypers, at.data)
            weights = solvers[-1].weights
            target = oracles.recurrent(*point, network, config.step, AFTER["variant"], weights)
            estimators = [kind(config.link_rounds, config.step, weights=weights, **AFTER) for kind in kinds]
            for solver in solvers:
                for estimator in estimators:
                    found = errors(task, at, solver, estimator, network, keys, np.asarray(target))
                    rows.append({"network": network.name, "estimator": type(estimator).__name__, **found})
                bar.step()
    columns = ("network", "estimator", "training_steps", "observed", "means", "links_error")
    cells = [[each if isinstance(each, str | int) else f"{each:.1e}" for each in map(row.get, columns)] for row in rows]
    run.table(f"relative error by what is known of links, mean of {config.link_runs} runs", columns, cells)
    return rows


def errors(
    task: Task,
    at: Task,
    solver: ObservingSolver,
    estimator: Recurrent,
    network: Network,
    keys: Key[Array, " runs"],
    target: np.ndarray,
) -> dict[str, Any]:
    """Return relative errors over keys; each key is for one training and one estimate."""
    means = known_links(estimator.with_options(links="means"), network, None, task)
    assert means is not None
    start, zeros = InnerState(task.params, task.hypers), jnp.zeros_like(task.hypers)

    def estimate(links: Any, key: PRNGKeyArray) -> Array:
        states = HypergradientState(at.params, at.hypers, zeros, links)
        return evaluate(program_of(estimator, at.problem), network, states, at.data, key)[0].value

    @jax.jit
    @jax.vmap
    def run(key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        training, estimation = jax.random.split(key)
        seen = evaluate(program_of(solver, task.problem), network, start, task.data, training)[0].links
        return estimate(seen, estimation), estimate(means, estimation), jnp.abs(seen.heard - means.heard).mean()

    observed, true, apart = (np.asarray(part, np.float64) for part in run(keys))

    def relative(values: np.ndarray) -> np.ndarray:
        return np.linalg.norm((values - target).reshape(len(values), -1), axis=1) / np.linalg.norm(target)

    return {
        "training_steps": solver.steps,
        "observed": float(relative(observed).mean()),
        "observed_std": float(relative(observed).std(ddof=1)),
        "means": float(relative(true).mean()),
        "means_std": float(relative(true).std(ddof=1)),
        "links_error": float(apart.mean()),
    }
