"""Compare methods on the karate club, and record inner and outer cost while the kernel is frozen."""

from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jaxtyping import Array, Float
from numpy.random import Generator

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.base.figures import error_curves, panels
from hyperpush.big_fed.strangers import check_strangers
from hyperpush.data.batches import Data
from hyperpush.inner.base import InnerState, Learner
from hyperpush.programs import Context
from hyperpush.runs.run import StudyRun
from hyperpush_papers.big_fed import tuning
from hyperpush_papers.big_fed.config import BigFed
from hyperpush_papers.big_fed.fesem import FeSEM
from hyperpush_papers.big_fed.flhc import FLHC
from hyperpush_papers.big_fed.tuning import Club, Method
from hyperpush_papers.common.data.deepwalk import embedding

REACH = 5.0  # inputs are from −5 to 5
Weights = Float[np.ndarray, "n n"]


def run(config: BigFed, run: StudyRun) -> dict[str, Any]:
    """Return a row for each method and seed, and the correlation of inner and outer cost; draw both figures."""
    weights = nx.to_numpy_array(nx.karate_club_graph(), weight=None)  # pyright: ignore[reportArgumentType]
    seeds = range(config.seed, config.seed + config.seeds)
    everyone = methods(config, weights)
    clubs = [draw_club(config, weights, seed) for seed in seeds]
    club = jax.tree.map(lambda *each: jnp.asarray(np.stack(each), jnp.zeros(()).dtype), *clubs)
    inner, outer = frozen_costs(config, weights, club)
    correlations = [float(np.corrcoef(*pair)[0, 1]) for pair in zip(inner, outer, strict=True)]
    rows, summary, tested = [], [], {}
    with run.progress("methods", len(everyone)) as bar:
        for method in everyone:
            errors, _, _ = tuning.curves(method, club)
            place = tuning.best_of(errors)
            test = tested[method.name] = errors[place, :, :, 2]
            for seed, curve in zip(seeds, test, strict=True):
                rows.append({"method": method.name, "seed": seed, "test_loss": curve, "final": curve[-1]})
                run.record(**rows[-1])
            summary.append(_summarize(method, place, test, tested["BiG-Fed"]))
            bar.step()
    title = f"test loss after {config.rounds} rounds, {config.seeds} seeds"
    run.table(title, list(summary[0]), [list(row.values()) for row in summary])
    run.console.print(f"inner and outer cost, kernel frozen: correlation {np.mean(correlations):.3f}")
    _draw(run, {"inner cost": inner, "outer cost": outer}, tested)
    return {
        "rows": rows,
        "correlation_inner_outer": float(np.mean(correlations)),
        "correlation_by_seed": correlations,
        "frozen": {"inner": inner.mean(0), "outer": outer.mean(0)},
        "summary": summary,
    }


