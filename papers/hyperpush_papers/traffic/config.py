"""Forecasts at road sensors, an hour ahead: BiG-Fed against training alone, FedAvg and simple forecasts.

Each sensor is a client. It forecasts its speed 12 steps of five minutes ahead, from its last 12 speeds and the time of
day. Models are linear layers with a shared middle layer. The graph is that of the roads (docs/guides/big-fed.md).
"""

from typing import Annotated, Literal

from hyperpush.base.limits import whole
from hyperpush_papers.big_fed.config import Tuned
from hyperpush_papers.common.options import Count, Positives, Whole, option, study


class TrafficConfig(Tuned):
    """Options of the study of speed forecasts."""

    rounds: Annotated[int, whole(10)] = option(200, "Rounds of every method.")
    seeds: Count = option(3, "Runs, each with a start of its own.")
    rates: Positives = option(tuple(0.003125 * 2**k for k in range(10)), "Inner steps to choose from.")
    outer_steps: Positives = option((0.001, 0.01, 0.1, 1.0), "First outer steps to choose from.")
    solver_steps: Count = option(8, "Conjugate gradient steps of every solve with a block.")
    data: Literal["auto", "los-loop", "synthetic"] = option("auto", "auto: the files if they are there.")
    train_days: Count = option(4, "Days to train on, from the first.")
    validation_days: Count = option(1, "Days after them to choose steps on.")
    harmonics: Whole = option(2, "Waves per day that forecasts may follow.")
    self_loops: bool = option(True, "Whether a sensor is one of its own neighbors.")
    rewire: Literal["no", "random"] = option("no", "random: sensors are given each other's places.")


EXPERIMENT = study(
    "traffic",
    "Speeds an hour ahead at road sensors: BiG-Fed, training alone, FedAvg and simple forecasts.",
    TrafficConfig,
)
