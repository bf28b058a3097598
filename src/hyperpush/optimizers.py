"""Step sizes that change by step, and optimizers, as values: they can be compared, hashed and written to TOML.

Their numbers can be traced. Optax's own schedules branch on their numbers in Python, so the formulas stand here.
"""

import abc
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from hyperpush.checks import check_arguments, check_integer, check_nonnegative, check_positive
from hyperpush.checks.ranges import Count, NonNegative, Positive, Range
from hyperpush.errors import InvalidInput, unknown
from hyperpush.method import Configured, Number, as_number

StepSize = Number | Callable[[Any], Any]  # a number, or one for each step, counted from 0


class Schedule(Configured):
    """A number for each step, counted from 0; made by `hp.schedule`."""

    sample: ClassVar[str] = 'hp.schedule("cosine", value=…, steps=…)'
    name: ClassVar[str]

    @classmethod
    def label(cls) -> str:
        return "schedule"

    @abc.abstractmethod
    def __call__(self, step: Any) -> Any:
        """The number at a step: a Python, NumPy or JAX one, or an array of them."""


class Milestones(Schedule):
    """`value`, multiplied by `factor` at each of the steps `at`."""

    name: ClassVar[str] = "milestones"

    value: Positive = eqx.field(converter=as_number)
    at: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    factor: Positive = eqx.field(converter=as_number, default=0.1)

    def __check_init__(self):
        for step in self.at:
            check_integer("schedule.at", step, minimum=0)

    def __call__(self, step: Any) -> Any:
        value = self.value
        for start in self.at:
            value = jnp.where(step >= start, self.factor * value, value)
        return value


class Exponential(Schedule):
    """`value`·`factor`^(t/`every`); with `staircase` the exponent is rounded down."""

    name: ClassVar[str] = "exponential"

    value: Positive = eqx.field(converter=as_number)
    factor: Positive = eqx.field(converter=as_number)
    every: Count = eqx.field(static=True, default=1)
    staircase: bool = eqx.field(static=True, default=False)

    def __call__(self, step: Any) -> Any:
        exponent = step / self.every
        return self.value * self.factor ** (jnp.floor(exponent) if self.staircase else exponent)


class _Ramp(Schedule):
    """From `value` to `final` in `steps` steps, then `final`."""

    value: NonNegative = eqx.field(converter=as_number)
    steps: Count = eqx.field(static=True)
    final: NonNegative = eqx.field(converter=as_number, default=0.0)

    def __call__(self, step: Any) -> Any:
        return self.final + (self.value - self.final) * self.remains(jnp.clip(step / self.steps, 0, 1))

    @abc.abstractmethod
    def remains(self, part: Any) -> Any:
        """How much of `value` − `final` is left after a part of the steps: from 1 to 0."""


class Linear(_Ramp):
    """Straight from `value` to `final` in `steps` steps: a decay, or a warm-up if `final` is larger."""

    name: ClassVar[str] = "linear"

    def remains(self, part: Any) -> Any:
        return 1 - part


class Cosine(_Ramp):
    """From `value` to `final` in `steps` steps along half a wave, then `final` (Loshchilov and Hutter 2017)."""

    name: ClassVar[str] = "cosine"

    def remains(self, part: Any) -> Any:
        return (1 + jnp.cos(jnp.pi * part)) / 2


class Power(Schedule):
    """`scale`/(t + 1)^`exponent`, for traced numbers, plain ones and NumPy arrays: for steps and for noise."""

    name: ClassVar[str] = "power"

    scale: Positive = eqx.field(converter=as_number)
    exponent: NonNegative = eqx.field(converter=as_number, default=0.0)

    def __call__(self, step: Any) -> Any:
        return self.scale / (step + 1) ** self.exponent

    def times(self, factor: Number) -> "Power":
        """The same schedule, `factor` times as large."""
        return Power(self.scale * check_positive("factor", factor), self.exponent)


SCHEDULES: dict[str, type[Schedule]] = {each.name: each for each in (Milestones, Exponential, Linear, Cosine, Power)}


