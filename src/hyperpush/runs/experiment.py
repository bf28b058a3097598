"""Define experiments: studies and specs, which the command line runs."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from hyperpush.base.config import Config
from hyperpush.base.errors import InvalidInput

EXTRAS = {"matplotlib": "pages"}


@dataclass(frozen=True)
class SweepRule:
    """How `hyperpush sweep` tunes an experiment: names of fields in its result's rows, and names of its options."""

    validation: str  # field of the score by which settings are chosen
    test: tuple[str, ...]  # fields of the scores that are reported and do not affect the choice
    better: Literal["higher", "lower"] = "higher"
    rates: tuple[str, ...] = ("rate",)  # options that all take the same value of the default grid
    methods: str | None = "methods"  # the option that lists the methods to compare


@dataclass(frozen=True)
class Experiment:
    """An experiment: its options and the function that turns them into a result.

    `run(config, run)` returns the content of `result.json`: a dict of finite numbers, strings, lists and dicts.
    `check(config)` raises InvalidInput if options do not fit each other. `hyperpush sweep` calls `check` for all runs
    before it starts the first.
    """

    name: str
    summary: str
    config: type[Config]
    run: Callable[[Any, Any], dict[str, Any]]
    tuning: SweepRule | None = None
    check: Callable[[Any], None] | None = None


def defer(path: str) -> Callable[..., Any]:
    """Return a function that imports and calls the function `module:name`.

    The module, and JAX with it, is imported at the first call.
    """
    module, _, name = path.partition(":")

    def call(*arguments: Any) -> Any:
        return getattr(import_with_extras(module), name)(*arguments)

    return call


def import_with_extras(module: str) -> ModuleType:
    """Import a module that may need packages of an extra.

    If such a package is missing, InvalidInput names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise InvalidInput(package, "not installed", f"pip install hyperpush[{EXTRAS[package]}]") from None
