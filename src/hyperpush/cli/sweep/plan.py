"""What a sweep runs: everything is checked here, before anything runs."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, create_model

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config, load_config, to_toml, validate
from hyperpush.runs.experiment import Experiment, Tuning

# 10^-0.5 to 10^-3 in half steps, for every method alike: the learning rates that Terashita and Hara, "Decentralized
# hyper-gradient computation over time-varying directed networks", choose from.
RATES = tuple(float(f"{10 ** (-half / 2):.3g}") for half in range(1, 7))


class Sweep(Config):
    """How methods are tuned and reported."""

    seeds: int = Field(default=3, ge=1, description="Reported runs of every method: seed, seed + 1, …")
    tuning_seeds: int = Field(default=1, ge=0, description="Runs of every setting to choose by; 0: nothing is tuned.")
    tuning_seed: int = Field(default=1000, ge=0, description="The first of their seeds; none of them is reported.")
    grid: dict[str, Any] = Field(
        default={}, description="Options to tune and their values; if left out, learning rates from 10^-0.5 to 10^-3."
    )
    compare: dict[str, Any] = Field(
        default={}, description="Options to compare and their values, each tuned by itself; if left out, the methods."
    )
    validation: str | None = Field(default=None, description="Field of a result's row to choose by.")
    test: tuple[str, ...] = Field(default=(), description="Fields of a result's row to report.")
    better: Literal["higher", "lower"] | None = Field(default=None, description="Which validation scores are better.")


class Choice(NamedTuple):
    """Options set together, and their name in tables."""

    label: str
    options: dict[str, Any]  # by dotted name


class Cell(NamedTuple):
    """One run."""

    method: int
    point: int
    seed: int
    name: str  # of its folder
    config: BaseModel


@dataclass(frozen=True)
class Plan:
    """Methods, the grid that each of them is tuned on, and the seeds."""

    experiment: Experiment
    config: BaseModel  # with `sweep`, as it is written down
    values: dict[str, Any]  # the experiment's options
    rule: Tuning
    methods: tuple[Choice, ...]
    points: tuple[Choice, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]

    def cell(self, method: int, point: int, seed: int) -> Cell:
        """The run of a method with a setting and a seed."""
        chosen = self.methods[method], self.points[point]
        options = {**chosen[0].options, **chosen[1].options, self.seed_option: seed}
        config = _changed(self.experiment, self.values, options)
        label = ",".join(part for part in (chosen[0].label, chosen[1].label, f"seed={seed}") if part)
        readable = re.sub(r"[^\w=.,+-]+", "", label)[:80].strip(".,")
        return Cell(method, point, seed, f"{readable}-{_digest(to_toml(self.experiment.name, config))}", config)

    @property
    def seed_option(self) -> str:
        """The option that decides every draw: `seed` of studies, `key` of specs."""
        return _seed_option(self.values)

    def tuning(self, method: int) -> list[Cell]:
        """The runs that a method's setting is chosen by."""
        return [self.cell(method, point, seed) for point in range(len(self.points)) for seed in self.tuning_seeds]

    def identity(self) -> str:
        """The same for sweeps that differ in nothing but the number of reported seeds."""
        written = self.config.model_dump(mode="json", exclude_none=True)
        written["sweep"].pop("seeds")
        return _digest(repr((self.experiment.name, written)))


def load(source: str, overrides: Sequence[str], known: Mapping[str, Experiment]) -> Plan:
    """A plan from an experiment's name or a `.toml` file, which may have a table `sweep`, and `key=value` overrides."""
    field: Any = (Sweep, Field(default=Sweep(), description="How methods are tuned and reported."))

    def with_sweep(each: Experiment) -> Experiment:
        config = create_model(each.config.__name__, __base__=each.config, sweep=field)
        return replace(each, config=config)

    found, config = load_config(source, overrides, {name: with_sweep(each) for name, each in known.items()})
    return plan(known[found.name], config)