def schedule(name: str, *args: Any, **options: Any) -> Schedule:
    """A number for each step t = 0, 1, …, as a value that can be compared and written to TOML.

    | name | options | number at step t |
    |---|---|---|
    | `"milestones"` | value, at, factor=0.1 | value·factor^k after the first k steps of `at` |
    | `"exponential"` | value, factor, every=1, staircase=False | value·factor^(t/every) |
    | `"linear"` | value, steps, final=0 | straight from value to final |
    | `"cosine"` | value, steps, final=0 | along half a wave from value to final |
    | `"power"` | scale, exponent=0 | scale/(t + 1)^exponent |

    A number stands for a constant one, and any function of t for others; a function cannot be written to TOML.

    Args:
        name: One of the table's.
        args: The options in the order of the table.
        options: The options by name. Numbers are traced: a new one compiles nothing. `at`, `steps`, `every` are not.

    Raises:
        InvalidInput: There is no such schedule or option, or the option is out of range.

    Example:
        >>> import hyperpush as hp
        >>> falling = hp.schedule("milestones", 0.1, at=(100, 200), factor=0.5)
        >>> print(falling(0), falling(150), falling(200))
        0.1 0.05 0.025
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise unknown("schedule", str(name), SCHEDULES)
    kind = SCHEDULES[name]
    check_arguments("schedule", inspect.signature(kind), args, options)
    return kind(*args, **options)


BY_NAME = "by-name"
# Numbers whose rounding does no harm. Others stay Python's: optax takes 1 − b2, which a traced b2 would round.
_TRACED = ("learning_rate", "weight_decay", "momentum")
# The first two need the cost's value besides its gradient, which a client's step does not have; noise needs a key.
_UNSUITED = ("lbfgs", "polyak_sgd", "noisy_sgd", "optimistic_adam")  # the last is deprecated


class Optimizer(Configured):
    """An Optax optimizer by name and options; made by `hp.optimizer`."""

    name: str = eqx.field(static=True)
    traced: tuple[str, ...] = eqx.field(static=True)  # names of
    numbers: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    @classmethod
    def usage(cls) -> str:
        return 'hp.optimizer("adam", learning_rate=…)'

    def options(self) -> dict[str, Any]:
        """The options it was made with."""
        return {**dict(zip(self.traced, self.numbers, strict=True)), **dict(self.constants)}

    def with_options(self, **changes: Any) -> "Optimizer":
        return optimizer(self.name, **{**self.options(), **changes})

    def build(self) -> optax.GradientTransformation:
        """Optax's transformation."""
        return _optimizers()[self.name](**self.options())


class ByName(Optimizer):
    """An optimizer for each entry of a dict; made by `hp.optimizer("by-name", …)`."""

    @staticmethod
    def of(parts: Mapping[str, Any]) -> "ByName":
        """The one that moves every entry by its own."""
        for name, each in parts.items():
            if not isinstance(each, Optimizer):
                raise InvalidInput(f"optimizer.{BY_NAME}.{name}", each, f"an optimizer such as {Optimizer.usage()}")
        return ByName(BY_NAME, tuple(parts), tuple(parts.values()), ())

    def build(self) -> optax.GradientTransformation:
        parts = {name: each.build() for name, each in self.options().items()}

        def init(params: Any) -> dict[str, Any]:
            found = sorted(params) if isinstance(params, Mapping) else f"a {type(params).__name__}"
            if found != sorted(parts):
                raise InvalidInput(f"optimizer.{BY_NAME}", sorted(parts), f"an optimizer for each entry of {found}")
            return {name: each.init(params[name]) for name, each in parts.items()}

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            moved = {
                name: each.update(updates[name], state[name], None if params is None else params[name])
                for name, each in parts.items()
            }
            return {name: pair[0] for name, pair in moved.items()}, {name: pair[1] for name, pair in moved.items()}

        return optax.GradientTransformation(init, update)


def optimizer(name: str, **options: Any) -> Optimizer:
    """An Optax optimizer, as a value that can be compared and written to TOML.

    Args:
        name: What Optax calls it: `"sgd"`, `"adam"`, `"adamw"`, `"rmsprop"`, `"lion"`, …. `"by-name"` moves every entry
            of a dict, such as the hypers of several recipes, by the optimizer that is given for it.
        options: Optax's, by name. `learning_rate` is a number or `hp.schedule(…)`. It, `weight_decay` and `momentum`
            are traced: a new number compiles nothing.

    Raises:
        InvalidInput: Optax has no such optimizer or option, or the option is of the wrong kind.

    Example:
        >>> import hyperpush as hp
        >>> hp.optimizer("adam", learning_rate=0.1) == hp.optimizer("adam", learning_rate=0.1)
        True
    """
    if name == BY_NAME:
        return ByName.of(options)
    known = _optimizers()
    if not isinstance(name, str) or name not in known:
        raise unknown("optimizer", str(name), [*known, BY_NAME])
    label = f"optimizer.{name}"
    check_arguments(label, inspect.signature(known[name]), (), options)
    rate = options.get("learning_rate")
    if rate is None:
        raise InvalidInput(f"{label}.learning_rate", None, "a finite number above 0, or hp.schedule(…)")
    if not isinstance(rate, Schedule):
        check_positive(f"{label}.learning_rate", rate)
    numbers = {key: as_number(options[key]) for key in _TRACED if options.get(key) is not None}
    for key in set(numbers) - {"learning_rate"}:
        check_nonnegative(f"{label}.{key}", numbers[key])
    constants = {key: value for key, value in options.items() if key not in numbers}
    for key, value in constants.items():
        if not isinstance(value, bool | int | float | str | None):
            raise InvalidInput(f"{label}.{key}", value, "a number, a text, true or false; else give Optax's own object")
    made = Optimizer(name, tuple(numbers), tuple(numbers.values()), tuple(sorted(constants.items())))
    if constants:
        _check_built(label, made, constants)
    return made


