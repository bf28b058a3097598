"""How a study declares itself and its options, and types of options that several studies have."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hyperpush.runs.experiment import Experiment, defer
from hyperpush.spec.config import Config

Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
Seed = Annotated[int, Field(ge=0)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(lambda given: _check_different(given))]
NetworkOptions = Annotated[dict[str, Any], AfterValidator(lambda given: _check_network_options(given))]
Positive = Annotated[float, Field(gt=0)]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1)]
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]
Portion = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["float32", "float64"]


def _check_different(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("seeds that differ")
    return seeds


def _check_network_options(options: dict[str, Any]) -> dict[str, Any]:
    if {"name", "clients"} & set(options):
        raise ValueError(
            "options of the network other than name and clients, which the study's network and clients say"
        )
    return options


def option(default: Any, description: str, **limits: Any) -> Any:
    """A field of a configuration: its default, one line on what it does, and what pydantic is to check besides."""
    return Field(default=default, description=description, **limits)


def study(name: str, summary: str, config: type[Config], **more: Any) -> Experiment:
    """The study with these options; the module `study` beside that of the options has the function `run`.

    `more` are further fields of `Experiment`: how it is tuned, and what refuses options before a sweep.
    """
    return Experiment(name, summary, config, defer(f"{config.__module__.removesuffix('config')}study:run"), **more)
