"""Studies, found by name.

A module of `hyperpush.studies` that defines `EXPERIMENT` is listed. Such a module imports JAX and matplotlib inside
its run function, so that `hyperpush list` and `hyperpush show` start at once.
"""

import importlib
import pkgutil

import hyperpush.studies
from hyperpush.runs.experiment import Experiment
from hyperpush.runs.spec import SPEC


def experiments() -> dict[str, Experiment]:
    """Every study of the package by name, and `spec`, which runs a TOML file with `[task]`."""
    found = [
        importlib.import_module(f"{hyperpush.studies.__name__}.{module.name}")
        for module in pkgutil.iter_modules(hyperpush.studies.__path__)
    ]
    listed: list[Experiment] = [module.EXPERIMENT for module in found if hasattr(module, "EXPERIMENT")]
    return {experiment.name: experiment for experiment in sorted([*listed, SPEC], key=lambda each: each.name)}
