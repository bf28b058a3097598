"""Plan of a sweep: check all values before anything runs, and list the runs."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

from hyperpush.base.config import Config, as_table, option, read_config
from hyperpush.base.errors import InvalidInput
from hyperpush.base.limits import Whole, whole
from hyperpush.runs.experiment import Experiment, SweepRule
from hyperpush.spec.config import configure, read_source, set_option, to_toml, validate

Phase = Literal["tuning", "reported"]
# Learning rates from 10^-0.5 to 10^-3, by factors of 10^-0.5, for all methods: the grid of Terashita and Hara,
# "Decentralized hyper-gradient computation over time-varying directed networks".
RATES = tuple(float(f"{10 ** (-half / 2):.3g}") for half in range(1, 7))
MOST_SEEDS = 1000  # largest number of reported seeds; tuning seeds start after them


class Sweep(Config):
    """Options for tuning methods and for reporting them."""

    seeds: Annotated[int, whole(1, MOST_SEEDS)] = option(3, "Reported runs of every method: seed, seed + 1, …")
    tuning_seeds: Whole = option(1, "Runs of every setting to choose by; 0: nothing is tuned.")
    grid: dict[str, Any] = option(
        {}, "Options to tune and their values; if left out, learning rates from 10^-0.5 to 10^-3."
    )
    compare: dict[str, Any] = option(
        {}, "Options to compare and their values, each tuned by itself; if left out, the methods."
    )
    validation: str | None = option(None, "Field of a result's row to choose by.")
    test: tuple[str, ...] = option((), "Fields of a result's row to report.")
    better: Literal["higher", "lower"] | None = option(None, "Which validation scores are better.")


class Choice(NamedTuple):
    """Values of options that are set together, and their label in tables."""

    label: str
    options: dict[str, Any]  # values by dotted option name


class Cell(NamedTuple):
    """One run of a sweep: a method with a point of its grid and a seed."""

    phase: Phase
    method: Choice
    point: Choice
    seed: int
    name: str  # name of the run's folder
    config: Config


@dataclass(frozen=True)
class Plan:
    """Plan of a sweep: the methods, the grid on which each is tuned, and the seeds."""

    experiment: Experiment
    config: Config  # all options, with the table `sweep`, as stored in `config.toml`
    values: dict[str, Any]  # the experiment's options
    seed_option: str  # name of the option with the random seed: `seed` of studies, `key` of specs
    rule: SweepRule
    methods: tuple[Choice, ...]
    points: tuple[Choice, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]

    def cell(self, phase: Phase, method: Choice, point: Choice, seed: int) -> Cell:
        """Return the run of a method with a point of the grid and a seed."""
        options = {**method.options, **point.options, self.seed_option: seed}
        config = _with_options(self.experiment, self.values, options)
        label = ",".join(part for part in (method.label, point.label, f"seed={seed}") if part)
        readable = re.sub(r"[^\w=.,+-]+", "", label)[:80].strip(".,")
        name = f"{readable}-{_digest(to_toml(self.experiment.name, config))}"
        return Cell(phase, method, point, seed, name, config)

    def scores(self, phase: Phase) -> tuple[str, ...]:
        """Return the fields of a row that a phase reads; tuning does not read test scores."""
        return (self.rule.validation,) if phase == "tuning" else self.rule.test

    def identity(self) -> str:
        """Return a digest of the sweep's options; sweeps that differ only in the number of reported seeds share it."""
        written = as_table(self.config)
        written["sweep"].pop("seeds")
        return _digest(repr((self.experiment.name, written)))


def load(source: str, overrides: Sequence[str], known: Mapping[str, Experiment]) -> Plan:
    """Return the plan of an experiment's name or a `.toml` file, which may have a table `sweep`, and of overrides."""
    experiment, values = read_source(source, known)
    swept = {"sweep": option(Sweep(), "How methods are tuned and reported."), "__annotations__": {"sweep": Sweep}}
    config: Any = type(experiment.config.__name__, (experiment.config,), swept)
    return plan(experiment, configure(replace(experiment, config=config), values, overrides))


