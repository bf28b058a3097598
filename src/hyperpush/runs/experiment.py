"""What can be run by name: a study or a spec."""

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
    """What `hyperpush sweep` has to know: fields of the rows of an experiment's result, and names of its options."""

    validation: str  # the score by which settings are chosen
    test: tuple[str, ...]  # the scores that are reported, and that nothing is chosen by
    better: Literal["higher", "lower"] = "higher"
    rates: tuple[str, ...] = ("rate",)  # options that take the values of the default grid, all the same one
    methods: str | None = "methods"  # the option that lists what is to be compared


@dataclass(frozen=True)
class Experiment:
    """What can be run: its options and the function that turns them into a result.

    `run(config, run)` returns the content of `result.json`: a dict of finite numbers, strings, lists and dicts.
    `check(config)` refuses options that do not fit; `hyperpush sweep` calls it for every run before the first.
    """

    name: str
    summary: str
    config: type[Config]
    run: Callable[[Any, Any], dict[str, Any]]
    tuning: SweepRule | None = None
    check: Callable[[Any], None] | None = None


def defer(path: str) -> Callable[..., Any]:
    """The function `module:name`, imported when it is called: naming it imports no JAX."""
    module, _, name = path.partition(":")

    def call(*arguments: Any) -> Any:
        return getattr(import_with_extras(module), name)(*arguments)

    return call


def import_with_extras(module: str) -> ModuleType:
    """A module that may need packages which only an extra installs; a missing one is one line that names it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise InvalidInput(package, "not installed", f"pip install hyperpush[{EXTRAS[package]}]") from None
