"""Speeds an hour ahead at road sensors, each a client: BiG-Fed against training alone, FedAvg and simple forecasts.

A sensor forecasts its speed 12 steps of five minutes ahead from its last 12 and the time of day, with linear layers of
which the middle one is everybody's. The graph is that of the roads (docs/guides/big-fed.md).
"""

from typing import Annotated, Literal

from pydantic import Field

from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.big_fed.config import Tuned
from hyperpush.studies.options import Count, Positive


class TrafficConfig(Tuned):
    """Options of the forecast of speeds."""

    rounds: Annotated[int, Field(ge=10)] = Field(default=200, description="Rounds of every method.")
    seeds: Count = Field(default=3, description="Runs, each with a start of its own.")
    rates: tuple[Positive, ...] = Field(
        default=tuple(0.003125 * 2**k for k in range(10)), min_length=1, description="Inner steps to choose from."
    )
    outer_steps: tuple[Positive, ...] = Field(
        default=(0.001, 0.01, 0.1, 1.0), min_length=1, description="First outer steps to choose from."
    )
    solver_steps: Count = Field(default=8, description="Conjugate gradient steps of every solve with a block.")
    data: str = Field(default="auto", description="los-loop, synthetic, or auto: the files if they are there.")
    train_days: Count = Field(default=4, description="Days to train on, from the first.")
    validation_days: Count = Field(default=1, description="Days after them to choose steps on.")
    harmonics: Annotated[int, Field(ge=0)] = Field(default=2, description="Waves per day that forecasts may follow.")
    self_loops: bool = Field(default=True, description="Whether a sensor is one of its own neighbors.")
    rewire: Literal["no", "random"] = Field(default="no", description="random: sensors are given each other's places.")


EXPERIMENT = Experiment(
    "traffic",
    "Speeds an hour ahead at road sensors: BiG-Fed, training alone, FedAvg and simple forecasts.",
    TrafficConfig,
    defer("hyperpush.studies.traffic.study:run_traffic"),
)