def draw_functions(
    weights: Weights, multipliers: tuple[float, float] | Literal["raw"], generator: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the amplitude and frequency factor of each client's function: its node's coordinates by DeepWalk."""
    amplitude, multiplier = embedding(weights, 2, generator).T
    if multipliers != "raw":
        low, high = multipliers
        multiplier = low + (high - low) * (multiplier - multiplier.min()) / np.ptp(multiplier)
    return amplitude, multiplier


def draw_club(config: BigFed, weights: Weights, seed: int) -> Club:
    """Return one seed's examples and start: layers as PyTorch draws them, the first and last times `start`."""
    generator, n, width = np.random.default_rng(seed), len(weights), config.width
    amplitude, multiplier = draw_functions(weights, config.multipliers, generator)

    def examples() -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.uniform(-REACH, REACH, (n, config.examples))
        return inputs[..., None], amplitude[:, None] * np.sin(multiplier[:, None] * inputs)

    train, validation, test = (examples() for _ in range(3))
    layers = generator.uniform(-1, 1, (n, width, 2)) * np.array([1, width**-0.5]) * config.start
    kernel = generator.uniform(-1, 1, (width, width)) * width**-0.5
    params = np.broadcast_to(layers[:1], layers.shape) if config.same_start else layers
    return Club(train, validation, test, params, np.broadcast_to(kernel, (n, width, width)))


def rewire(weights: Weights, generator: Generator) -> Weights:
    """Return a random graph in which each client has as many neighbors as in the given graph."""
    graph, seed = nx.from_numpy_array(weights), cast(int, generator)  # networkx also accepts NumPy generators
    nx.double_edge_swap(graph, 10 * graph.number_of_edges(), 10**6, seed=seed)
    return nx.to_numpy_array(graph, nodelist=range(len(weights)))


def methods(config: BigFed, weights: Weights) -> list[Method]:
    """Return all methods of the comparison."""
    n = len(weights)
    if max(config.clusters, default=1) > n:
        raise InvalidInput("clusters", max(config.clusters), f"at most {n}, the clients")
    near = tuning.cosine(config, weights)
    other = tuning.cosine(config, rewire(weights, np.random.default_rng(config.seed)))
    peers = hp.network(config.network, n, config.seed)
    check_strangers(near, peers, config.rounds, stride=hp.big_fed.BiGFed(config.rounds, 1.0, 1.0, "peers").exchanges)
    found = [
        tuning.big_fed(config, "BiG-Fed", near),
        tuning.big_fed(config, "BiG-Fed, no server", near, peers),
        tuning.big_fed(config, "BiG-Fed, rewired graph", other),
        tuning.big_fed(config, "kernel from own costs", None),
        *tuning.local_and_averaged(config),
    ]
    for k in config.clusters:
        for name, make, loops in (
            ("FeSEM", FeSEM, ("first", "FeSEM")),
            ("FL+HC", FLHC, ("together", "split", "apart")),
        ):
            found.append(
                tuning.solver(config, f"{name}, {k}", partial(make, config.rounds, clusters=k), loops, clustered=True)
            )
    return found


def frozen_costs(config: BigFed, weights: Weights, club: Club) -> tuple[np.ndarray, np.ndarray]:
    """Inner and outer cost [seeds, rounds] while each client trains alone and the kernel is frozen."""
    joint = tuning.cosine(config, weights)
    costs, network = tuning.problem(joint), hp.networks.FullyConnected(len(weights))
    program = hp.LocalSGD(config.rounds, config.frozen_rate).program(costs)

    def record(state: Learner, ctx: Context) -> tuple[Array, Array]:
        at = state.params, state.hyper
        return costs.inner_cost(*at, ctx.data.train), joint.represent(*at)

    @jax.jit
    @jax.vmap
    def run(own: Club) -> tuple[Array, Array]:
        states, data = InnerState(own.params, own.kernels), Data({"train": own.train}, "train")
        recorders = {"LocalSGD": record}
        _, history = hp.extend.evaluate(program, network, states, data, jax.random.key(0), record=recorders)
        inner, shown = history["LocalSGD"]
        return inner.mean(1), jax.vmap(lambda each: joint.cost(each, 0, expected=True))(shown)

    inner, outer = run(club)
    return np.asarray(inner), np.asarray(outer)


def _summarize(
    method: Method, place: int, test: Float[np.ndarray, "seeds rounds"], first: Float[np.ndarray, "seeds rounds"]
) -> dict[str, Any]:
    """Return a method's test losses at its best step sizes, and by how much they exceed those of the first method."""
    final = test[:, -1]
    behind = final - first[:, -1]
    return {
        "method": method.name,
        "final": float(final.mean()),
        "spread": float(final.std()),
        "behind_big_fed": float(behind.mean()),
        "standard_error": float(behind.std(ddof=1)) / len(behind) ** 0.5 if len(behind) > 1 else None,
        "seeds_behind": int((behind > 0).sum()),
        "mean_over_rounds": float(test.mean()),
        "steps": " ".join(f"{step:.3g}" for step in method.steps[place]),
        "at_edge": method.at_edge(place),
    }


def _draw(run: StudyRun, frozen: dict[str, np.ndarray], tested: dict[str, np.ndarray]) -> None:
    figure, (axis,) = panels()
    error_curves(axis, tuning.mean_curves(frozen), x_label="rounds", y_label="cost, kernel frozen")
    run.figure("inner-and-outer", figure)
    figure, (axis,) = panels()
    error_curves(axis, tuning.mean_curves(tested), x_label="rounds", y_label="test loss", log_x=True)
    axis.legend(fontsize=5)
    run.figure("test-loss", figure)
