"""Types of options that say in which range a number lies: `Configured` checks it when an object is made.

A range is part of an annotation's metadata. Type checkers see the plain type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from hyperpush.base.checks import check_integer, check_nonnegative, check_positive, check_probability
from hyperpush.base.numbers import Number


@dataclass(frozen=True)
class Range:
    """What a value has to be, in words and as a check that is called with the option's name and the value."""

    words: str
    check: Callable[[str, Any], Any]

    def __call__(self, field: str, given: Any) -> None:
        self.check(field, given)

    def __repr__(self) -> str:  # what `help` shows of an option: Annotated[int, 1 or more]
        return self.words


Whole = Annotated[int, Range("0 or more", partial(check_integer, minimum=0))]
Count = Annotated[int, Range("1 or more", partial(check_integer, minimum=1))]
OptionalCount = Annotated[int | None, Range("1 or more, or None", partial(check_integer, minimum=1, optional=True))]
Positive = Annotated[Number, Range("above 0", check_positive)]
OptionalPositive = Annotated[Number | None, Range("above 0, or None", partial(check_positive, optional=True))]
NonNegative = Annotated[Number, Range("0 or more", check_nonnegative)]
Probability = Annotated[Number, Range("from 0 to 1", check_probability)]
