"""Forecasts of speeds: simple ones, and those of BiG-Fed, FedAvg and training alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hyperpush.base.errors import InvalidInput
from hyperpush.base.figures import error_curves, panels
from hyperpush.big_fed.bilinear import coefficients
from hyperpush.runs.run import StudyRun
from hyperpush_papers.big_fed import tuning
from hyperpush_papers.common.data.traffic import DAY, traffic
from hyperpush_papers.traffic.config import TrafficConfig

LAGS = AHEAD = 12  # number of past speeds, and steps ahead: an hour each
PerSensor = Float[np.ndarray, "sensors examples"]


class Examples(NamedTuple):
    """Inputs, targets and times of all sensors in a period of days."""

    inputs: Float[np.ndarray, "sensors examples features"]  # in units of each sensor's standard deviation
    targets: PerSensor
    times: Int[np.ndarray, " examples"]  # time steps of the targets
    last: PerSensor  # the last known speed, in miles per hour


def run(config: TrafficConfig, run: StudyRun) -> dict[str, Any]:
    """Run all forecasts; return a row for each forecast and seed."""
    made = traffic(config.data, seed=config.seed)
    speeds, n = made.speeds, made.speeds.shape[1]
    edges = [config.train_days * DAY, (config.train_days + config.validation_days) * DAY]
    if edges[-1] + DAY > len(speeds):
        allowed = f"a sum of at most {len(speeds) // DAY - 1}: a day is left to test on"
        raise InvalidInput("train_days, validation_days", (config.train_days, config.validation_days), allowed)
    known = speeds[: edges[0]]
    mean, spread = known.mean(0), np.maximum(known.std(0), 0.1)
    spans = zip((0, *edges), (*edges, len(speeds)), strict=True)
    parts = [examples(speeds, *span, config.harmonics, mean, spread, DAY) for span in spans]
    test, truth = parts[2], speeds[parts[2].times].T
    rows: list[dict[str, Any]] = []

    def add(method: str, seed: int | None, forecast: PerSensor, **more: Any) -> None:
        rows.append({"method": method, "seed": seed, **scores(forecast, truth), **more})
        run.record(**rows[-1])

    def in_miles(weights: Float[np.ndarray, "sensors features"]) -> PerSensor:
        return np.einsum("nmf,nf->nm", test.inputs, weights) * spread[:, None] + mean[:, None]

    matrix, right = condense(parts[0])
    add("last value", None, test.last)
    add("mean at the time of day", None, known.reshape(-1, DAY, n).mean(0)[test.times % DAY].T)
    add("own least squares", None, in_miles((np.linalg.pinv(matrix) @ right[..., None])[..., 0]))

    weights = made.nearness
    if config.rewire == "random":
        order = np.random.default_rng(config.seed).permutation(n)
        weights = weights[np.ix_(order, order)]
    near = tuning.cosine(config, weights, self_loops=config.self_loops)
    everyone = [tuning.big_fed(config, "BiG-Fed", near), *tuning.local_and_averaged(config)]
    seeds = range(config.seed, config.seed + config.seeds)
    club, tested = _club(config, parts, seeds), {}
    with run.progress("methods", len(everyone)) as bar:
        for method in everyone:
            errors, params, hypers = tuning.curves(method, club)
            place = tuning.best_of(errors[:, :, -1:])
            tested[method.name] = errors[place, :, :, 2]
            chosen = jax.vmap(jax.vmap(coefficients))(jnp.asarray(params[place]), jnp.asarray(hypers[place]))
            for seed, found in zip(seeds, np.asarray(chosen), strict=True):
                choice = {"steps": list(method.steps[place]), "at_edge": method.at_edge(place)}
                add(method.name, seed, in_miles(found), **choice)
            bar.step()
    summary = summarize(rows)
    run.table(f"an hour ahead, {n} sensors, {made.source}", list(summary[0]), [list(row.values()) for row in summary])
    figure, (axis,) = panels()
    label = "test error, in squared spreads"
    error_curves(axis, tuning.mean_curves(tested), x_label="rounds", y_label=label, log_x=True)
    run.figure("test-error", figure)
    return {"source": made.source, "sensors": n, "rows": rows, "summary": summary}


def examples(
    speeds: Float[np.ndarray, "t n"],
    begin: int,
    end: int,
    harmonics: int,
    mean: Float[np.ndarray, " n"],
    spread: Float[np.ndarray, " n"],
    day: int,
) -> Examples:
    """Return all examples whose past and target lie in the time steps begin…end−1."""
    starts = np.arange(begin, end - LAGS - AHEAD + 1)
    own = (speeds - mean) / spread
    past = np.stack([own[starts + lag] for lag in range(LAGS)], axis=-1).transpose(1, 0, 2)
    times = starts + LAGS + AHEAD - 1
    phases = 2 * np.pi * np.outer(times / day, np.arange(1, harmonics + 1))
    shared = np.concatenate([np.ones((len(starts), 1)), np.sin(phases), np.cos(phases)], axis=1)
    everywhere = np.broadcast_to(shared, (past.shape[0], *shared.shape))
    return Examples(np.concatenate([past, everywhere], axis=-1), own[times].T, times, speeds[starts + LAGS - 1].T)


def condense(given: Examples) -> tuple[Float[np.ndarray, "n r f"], Float[np.ndarray, "n r"]]:
    """Return few rows with the same mean squared error of every linear forecast: R in [inputs, targets] = QR."""
    table = np.concatenate([given.inputs, given.targets[..., None]], axis=-1)
    factor = np.linalg.qr(table, mode="r") * (table.shape[2] / table.shape[1]) ** 0.5
    return factor[..., :-1], factor[..., -1]


def scores(forecast: Float[np.ndarray, "..."], truth: Float[np.ndarray, "..."]) -> dict[str, float]:
    """Return mean absolute error and root mean squared error, in miles per hour."""
    return {"mae": float(np.abs(forecast - truth).mean()), "rmse": float(((forecast - truth) ** 2).mean() ** 0.5)}


def _club(config: TrafficConfig, parts: list[Examples], seeds: range) -> tuning.Club:
    """Return the data with the same examples for all seeds, and layers as PyTorch draws them, equal at all clients."""
    clients, features, width = len(parts[0].inputs), parts[0].inputs.shape[-1], config.width
    scale = np.array([features**-0.5] * features + [width**-0.5])
    layers, kernels = [], []
    for generator in map(np.random.default_rng, seeds):
        layers.append(generator.uniform(-1, 1, (width, features + 1)) * scale)
        kernels.append(generator.uniform(-1, 1, (width, width)) * width**-0.5)

    def to_all(starts: list[np.ndarray]) -> np.ndarray:
        return np.repeat(np.stack(starts)[:, None], clients, axis=1)

    same = [jax.tree.map(lambda leaf: np.stack([leaf] * len(seeds)), condense(part)) for part in parts]
    club = tuning.Club(same[0], same[1], same[2], to_all(layers), to_all(kernels))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.zeros(()).dtype), club)


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means and spreads over seeds for each method, and the chosen step sizes."""
    found = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        row: dict[str, Any] = {"method": name}
        for score in ("mae", "rmse"):
            each = np.array([line[score] for line in own])
            row |= {score: float(each.mean()), f"{score}_spread": float(each.std())}
        steps = own[0].get("steps")
        row |= {"steps": steps and " ".join(f"{step:.3g}" for step in steps), "at_edge": own[0].get("at_edge")}
        found.append(row)
    return found
