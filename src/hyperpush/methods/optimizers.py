"""Describe Optax optimizers by name and options, so that they can be compared, hashed and written to TOML."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from hyperpush.base.checks import check_arguments, check_nonnegative, check_positive
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.numbers import as_number
from hyperpush.base.options import Configured
from hyperpush.base.schedules import Schedule, StepSize, check_step_size

BY_NAME = "by-name"
# Options that are traced, because rounding them to float32 does no harm. All other options stay Python numbers: Optax
# computes 1 − b2, which would lose digits with a traced b2.
_TRACED = ("learning_rate", "weight_decay", "momentum")
# Optimizers that do not work here. A client's step does not provide the value of the cost, which the first two need,
# or the random key that the third needs. The last is deprecated.
_UNSUITED = ("lbfgs", "polyak_sgd", "noisy_sgd", "optimistic_adam")


class Optimizer(Configured):
    """An Optax optimizer, described by its name and options; `hp.optimizer` makes it."""

    name: str = eqx.field(static=True)
    traced: tuple[str, ...] = eqx.field(static=True)  # names of the options in `numbers`
    numbers: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    @classmethod
    def usage(cls) -> str:
        return 'hp.optimizer("adam", learning_rate=…)'

    def options(self) -> dict[str, Any]:
        """Return the options with which the optimizer was made, by name."""
        return {**dict(zip(self.traced, self.numbers, strict=True)), **dict(self.constants)}

    def with_options(self, **changes: Any) -> "Optimizer":
        return optimizer(self.name, **{**self.options(), **changes})

    def build(self) -> optax.GradientTransformation:
        """Return the Optax gradient transformation that this object describes."""
        return _optimizers()[self.name](**self.options())


class ByName(Optimizer):
    """A separate optimizer for each entry of a dict of params; `hp.optimizer("by-name", …)` makes it."""

    @staticmethod
    def of(parts: Mapping[str, Any]) -> "ByName":
        """Return the optimizer that updates each entry of a dict by the optimizer in `parts` with the same name."""
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
    """Describe an Optax optimizer by name and options, so that it can be compared and written to TOML.

    Args:
        name: Name of the optimizer in Optax, such as `"sgd"`, `"adam"`, `"adamw"`, `"rmsprop"` or `"lion"`. With
            `"by-name"`, the options are optimizers, one for each entry of a dict, such as the hypers of several
            recipes.
        options: Options of the Optax optimizer, by name. `learning_rate` is required: a number above 0 or
            `hp.schedule(…)`. New numbers for `learning_rate`, `weight_decay` and `momentum` need no compilation.

    Raises:
        InvalidInput: The optimizer or the option does not exist in Optax, or the option is of the wrong kind.

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
    """Raise InvalidInput for options that Optax accepts but with which the first step fails."""
    try:
        jax.eval_shape(lambda x: made.build().update(x, made.build().init(x), x), jnp.zeros(()))
    except Exception as error:  # Optax may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidInput(label, constants, f"options that Optax can use ({reason})") from error


@lru_cache(maxsize=1)
def _optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Return the functions of Optax that make optimizers, by name, except `_UNSUITED`."""
    functions = {name: each for name, each in vars(optax).items() if inspect.isfunction(each)}
    return {
        name: each
        for name, each in functions.items()
        if "learning_rate" in inspect.signature(each).parameters
        and not name.startswith(("scale_by_", "_"))
        and name not in _UNSUITED
    }


def check_optimizer(name: str, step_size: object, optimizer: object) -> None:
    """Raise InvalidInput unless a solver has either a step size or an optimizer; `name` is the solver's name."""
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
    """Return plain SGD for a step size, else the transformation of the optimizer. One of the arguments is None."""
    if optimizer is None:
        return optax.sgd(cast(float, step_size))  # the step size may also be a schedule
    return optimizer.build() if isinstance(optimizer, Optimizer) else optimizer


def as_transformation(field: str, given: Any) -> optax.GradientTransformation:
    """Return the transformation of `hp.optimizer(…)`, or an Optax transformation as it is.

    Anything else raises InvalidInput.
    """
    if isinstance(given, Optimizer):
        return given.build()
    if isinstance(given, optax.GradientTransformation):
        return given
    raise InvalidInput(field, given, 'hp.optimizer("adam", learning_rate=…), or an Optax transformation')
