"""Define annotations with ranges for the options of methods, whose numbers JAX may trace.

`Configured` checks the ranges at construction. A range is metadata of the annotation, so type checkers see only the
plain type.
"""

from functools import partial
from typing import Annotated

from hyperpush.base.checks import check_nonnegative, check_positive, check_probability
from hyperpush.base.limits import Count as Count
from hyperpush.base.limits import OptionalCount as OptionalCount
from hyperpush.base.limits import Range as Range
from hyperpush.base.limits import Whole as Whole
from hyperpush.base.numbers import Number

Positive = Annotated[Number, Range("above 0", check_positive)]
OptionalPositive = Annotated[Number | None, Range("above 0, or None", partial(check_positive, optional=True))]
NonNegative = Annotated[Number, Range("0 or more", check_nonnegative)]
Probability = Annotated[Number, Range("from 0 to 1", check_probability)]
