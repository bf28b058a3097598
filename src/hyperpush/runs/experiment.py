"""What can be run by name: a study, a benchmark or a spec."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel


@dataclass(frozen=True)
class Tuning:
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
    config: type[BaseModel]
    run: Callable[[Any, Any], dict[str, Any]]
    tuning: Tuning | None = None
    check: Callable[[Any], None] | None = None


def defer(path: str) -> Callable[..., Any]:
    """The function `module:name`, imported when it is called: naming it imports no JAX."""
    module, _, name = path.partition(":")

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    return call
