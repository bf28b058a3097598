"""Define schedules of step sizes that can be compared, hashed and written to TOML.

The numbers of these schedules can be traced. Optax's schedules cannot be used, because they branch on their numbers in
Python.
"""

import abc
import inspect
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from hyperpush.base.checks import check_arguments, check_integer, check_positive
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import Count, NonNegative, Positive, Range

StepSize = Number | Callable[[Any], Any]  # a constant, or a function of the step, counted from 0


class Schedule(Configured):
    """Base class of schedules, functions that return a number for each step t = 0, 1, …; `hp.schedule` makes them."""

    sample: ClassVar[str] = 'hp.schedule("cosine", value=…, steps=…)'
    name: ClassVar[str]

    @classmethod
    def label(cls) -> str:
        return "schedule"

    @abc.abstractmethod
    def __call__(self, step: Any) -> Any:
        """Return the number at a step; `step` is a Python, NumPy or JAX number, or an array of steps."""


class Milestones(Schedule):
    """Schedule that starts at `value` and is multiplied by `factor` at each of the steps in `at`."""

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


class ExponentialDecay(Schedule):
    """Exponential decay: `value`·`factor`^(t/`every`) at step t; with `staircase`, the exponent is rounded down."""

    name: ClassVar[str] = "exponential"

    value: Positive = eqx.field(converter=as_number)
    factor: Positive = eqx.field(converter=as_number)
    every: Count = eqx.field(static=True, default=1)
    staircase: bool = eqx.field(static=True, default=False)

    def __call__(self, step: Any) -> Any:
        exponent = step / self.every
        return self.value * self.factor ** (jnp.floor(exponent) if self.staircase else exponent)


class _Ramp(Schedule):
    """Base class of schedules that go from `value` to `final` in `steps` steps and then stay at `final`."""

    value: NonNegative = eqx.field(converter=as_number)
    steps: Count = eqx.field(static=True)
    final: NonNegative = eqx.field(converter=as_number, default=0.0)

    def __call__(self, step: Any) -> Any:
        return self.final + (self.value - self.final) * self.remains(jnp.clip(step / self.steps, 0, 1))

    @abc.abstractmethod
    def remains(self, part: Any) -> Any:
        """Return the fraction of `value` − `final` that remains after the fraction `part` of the steps, from 1 to 0."""


class LinearDecay(_Ramp):
    """Linear change from `value` to `final` in `steps` steps: a decay, or a warm-up if `final` is larger."""

    name: ClassVar[str] = "linear"

    def remains(self, part: Any) -> Any:
        return 1 - part


class CosineDecay(_Ramp):
    """Change from `value` to `final` in `steps` steps along half a cosine wave (Loshchilov and Hutter 2017)."""

    name: ClassVar[str] = "cosine"

    def remains(self, part: Any) -> Any:
        return (1 + jnp.cos(jnp.pi * part)) / 2


class Power(Schedule):
    """Power law: `scale`/(t + 1)^`exponent` at step t, for step sizes and for noise scales.

    Steps may be traced numbers, Python numbers or NumPy arrays.
    """

    name: ClassVar[str] = "power"

    scale: Positive = eqx.field(converter=as_number)
    exponent: NonNegative = eqx.field(converter=as_number, default=0.0)

    def __call__(self, step: Any) -> Any:
        return self.scale / (step + 1) ** self.exponent

    def times(self, factor: Number) -> "Power":
        """Return this schedule multiplied by `factor`, which is above 0."""
        return Power(self.scale * check_positive("factor", factor), self.exponent)


SCHEDULES: dict[str, type[Schedule]] = {
    each.name: each for each in (Milestones, ExponentialDecay, LinearDecay, CosineDecay, Power)
}


def schedule(name: str, *args: Any, **options: Any) -> Schedule:
    """Make a schedule, which gives a number for each step t = 0, 1, … and can be compared and written to TOML.

    | name | options | number at step t |
    |---|---|---|
    | `"milestones"` | value, at, factor=0.1 | value·factor^k after the first k steps of `at` |
    | `"exponential"` | value, factor, every=1, staircase=False | value·factor^(t/every) |
    | `"linear"` | value, steps, final=0 | from value to final in a straight line |
    | `"cosine"` | value, steps, final=0 | from value to final along half a cosine wave |
    | `"power"` | scale, exponent=0 | scale/(t + 1)^exponent |

    Options that take a schedule also take a number, which means a constant, or any function of t. A function cannot be
    written to TOML.

    Args:
        name: A name in the table.
        args: The options in the order of the table.
        options: The options by name. A new value of `at`, `steps`, `every` or `staircase` needs a new compilation; new
            values of all other numbers do not, because they are traced.

    Raises:
        InvalidInput: The schedule or the option does not exist, or the option is out of range.

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


def check_step_size(field: str, given: object) -> None:
    """Raise InvalidInput unless `given` is a schedule, a function of the step, or a finite number above 0."""
    if not callable(given):
        check_positive(field, given)
    elif not isinstance(given, Schedule):
        _check_function(field, given)


def _check_function(field: str, given: Callable[[Any], Any]) -> None:
    try:
        first = given(0)
        if isinstance(first, Tracer):  # a number that an enclosing jit or vmap traces has no value yet
            return
        first = np.asarray(first, float)
    except Exception as error:  # a user's function may raise anything
        said = f"a function that fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of the step, counted from 0") from error
    if first.shape or not np.isfinite(first) or first < 0:
        raise InvalidInput(field, f"a function that gives {first} at step 0", "one finite number, 0 or more, per step")


def step_size_at(step_size: StepSize, step: Any) -> Any:
    """Return the step size at a step, counted from 0."""
    return step_size(step) if callable(step_size) else step_size


def first_number(step_size: StepSize) -> float | None:
    """Return the step size at step 0, the largest of a falling schedule; None if it is traced and thus unknown."""
    with jax.ensure_compile_time_eval():  # a method may be made inside a function that JAX is tracing
        number = step_size_at(step_size, 0)
        try:
            return float(number)
        except jax.errors.ConcretizationTypeError:
            return None


def check_share(field: str, given: StepSize) -> None:
    """Raise InvalidInput unless a number, or the start of a schedule, is above 0 and at most 1."""
    check_step_size(field, given)
    first = first_number(given)
    if first is not None and first > 1:
        raise InvalidInput(field, first, "at most 1")


Rate = Annotated[StepSize, Range("above 0: a number, or a schedule", check_step_size)]
Share = Annotated[StepSize, Range("above 0 and at most 1: a number, or a schedule", check_share)]
