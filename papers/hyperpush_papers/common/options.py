"""Declarations of studies, and types of options that several studies share."""

from typing import Annotated, Any, Literal

from hyperpush.base.config import Config
from hyperpush.base.config import option as option
from hyperpush.base.errors import InvalidInput
from hyperpush.base.limits import NONEMPTY as NONEMPTY
from hyperpush.base.limits import Count as Count
from hyperpush.base.limits import Range, interval, whole
from hyperpush.base.limits import Whole as Whole
from hyperpush.runs.experiment import Experiment, defer


def _check_different(field: str, seeds: tuple[int, ...]) -> None:
    if len(set(seeds)) < len(seeds):
        raise InvalidInput(field, list(seeds), "seeds that differ")


def _check_network_options(field: str, options: dict[str, Any]) -> None:
    if {"name", "clients"} & set(options):
        allowed = "options of the network other than name and clients, which the study's network and clients say"
        raise InvalidInput(field, options, allowed)


Several = Annotated[int, whole(2)]
Seed = Annotated[int, whole(0)]
Seeds = Annotated[tuple[Seed, ...], NONEMPTY, Range("all different", _check_different)]
NetworkOptions = Annotated[dict[str, Any], Range("without name and clients", _check_network_options)]
Positive = Annotated[float, interval(0, outside="low")]
NonNegative = Annotated[float, interval(0)]
Positives = Annotated[tuple[Positive, ...], NONEMPTY]
Counts = Annotated[tuple[Count, ...], NONEMPTY]
Portion = Annotated[float, interval(0, 1, outside="high")]
Precision = Literal["float32", "float64"]


def study(name: str, summary: str, config: type[Config], **more: Any) -> Experiment:
    """Declare a study with these options; its function `run` is in the module `study` beside the options' module.

    `more` are further fields of `Experiment`: how sweeps tune the study, and how options are checked before a sweep.
    """
    return Experiment(name, summary, config, defer(f"{config.__module__.removesuffix('config')}study:run"), **more)
