"""Run studies and TOML files in a run folder, and continue interrupted runs."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from hyperpush.base.config import Config
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.experiment import Experiment
from hyperpush.runs.run import Finished, carry_on, start
from hyperpush.spec.config import load_config, to_toml


def execute(
    experiment: Experiment,
    config: Config,
    out: Path | None = None,
    console: Console | None = None,
    checkpoints: Policy | None = None,
) -> Finished:
    """Run an experiment in the folder `out`, and return its result and the run.

    With `out=None`, a new folder under `runs/` is used. `resume` can continue an interrupted run only if it had
    `checkpoints`.
    """
    return start(experiment, config, to_toml(experiment.name, config), out, console, checkpoints)


def resume(
    folder: Path, known: Mapping[str, Experiment], console: Console | None = None, checkpoints: Policy | None = None
) -> Finished:
    """Continue an interrupted run; `folder` is its final folder or the hidden folder beside it."""
    return carry_on(folder, lambda file: load_config(str(file), [], known), console, checkpoints)
