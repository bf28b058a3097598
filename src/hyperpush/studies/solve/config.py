"""Solve a bilevel task, ready-made or one's own, with short options: train, estimate the hypergradient, tune, report.

A spec (a file with `[task]`, `[network]` and `[method]`) can say more.
"""

from typing import Any, Literal

from pydantic import model_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.studies.options import Count, Positive, Precision, Seed, Several, option, study


class Inner(Config):
    """The inner solver."""

    method: str = option("SGP", "Name of the inner solver, or module:Class.")
    steps: Count = option(1000, "Steps; for FedAvg rounds of one local epoch.")
    rate: Positive = option(0.5, "Learning rate.")
    milestones: tuple[Count, ...] = option((), "Steps at which the rate is divided by ten.")
    batch: Count | None = option(None, "Mini-batch size; all examples if left out.")
    order: Literal["gradient-first", "gradient-after"] = option(
        "gradient-first", "When SGP and DSGD take their gradient: before mixing or after."
    )
    epochs: Count = option(1, "Local epochs per round of FedAvg.")


class Estimation(Config):
    """The hypergradient's estimator."""

    method: str = option("HGP", "Name of the estimator, or module:Class.")
    order: Count = option(200, "Order M of the series; steps or rounds of the other methods.")
    pushes: Count | None = option(None, "Pushes S per order; if left out, 10 for HGP and TrackedHGP's own choice.")
    step: Positive | None = option(None, "Step size: SGP's last rate where SGP is reversed; if left out, 0.5.")
    batch: Count | None = option(None, "Mini-batch size; all examples if left out.")
    averaging: Literal["push", "gossip", "exact"] = option("push", "How HGP averages.")
    keep_mass: bool = option(False, "Whether HGP keeps push-sum's weights between orders.")


class Outer(Config):
    """The outer optimizer."""

    steps: int = option(10, "Outer steps; 0 only trains.", ge=0)
    rate: Positive = option(0.1, "Adam's rate.")
    restart: bool = option(True, "Train from the start before every outer step.")
    form: Literal["PDBO", "CDBO", "CDBO-Local"] = option(
        "PDBO", "Hypers of one's own; one for all; one for all, all training alone (LocalSGD, LocalGradient)."
    )
    pushes: Count = option(1, "Pushes per outer step towards one hyper for all (CDBO).")
    tracked: bool = option(True, "Whether clients track the mean hypergradient (CDBO).")


class Stopping(Config):
    """Early stopping."""

    patience: Count | None = option(None, "Outer steps without a better mean metric before the end; never if left out.")
    metric: str = option("outer-cost", "outer-cost, or your own module:function of (params, hyper, batch).")
    data: str | None = option(None, "module:function of (clients, seed); the outer cost's examples if left out.")
    mode: Literal["min", "max"] = option("min", "Which metric is better.")
    rounds: Count = option(30, "Pushes to average it.")
    weighted: bool = option(False, "Whether clients count by their number of examples.")

    @model_validator(mode="after")
    def _is_wanted(self) -> "Stopping":
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.patience is None and given:
            raise InvalidInput("stop.patience", None, f"a number of outer steps, as stop.{given[0]} is given")
        return self


class Solve(Config):
    """Options of a bilevel run."""

    problem: str = option("logistic", "A task of hp.tasks, or your own module:function of (clients, seed).")
    clients: Several = 5
    network: str = option("random-directed", "Name of the network.")
    network_options: dict[str, Any] = option({}, "Options of the network, such as probability.")
    inner: Inner = Inner()
    estimator: Estimation = Estimation()
    outer: Outer = Outer()
    stop: Stopping = Stopping()
    engine: Literal["simulate", "shard", "peer"] = option(
        "simulate", "One device, all devices of this process, or a thread per client."
    )
    seed: Seed = option(0, "Decides the data, the network and every draw.")
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


EXPERIMENT = study("solve", "Solve a bilevel task, ready-made or your own module:function.", Solve)
