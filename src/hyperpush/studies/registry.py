"""Studies, found by name.

A package of `hyperpush.studies` whose module `config` defines `EXPERIMENT` is listed. That module holds the options and
imports no JAX, so that `hyperpush list` and `hyperpush show` start at once; what is run stands in the module `study`.
"""

import importlib
import pkgutil
from importlib.util import find_spec

import hyperpush.studies
from hyperpush.runs.experiment import Experiment
from hyperpush.runs.spec import SPEC


def experiments() -> dict[str, Experiment]:
    """Every study of the package by name, and `spec`, which runs a TOML file with `[task]`."""
    listed = [SPEC]
    for package in pkgutil.iter_modules(hyperpush.studies.__path__, f"{hyperpush.studies.__name__}."):
        if package.ispkg and find_spec(f"{package.name}.config"):
            config = importlib.import_module(f"{package.name}.config")
            listed += [config.EXPERIMENT] if hasattr(config, "EXPERIMENT") else []
    return {experiment.name: experiment for experiment in sorted(listed, key=lambda each: each.name)}
