"""Speeds an hour ahead at road sensors, each a client: BiG-Fed against training alone, FedAvg and simple forecasts.

A sensor forecasts its speed 12 steps of five minutes ahead from its last 12 and the time of day, with linear layers of
which the middle one is everybody's. The graph is that of the roads (docs/big-fed.md).
"""

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hyperpush.runs.experiment import Experiment
from hyperpush.studies.big_fed import (
    Club,
    Count,
    Positive,
    Tuned,
    best_of,
    big_fed,
    cosine,
    curves,
    local_and_averaged,
    place_at_edge,
    plain,
)

LAGS = AHEAD = 12  # an hour


class TrafficConfig(Tuned):
    """Options of the forecast of speeds."""

    rounds: Annotated[int, Field(ge=10)] = Field(default=200, description="Rounds of every method.")
    seeds: Annotated[int, Field(ge=1)] = Field(default=3, description="Runs, each with a start of its own.")
    rates: tuple[Positive, ...] = Field(
        default=tuple(0.003125 * 2**k for k in range(10)), min_length=1, description="Inner steps to choose from."
    )
    outer_steps: tuple[Positive, ...] = Field(
        default=(0.001, 0.01, 0.1, 1.0), min_length=1, description="First outer steps to choose from."
    )
    solver_steps: Count = Field(default=8, description="Conjugate gradient steps of every solve with a block.")
    data: str = Field(default="auto", description="los-loop, synthetic, or auto: the files if they are there.")
    train_days: Annotated[int, Field(ge=1)] = Field(default=4, description="Days to train on, from the first.")
    validation_days: Annotated[int, Field(ge=1)] = Field(default=1, description="Days after them to choose steps on.")
    harmonics: Annotated[int, Field(ge=0)] = Field(default=2, description="Waves per day that forecasts may follow.")
    self_loops: bool = Field(default=True, description="Whether a sensor is one of its own neighbors.")
    rewire: Literal["no", "random"] = Field(default="no", description="random: sensors are given each other's places.")


class Examples(NamedTuple):
    """Of all sensors in some days: what to forecast from, what came, and when."""

    inputs: Any  # [sensors, examples, features], in units of each sensor's own spread
    targets: Any  # [sensors, examples]
    times: Any  # [examples], of the targets
    last: Any  # [sensors, examples], the last speed known, in miles per hour


def examples(speeds: Any, begin: int, end: int, harmonics: int, mean: Any, spread: Any, day: int) -> Examples:
    """Every example whose past and target lie in steps begin…end−1."""
    starts = np.arange(begin, end - LAGS - AHEAD + 1)
    own = (speeds - mean) / spread
    past = np.stack([own[starts + lag] for lag in range(LAGS)], axis=-1).transpose(1, 0, 2)
    times = starts + LAGS + AHEAD - 1
    phases = 2 * np.pi * np.outer(times / day, np.arange(1, harmonics + 1))
    shared = np.concatenate([np.ones((len(starts), 1)), np.sin(phases), np.cos(phases)], axis=1)
    everywhere = np.broadcast_to(shared, (past.shape[0], *shared.shape))
    return Examples(np.concatenate([past, everywhere], axis=-1), own[times].T, times, speeds[starts + LAGS - 1].T)


def condensed(given: Examples) -> tuple[Any, Any]:
    """Few rows with the same mean squared error for every linear forecast: R of [inputs, targets] = QR, scaled."""
    table = np.concatenate([given.inputs, given.targets[..., None]], axis=-1)
    factor = np.linalg.qr(table, mode="r") * (table.shape[2] / table.shape[1]) ** 0.5
    return factor[..., :-1], factor[..., -1]


def scores(forecast: Any, truth: Any) -> dict[str, float]:
    """Mean absolute error, and root of the mean squared error, in miles per hour."""
    return {"mae": float(np.abs(forecast - truth).mean()), "rmse": float(((forecast - truth) ** 2).mean() ** 0.5)}