def plan(experiment: Experiment, config: BaseModel) -> Plan:
    """Every run that a sweep may need, or an error that names what is wrong."""
    values = config.model_dump(mode="json", exclude_none=True)
    asked = validate(Sweep, values.pop("sweep"), "sweep")
    assert isinstance(asked, Sweep)
    if _seed_option(values) not in values:
        raise InvalidInput("experiment", experiment.name, "an experiment with an option seed")
    if values.get("seeds", 1) not in (1, experiment.config().model_dump().get("seeds")):
        raise InvalidInput("seeds", values["seeds"], "1, or left out: sweep.seeds says how many runs are reported")
    if "seeds" in values:
        values["seeds"] = 1
    rule = _rule(experiment, asked)
    if asked.tuning_seeds == 0 and asked.grid:
        raise InvalidInput("sweep.tuning_seeds", 0, "at least 1 with a grid to choose from")
    grid = asked.grid
    if not grid and asked.tuning_seeds:
        if experiment.tuning is None or not experiment.tuning.rates:
            raise InvalidInput("sweep.grid", {}, "at least one option with its values, or sweep.tuning_seeds = 0")
        grid = {",".join(experiment.tuning.rates): list(RATES)}
    compare = asked.compare
    named = experiment.tuning.methods if experiment.tuning else None
    if not compare and named is not None and values.get(named):
        compare = {named: list(values[named])}
    points, methods = _choices(experiment, values, "grid", grid), _choices(experiment, values, "compare", compare)
    both = sorted(set(points[0].options) & set(methods[0].options))
    if both:
        raise InvalidInput(f"sweep.grid.{both[0]}", both[0], "options that sweep.compare does not set")
    first = values[_seed_option(values)]
    tuning_seeds = tuple(range(asked.tuning_seed, asked.tuning_seed + asked.tuning_seeds)) if len(points) > 1 else ()
    seeds = tuple(range(first, first + asked.seeds))
    if set(seeds) & set(tuning_seeds):
        raise InvalidInput("sweep.tuning_seed", asked.tuning_seed, f"seeds that are not reported ({seeds})")
    if len(methods) == 1 and not methods[0].label:
        methods = (Choice(experiment.name, {}),)
    made = Plan(experiment, config, values, rule, methods, points, tuning_seeds, seeds)
    for method, point in product(range(len(methods)), range(len(points))):
        cell = made.cell(method, point, first)
        if experiment.check is not None:
            experiment.check(cell.config)
    return made


def _seed_option(values: Mapping[str, Any]) -> str:
    return "key" if "key" in values and "seed" not in values else "seed"


def _rule(experiment: Experiment, asked: Sweep) -> Tuning:
    """The scores: what is asked for, else what the experiment declares."""
    declared = experiment.tuning
    validation = asked.validation or (declared.validation if declared else None)
    test = asked.test or (declared.test if declared else ())
    better = asked.better or (declared.better if declared else "higher")
    if validation is None:
        raise InvalidInput("sweep.validation", None, f"a field of the rows of {experiment.name}: it declares none")
    if not test:
        raise InvalidInput("sweep.test", [], f"fields of the rows of {experiment.name}: it declares none")
    if validation in test:
        raise InvalidInput("sweep.validation", validation, "a field that is not among those reported as test scores")
    return Tuning(validation, test, better)


def _choices(experiment: Experiment, values: dict[str, Any], table: str, axes: dict[str, Any]) -> tuple[Choice, ...]:
    """The product of the axes; each value is checked by itself, so that an error names its axis."""
    lists: list[list[Choice]] = []
    for key, given in _flat(axes):
        where, names = f"sweep.{table}.{key}", [name.strip() for name in key.split(",")]
        if not isinstance(given, list) or not given:
            raise InvalidInput(where, given, "a list of at least one value")
        if any(value in given[:place] for place, value in enumerate(given)):
            raise InvalidInput(where, given, "values that differ")
        for name in names:
            if name in ("seed", "seeds", "key"):
                raise InvalidInput(where, name, "other options: sweep.seeds and sweep.tuning_seeds say which seeds")
            if any(name in each.options for own in lists for each in own) or names.count(name) > 1:
                raise InvalidInput(where, name, "an option that is set once")
        lists.append([_choice(values, where, names, value, table == "grid") for value in given])
        for choice in lists[-1]:
            try:
                _changed(experiment, values, choice.options)
            except InvalidInput as error:
                raise InvalidInput(f"sweep.{table}.{error.field}", error.given, error.allowed) from None
    return tuple(
        Choice(
            ", ".join(each.label for each in own), {name: value for each in own for name, value in each.options.items()}
        )
        for own in product(*lists)
    )


def _choice(values: dict[str, Any], where: str, names: list[str], value: Any, named: bool) -> Choice:
    """One value of an axis, given to all its options or, as a list, one to each."""
    each = value if len(names) > 1 and isinstance(value, list) else [value] * len(names)
    if len(each) != len(names):
        raise InvalidInput(where, value, f"one value, or a list of {len(names)}")
    options = {name: _as_in(values, name, own) for name, own in zip(names, each, strict=True)}
    text = "/".join(map(_text, each if len(set(map(repr, each))) > 1 else each[:1]))
    return Choice(f"{names[0]}={text}" if named else text, options)


def _text(value: Any) -> str:
    return "+".join(map(_text, value)) if isinstance(value, list) else str(value)


def _as_in(values: dict[str, Any], name: str, value: Any) -> Any:
    """A single value for an option that is a list becomes a list of one."""
    now: Any = values
    for part in name.split("."):
        now = now.get(part) if isinstance(now, dict) else None
    return [value] if isinstance(now, list) and not isinstance(value, list) else value


def _changed(experiment: Experiment, values: dict[str, Any], options: Mapping[str, Any]) -> BaseModel:
    """The experiment's options with these in place."""
    values = deepcopy(values)
    for name, value in options.items():
        *parents, last = name.split(".")
        table = values
        for part in parents:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidInput(name, value, f"{part} is a single value, not a table")
        table[last] = value
    return validate(experiment.config, values, experiment.name)


def _flat(axes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tables within tables as dotted names: in TOML, a.b = … is a table a."""
    for key, value in axes.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