def plan(experiment: Experiment, config: Config) -> Plan:
    """Return every run that a sweep may need; raise an error that names the mistake."""
    values = as_table(config)
    asked = read_config(Sweep, values.pop("sweep"), "sweep")
    seed_option = "key" if "key" in values and "seed" not in values else "seed"
    if seed_option not in values:
        raise InvalidInput(
            "experiment", experiment.name, "an experiment with an option seed: hyperpush show NAME lists options"
        )
    if "seeds" in values:
        if values["seeds"] not in (1, as_table(experiment.config())["seeds"]):
            raise InvalidInput("seeds", values["seeds"], "1, or left out: sweep.seeds says how many runs are reported")
        values["seeds"] = 1
    rule = _rule(experiment, asked)
    points = _choices(experiment, values, "grid", _grid(experiment, asked))
    methods = _choices(experiment, values, "compare", _compare(experiment, asked, values))
    if both := sorted(set(points[0].options) & set(methods[0].options)):
        raise InvalidInput(f"sweep.grid.{both[0]}", both[0], "options that sweep.compare does not set")
    if len(methods) == 1 and not methods[0].label:
        methods = (Choice(experiment.name, {}),)
    first = values[seed_option]
    seeds = tuple(range(first, first + asked.seeds))
    start = first + MOST_SEEDS  # tuning seeds and reported seeds differ
    tuning_seeds = tuple(range(start, start + asked.tuning_seeds)) if len(points) > 1 else ()
    made = Plan(experiment, config, values, seed_option, rule, methods, points, tuning_seeds, seeds)
    for method, point in product(methods, points):
        cell = made.cell("reported", method, point, first)
        if experiment.check is not None:
            experiment.check(cell.config)
    return made


def _grid(experiment: Experiment, asked: Sweep) -> dict[str, Any]:
    """Return the options to tune: the requested ones, else the learning rates that the experiment declares."""
    if asked.tuning_seeds == 0 and asked.grid:
        raise InvalidInput("sweep.tuning_seeds", 0, "at least 1 with a grid to choose from")
    if asked.grid or not asked.tuning_seeds:
        return asked.grid
    if experiment.tuning is None or not experiment.tuning.rates:
        allowed = "options with their values, such as --grid 'method.steps=[5, 10]', or sweep.tuning_seeds=0"
        raise InvalidInput("sweep.grid", {}, allowed)
    return {",".join(experiment.tuning.rates): list(RATES)}


def _compare(experiment: Experiment, asked: Sweep, values: dict[str, Any]) -> dict[str, Any]:
    """Return the options to compare: the requested ones, else the experiment's methods."""
    named = experiment.tuning.methods if experiment.tuning else None
    return asked.compare or ({named: list(values[named])} if named is not None and values.get(named) else {})


def _rule(experiment: Experiment, asked: Sweep) -> SweepRule:
    """Return the requested scores, else those that the experiment declares."""
    declared = experiment.tuning or SweepRule("", ())
    validation = asked.validation or declared.validation
    test, better = asked.test or declared.test, asked.better or ("lower" if validation == "cost" else declared.better)
    columns = f"a field of the rows of {experiment.name}, which declares none"
    if experiment.name == "spec":
        columns = "cost, or a metric of [metrics]; a spec names in [sweep] what to choose by and what to report"
    if not validation:
        raise InvalidInput("sweep.validation", None, columns)
    if not test:
        if experiment.name == "spec":
            columns = f"what to report beside {validation!r}, by which it chooses: metrics of [metrics], rounds, floats"
        raise InvalidInput("sweep.test", [], columns)
    if validation in test:
        raise InvalidInput("sweep.validation", validation, "a field that is not among those reported as test scores")
    return SweepRule(validation, test, better)


def _choices(experiment: Experiment, values: dict[str, Any], table: str, axes: dict[str, Any]) -> tuple[Choice, ...]:
    """Return the product of the axes; each value is also checked alone, so that an error names its axis."""
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
        lists.append([_choice(values, names, value, table == "grid") for value in given])
        for choice in lists[-1]:
            try:
                _with_options(experiment, values, choice.options)
            except InvalidInput as error:
                raise InvalidInput(f"sweep.{table}.{error.field}", error.given, error.allowed) from None
    return tuple(
        Choice(
            ", ".join(each.label for each in own), {name: value for each in own for name, value in each.options.items()}
        )
        for own in product(*lists)
    )


def _choice(values: dict[str, Any], names: list[str], value: object, named: bool) -> Choice:
    """Return the choice of one value of an axis; all options of the axis get this value."""
    options = {name: _as_in(values, name, value) for name in names}
    return Choice(f"{names[0]}={_text(value)}" if named else _text(value), options)


def _text(value: object) -> str:
    return "+".join(map(_text, value)) if isinstance(value, list) else str(value)


def _as_in(values: dict[str, Any], name: str, value: object) -> object:
    """Wrap a single value in a list if the option is a list."""
    now: Any = values
    for part in name.split("."):
        now = now.get(part) if isinstance(now, dict) else None
    return [value] if isinstance(now, list) and not isinstance(value, list) else value


def _with_options(experiment: Experiment, values: dict[str, Any], options: Mapping[str, Any]) -> Config:
    """Return the experiment's configuration with these options replaced."""
    values = deepcopy(values)
    for name, value in options.items():
        set_option(values, name, value)
    return validate(experiment.config, values)


def _flat(axes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested tables to dotted names, since in TOML `a.b = …` is a table `a`."""
    for key, value in axes.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