def run_traffic(config: TrafficConfig, run: Any) -> dict[str, Any]:
    """A row for each forecast and seed."""
    import jax
    import jax.numpy as jnp

    from hyperpush.big_fed.bilinear import coefficients
    from hyperpush.errors import InvalidInput
    from hyperpush.studies.data.traffic import DAY, traffic

    made = traffic(config.data, seed=config.seed)
    speeds, n = made.speeds, made.speeds.shape[1]
    edges = [config.train_days * DAY, (config.train_days + config.validation_days) * DAY]
    if edges[-1] + DAY > len(speeds):
        allowed = f"a sum of at most {len(speeds) // DAY - 1}: a day is left to test on"
        raise InvalidInput("train_days, validation_days", (config.train_days, config.validation_days), allowed)
    known = speeds[: edges[0]]
    mean, spread = known.mean(0), np.maximum(known.std(0), 0.1)
    parts = [
        examples(speeds, begin, end, config.harmonics, mean, spread, DAY)
        for begin, end in zip((0, *edges), (*edges, len(speeds)), strict=True)
    ]
    test = parts[2]
    truth = speeds[test.times].T
    by_time = known.reshape(-1, DAY, n).mean(0)

    def in_miles(coefficients: Any) -> Any:
        return np.einsum("nmf,nf->nm", test.inputs, coefficients) * spread[:, None] + mean[:, None]

    matrix, right = condensed(parts[0])
    fitted = (np.linalg.pinv(matrix) @ right[..., None])[..., 0]
    rows: list[dict[str, Any]] = []

    def add(method: str, seed: int | None, forecast: Any, **more: Any) -> None:
        rows.append({"method": method, "seed": seed, **scores(forecast, truth), **more})
        run.record(**rows[-1])

    add("last value", None, test.last)
    add("mean at the time of day", None, by_time[test.times % DAY].T)
    add("own least squares", None, in_miles(fitted))

    generator = np.random.default_rng(config.seed)
    weights = made.nearness
    if config.rewire == "random":
        order = generator.permutation(n)
        weights = weights[np.ix_(order, order)]
    starts = [start(config, n, parts[0].inputs.shape[-1], seed) for seed in seeds_of(config)]
    stacked = [np.stack(each) for each in zip(*starts, strict=True)]
    same = [jax.tree.map(lambda leaf: np.stack([leaf] * config.seeds), condensed(part)) for part in parts]
    club = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.zeros(()).dtype), Club(*same, *stacked))
    near = cosine(config, weights, self_loops=config.self_loops)
    everyone = [big_fed(config, "BiG-Fed", near), *local_and_averaged(config)]
    kept = {}
    with run.progress("methods", len(everyone)) as bar:
        for method in everyone:
            errors, params, hypers = curves(method, club)
            place = best_of(errors[:, :, -1:])
            kept[method.name] = errors[place, :, :, 2]
            chosen = jax.vmap(jax.vmap(coefficients))(jnp.asarray(params[place]), jnp.asarray(hypers[place]))
            choice = {"steps": list(method.steps[place]), "at_edge": place_at_edge(method.steps, place)}
            for seed, found in zip(seeds_of(config), np.asarray(chosen), strict=True):
                add(method.name, seed, in_miles(found), **choice)
            bar.advance()
    summary = summarized(rows)
    run.table(f"an hour ahead, {n} sensors, {made.source}", list(summary[0]), [list(row.values()) for row in summary])
    _draw(run, kept)
    return {"source": made.source, "sensors": n, "rows": rows, "summary": summary}


def seeds_of(config: TrafficConfig) -> range:
    return range(config.seed, config.seed + config.seeds)


def start(config: TrafficConfig, clients: int, features: int, seed: int) -> tuple[Any, Any]:
    """The same layers for all, as PyTorch starts them: params and kernels."""
    generator, width = np.random.default_rng(seed), config.width
    scale = np.array([features**-0.5] * features + [width**-0.5])
    layers = generator.uniform(-1, 1, (width, features + 1)) * scale
    kernel = generator.uniform(-1, 1, (width, width)) * width**-0.5
    return np.broadcast_to(layers, (clients, *layers.shape)), np.broadcast_to(kernel, (clients, width, width))


def summarized(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and spreads over seeds, by method, and the steps it chose."""
    found = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        row: dict[str, Any] = {"method": name}
        for score in ("mae", "rmse"):
            each = np.array([line[score] for line in own])
            row |= {score: plain(each.mean()), f"{score}_spread": plain(each.std())}
        steps = own[0].get("steps")
        row |= {"steps": steps and " ".join(f"{step:.3g}" for step in steps), "at_edge": own[0].get("at_edge")}
        found.append(row)
    return found


def _draw(run: Any, kept: dict[str, Any]) -> None:
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    figure, (axis,) = panels()
    lines = [Curve(name, np.arange(1, each.shape[1] + 1), each.mean(0), each.std(0)) for name, each in kept.items()]
    error_curves(axis, lines, x_label="rounds", y_label="test error, in squared spreads", log_x=True)
    run.figure("test-error", figure)


EXPERIMENT = Experiment(
    "traffic",
    "Speeds an hour ahead at road sensors: BiG-Fed, training alone, FedAvg and simple forecasts.",
    TrafficConfig,
    run_traffic,
)
