"""A small experiment that uses every feature of a run."""

from typing import Annotated, Any, Literal

import jax.numpy as jnp

from hyperpush.base.config import Config, option
from hyperpush.base.errors import Diverged
from hyperpush.base.figures import Curve, error_curves, panels
from hyperpush.base.limits import NONEMPTY, PositiveFloat, whole
from hyperpush.runs.experiment import Experiment
from hyperpush.runs.run import StudyRun


class Network(Config):
    kind: Literal["ring", "random-directed"] = "ring"
    probability: tuple[float, float] = (0.4, 0.8)


class TinyConfig(Config):
    steps: Annotated[int, whole(1, 100)] = option(3, "How many steps to take.")
    rate: PositiveFloat = 0.5
    batch: int | Literal["all"] = "all"
    pushes: Annotated[tuple[int, ...], NONEMPTY] = (1, 10)
    network: Network = Network(probability=(0.1, 0.2))
    limit: float | None = None
    precision: Literal["float32", "float64"] = "float32"
    fail: Literal["no", "clear", "bug", "interrupt", "not-finite"] = "no"


def run_tiny(config: TinyConfig, run: StudyRun) -> dict[str, Any]:
    values = jnp.ones(2)
    with run.progress("steps", config.steps) as bar:
        for step in range(config.steps):
            values = values * config.rate
            run.record(step=step, value=values[0])
            bar.step()
        bar.update(config.steps)
    run.save_models("final", {"layer": {"w": jnp.arange(6.0).reshape(2, 3), "b": values}})
    figure, (axes,) = panels()
    error_curves(axes, [Curve("rate", [1, 2], [1.0, 0.1], [0.1, 0.2])], x_label="step", y_label="error")
    run.figure("errors", figure)
    run.table("values", ("client", "value"), [(client, float(value)) for client, value in enumerate(values)])
    match config.fail:
        case "clear":
            raise Diverged("tiny", 3, "lower rate")
        case "bug":
            raise RuntimeError("a bug")
        case "interrupt":
            raise KeyboardInterrupt
    value = float("nan") if config.fail == "not-finite" else values
    return {"steps": config.steps, "value": value, "dtype": str(values.dtype)}


TINY = Experiment("tiny", "Halve a number.", TinyConfig, run_tiny)
