"""Optimizers as values: they can be compared, hashed and written to TOML."""

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
# Numbers whose rounding does no harm. Others stay Python numbers: optax takes 1 − b2, which a traced b2 would round.
_TRACED = ("learning_rate", "weight_decay", "momentum")
# A client's step lacks the cost's value, which the first two need, and the key that noise needs.
_UNSUITED = ("lbfgs", "polyak_sgd", "noisy_sgd", "optimistic_adam")  # the last is deprecated


class Optimizer(Configured):
    """An Optax optimizer by name and options; made by `hp.optimizer`."""

    name: str = eqx.field(static=True)
    traced: tuple[str, ...] = eqx.field(static=True)  # names of `numbers`
    numbers: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    @classmethod
    def usage(cls) -> str:
        return 'hp.optimizer("adam", learning_rate=…)'

    def options(self) -> dict[str, Any]:
        """Return the options that it was made with."""
        return {**dict(zip(self.traced, self.numbers, strict=True)), **dict(self.constants)}

    def with_options(self, **changes: Any) -> "Optimizer":
        return optimizer(self.name, **{**self.options(), **changes})

    def build(self) -> optax.GradientTransformation:
        """Return Optax's transformation."""
        return _optimizers()[self.name](**self.options())


class ByName(Optimizer):
    """An optimizer for each entry of a dict; made by `hp.optimizer("by-name", …)`."""

    @staticmethod
    def of(parts: Mapping[str, Any]) -> "ByName":
        """Return the optimizer that updates each entry by its own part."""
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
    """Make an Optax optimizer, as a value that can be compared and written to TOML.

    Args:
        name: Its name in Optax: `"sgd"`, `"adam"`, `"adamw"`, `"rmsprop"`, `"lion"`, …. `"by-name"` takes an optimizer
            for each entry of a dict, such as the hypers of several recipes.
        options: Options of Optax by name. `learning_rate` is a number or `hp.schedule(…)`. It, `weight_decay` and
            `momentum` are traced: a new number does not compile anew.

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
    """Refuse options that Optax accepts but fails with in the first step."""
    try:
        jax.eval_shape(lambda x: made.build().update(x, made.build().init(x), x), jnp.zeros(()))
    except Exception as error:  # Optax may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidInput(label, constants, f"options that Optax can use ({reason})") from error


@lru_cache(maxsize=1)
def _optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Return Optax's optimizers by name."""
    functions = {name: each for name, each in vars(optax).items() if inspect.isfunction(each)}
    return {
        name: each
        for name, each in functions.items()
        if "learning_rate" in inspect.signature(each).parameters
        and not name.startswith(("scale_by_", "_"))
        and name not in _UNSUITED
    }


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
    """Return plain SGD for a step size, else the optimizer's transformation. Exactly one of both is given."""
    if optimizer is None:
        return optax.sgd(cast(float, step_size))  # or a schedule
    return optimizer.build() if isinstance(optimizer, Optimizer) else optimizer


def as_transformation(field: str, given: Any) -> optax.GradientTransformation:
    """Return an optimizer's transformation; refuse all but `hp.optimizer(…)` and transformations of Optax."""
    if isinstance(given, Optimizer):
        return given.build()
    if isinstance(given, optax.GradientTransformation):
        return given
    raise InvalidInput(field, given, 'hp.optimizer("adam", learning_rate=…), or an Optax transformation')