def _check_built(label: str, made: Optimizer, constants: dict[str, Any]) -> None:
    """Refuse options that Optax takes only to fail with in the first step."""
    try:
        jax.eval_shape(lambda x: made.build().update(x, made.build().init(x), x), jnp.zeros(()))
    except Exception as error:  # whatever Optax raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidInput(label, constants, f"options that Optax can use ({reason})") from error


@lru_cache(maxsize=1)
def _optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Optax's optimizers by name."""
    functions = {name: each for name, each in vars(optax).items() if inspect.isfunction(each)}
    return {
        name: each
        for name, each in functions.items()
        if "learning_rate" in inspect.signature(each).parameters
        and not name.startswith(("scale_by_", "_"))
        and name not in _UNSUITED
    }


def check_step_size(field: str, given: object) -> None:
    """Refuse what is neither a schedule, nor a function of the step, nor a finite number above 0."""
    if not callable(given):
        check_positive(field, given)
    elif not isinstance(given, Schedule):
        _check_function(field, given)


def _check_function(field: str, given: Callable[[Any], Any]) -> None:
    try:
        first = given(0)
        if isinstance(first, Tracer):  # a number of an enclosing jit or vmap has no value yet
            return
        first = np.asarray(first, float)
    except Exception as error:  # it is the user's: whatever it raises, say so
        said = f"a function that fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of the step, counted from 0") from error
    if first.shape or not np.isfinite(first) or first < 0:
        raise InvalidInput(field, f"a function that gives {first} at step 0", "one finite number, 0 or more, per step")


def step_size_at(step_size: StepSize, step: Any) -> Any:
    """The step size at a step, counted from 0."""
    return step_size(step) if callable(step_size) else step_size


def first_number(step_size: StepSize) -> float | None:
    """The step size at step 0, the largest of a schedule that falls; None where it is traced and thus not known."""
    with jax.ensure_compile_time_eval():  # a method may be made where something else is traced
        number = step_size_at(step_size, 0)
        try:
            return float(number)
        except jax.errors.ConcretizationTypeError:
            return None


def check_share(field: str, given: StepSize) -> None:
    """Refuse a number, or a schedule that starts, at 0 or below or above 1."""
    check_step_size(field, given)
    first = first_number(given)
    if first is not None and first > 1:
        raise InvalidInput(field, first, "at most 1")


Rate = Annotated[StepSize, Range("above 0: a number, or a schedule", check_step_size)]
Share = Annotated[StepSize, Range("above 0 and at most 1: a number, or a schedule", check_share)]


def check_optimizer(name: str, step_size: object, optimizer: object) -> None:
    """Refuse a solver that has neither a step size nor an optimizer, or both."""
    field, either = f"{name}.step_size", "a number or hp.schedule(…) for plain SGD, or else an optimizer"
    if optimizer is None:
        if step_size is None:
            raise InvalidInput(field, None, either)
        check_step_size(field, step_size)
    elif step_size is not None:
        raise InvalidInput(field, step_size, f"None where an optimizer is given: {either}")


def build(
    step_size: StepSize | None, optimizer: Optimizer | optax.GradientTransformation | None
) -> optax.GradientTransformation:
    """Plain SGD for a step size; else the optimizer's transformation. Exactly one of both is given."""
    if optimizer is None:
        return optax.sgd(cast(float, step_size))  # a schedule is as good
    return optimizer.build() if isinstance(optimizer, Optimizer) else optimizer


def as_transformation(field: str, given: Any) -> optax.GradientTransformation:
    """An optimizer's transformation; refuses what is neither `hp.optimizer(…)` nor one of Optax's."""
    if isinstance(given, Optimizer):
        return given.build()
    if isinstance(given, optax.GradientTransformation):
        return given
    raise InvalidInput(field, given, 'hp.optimizer("adam", learning_rate=…), or an Optax transformation')
