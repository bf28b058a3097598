"""Check the values of options; each check raises InvalidInput with the name of the field.

Numbers that JAX holds (traced, abstract or concrete) pass, because they were checked earlier as Python numbers.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar, overload

import numpy as np

from hyperpush.base.errors import InvalidInput, unknown

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:

    def no_type_check(function: F) -> F:
        """Mark a function that checks its arguments itself.

        The run-time type checks of the tests skip such functions; static type checkers still check their calls.
        """
        return function
else:
    from typing import no_type_check as no_type_check


def is_number(given: object) -> TypeGuard[int | float | np.number]:
    """Return True for a Python or NumPy number, but not for a boolean or an array with axes."""
    if isinstance(given, np.ndarray):
        return given.ndim == 0 and given.dtype.kind in "fiu"
    return isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)


def is_jax_number(given: object) -> bool:
    """Return True for a scalar JAX array, a traced scalar, or a `jax.ShapeDtypeStruct` of a scalar."""
    # The test reads attributes, because importing JAX in this module would slow down the command line.
    jax_like = hasattr(given, "dtype") and not isinstance(given, np.ndarray | np.generic)
    return jax_like and getattr(given, "shape", None) == ()


@overload
def check_integer(field: str, given: object, minimum: int, maximum: int | None = None) -> int: ...
@overload
def check_integer(
    field: str, given: object, minimum: int, maximum: int | None = None, *, optional: Literal[True]
) -> int | None: ...
def check_integer(
    field: str, given: object, minimum: int, maximum: int | None = None, *, optional: bool = False
) -> int | None:
    """Return a whole number from `minimum` to `maximum` (None: no upper bound), else raise InvalidInput.

    With `optional=True`, None is also allowed.
    """
    if given is None and optional:
        return None
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        number = int(given)
        if number >= minimum and (maximum is None or number <= maximum):
            return number
    allowed = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else "")
    raise InvalidInput(field, given, allowed + (", or None" if optional else ""))


def check_probability(field: str, given: object) -> Any:
    """Return a number in [0, 1], else raise InvalidInput."""
    return check_number(field, given, lambda number: 0 <= number <= 1, "a number from 0 to 1")


def check_probability_range(field: str, given: object) -> tuple[float, float]:
    """Return a pair low ≤ high of numbers in [0, 1], else raise InvalidInput.

    A single number gives the pair of this number twice.
    """
    if not isinstance(given, tuple | list):
        only = check_probability(field, given)
        return only, only
    if len(given) == 2:
        low, high = (check_probability(field, end) for end in given)
        if low <= high:
            return low, high
    raise InvalidInput(field, given, "a number from 0 to 1, or a pair (low, high) of them with low ≤ high")


def check_positive(field: str, given: object, *, optional: bool = False) -> Any:
    """Return a finite number above 0, else raise InvalidInput; None passes if `optional`."""
    if given is None and optional:
        return None
    allowed = "a finite number above 0" + (", or None" if optional else "")
    return check_number(field, given, lambda number: 0 < number < float("inf"), allowed)


def check_nonnegative(field: str, given: object) -> Any:
    """Return a finite number of 0 or more, else raise InvalidInput."""
    return check_number(field, given, lambda number: 0 <= number < float("inf"), "a finite number, 0 or more")


def check_boolean(field: str, given: object) -> bool:
    """Return True or False, else raise InvalidInput."""
    if isinstance(given, bool):
        return given
    raise InvalidInput(field, given, "true or false")


def require(module: str, extra: str) -> Any:
    """Import a module that an extra of this package installs; raise InvalidInput with the extra if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        allowed = f"the extra {extra}: pip install 'hyperpush[{extra}]'"
        raise InvalidInput(package, "not installed", allowed) from None


def check_arguments(
    label: str, signature: inspect.Signature, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
) -> None:
    """Raise InvalidInput for options that a signature lacks, with the nearest name, and for missing options."""
    options = options or {}
    for option in options:
        if option not in signature.parameters:
            raise unknown(f"{label}.{option}", option, signature.parameters)
    try:
        given = signature.bind_partial(*args, **options).arguments
    except TypeError as error:
        raise InvalidInput(label, args, f"{', '.join(signature.parameters)}: {error}") from None
    for parameter in signature.parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and parameter.name not in given:
            raise InvalidInput(f"{label}.{parameter.name}", None, "a value: there is no default")


def check_number(field: str, given: object, holds: Callable[[float], bool], allowed: str) -> Any:
    """Return a number as a float if `holds(number)` is True, else raise InvalidInput.

    `holds` must return False for NaN. Numbers that JAX holds are returned unchanged.
    """
    if is_jax_number(given):
        return given
    if is_number(given):
        number = float(given)
        if holds(number):
            return number
    raise InvalidInput(field, given, allowed)
