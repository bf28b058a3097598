"""Solve a bilevel task, ready-made or one's own, with short options: train, estimate the hypergradient, tune, report.

A spec (a file with `[task]`, `[network]` and `[method]`) can say more.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Precision, Several


class Inner(Config):
    """The inner solver."""

    method: str = Field(default="SGP", description="Name of the inner solver, or module:Class.")
    steps: Count = Field(default=1000, description="Steps; for FedAvg rounds of one local epoch.")
    rate: Positive = Field(default=0.5, description="Learning rate.")
    milestones: tuple[Count, ...] = Field(default=(), description="Steps at which the rate is divided by ten.")
    batch: Count | None = Field(default=None, description="Mini-batch size; all examples if left out.")
    order: Literal["gradient-first", "gradient-after"] = Field(
        default="gradient-first", description="When SGP and DSGD take their gradient: before mixing or after."
    )
    epochs: Count = Field(default=1, description="Local epochs per round of FedAvg.")


class Estimation(Config):
    """The hypergradient's estimator."""

    method: str = Field(default="HGP", description="Name of the estimator, or module:Class.")
    order: Count = Field(default=200, description="Order M of the series; steps or rounds of the other methods.")
    pushes: Count | None = Field(
        default=None, description="Averaging steps S per order: 10 for HGP, found by TrackedHGP itself, if left out."
    )
    step: Positive | None = Field(
        default=None,
        description="Step size, SGP's last rate for methods that reverse SGP; 0.5, or TrackedHGP's own, if left out.",
    )
    batch: Count | None = Field(default=None, description="Mini-batch size; all examples if left out.")
    averaging: Literal["push", "gossip", "exact"] = Field(default="push", description="How HGP averages.")
    keep_mass: bool = Field(default=False, description="Whether HGP keeps push-sum's weights between orders.")


class Outer(Config):
    """The outer optimizer."""

    steps: int = Field(default=10, ge=0, description="Outer steps; 0 only trains.")
    rate: Positive = Field(default=0.1, description="Adam's rate.")
    restart: bool = Field(default=True, description="Train from the start before every outer step.")
    form: Literal["PDBO", "CDBO", "CDBO-Local"] = Field(
        default="PDBO",
        description="Hypers of one's own; one for all; one for all, all training alone (LocalSGD, LocalGradient).",
    )
    pushes: Count = Field(default=1, description="Pushes per outer step towards one hyper for all (CDBO).")
    tracked: bool = Field(default=True, description="Whether clients track the mean hypergradient (CDBO).")


class Stopping(Config):
    """Early stopping."""

    patience: Count | None = Field(
        default=None, description="Outer steps without a better mean metric before the end; never if left out."
    )
    metric: str = Field(
        default="outer-cost", description="outer-cost, or your own module:function of (params, hyper, batch)."
    )
    data: str | None = Field(
        default=None,
        description="Its examples: module:function of (clients, seed); those of the outer cost if left out.",
    )
    mode: Literal["min", "max"] = Field(default="min", description="Which metric is better.")
    rounds: Count = Field(default=30, description="Pushes to average it.")
    weighted: bool = Field(default=False, description="Whether clients count by their number of examples.")

    @model_validator(mode="after")
    def _is_wanted(self) -> "Stopping":
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.patience is None and given:
            raise InvalidInput("stop.patience", None, f"a number of outer steps, as stop.{given[0]} is given")
        return self


class Solve(Config):
    """Options of a bilevel run."""

    problem: str = Field(
        default="logistic", description="A task of hp.tasks, or your own module:function of (clients, seed)."
    )
    clients: Several = 5
    network: str = Field(default="random-directed", description="Name of the network.")
    network_options: dict[str, Any] = Field(default={}, description="Options of the network, such as probability.")
    inner: Inner = Inner()
    estimator: Estimation = Estimation()
    outer: Outer = Outer()
    stop: Stopping = Stopping()
    engine: Literal["simulate", "shard", "peer"] = Field(
        default="simulate", description="One device, all devices of this process, or a thread per client."
    )
    seed: int = Field(default=0, ge=0, description="Decides the data, the network and every draw.")
    precision: Precision = "float32"

    @property
    def alone(self) -> bool:
        """Whether every client trains on its own data only."""
        return self.outer.form == "CDBO-Local"

    @model_validator(mode="after")
    def _trains_alone(self) -> "Solve":
        for field, given, usual, alone in (
            ("inner.method", self.inner.method, "SGP", "LocalSGD"),
            ("estimator.method", self.estimator.method, "HGP", "LocalGradient"),
        ):
            if self.alone and given not in (usual, alone):
                raise InvalidInput(field, given, f"{alone} (or nothing), as outer.form is CDBO-Local")
        return self


EXPERIMENT = Experiment(
    "solve",
    "Solve a bilevel task, ready-made or your own module:function.",
    Solve,
    defer("hyperpush.studies.solve.study:run"),
)
