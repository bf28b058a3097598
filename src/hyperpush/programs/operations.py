"""Count the arithmetic of a traced leaf roughly, to tell programs of milliseconds from programs of minutes."""

from math import prod
from typing import Any

from jax.extend.core import Jaxpr, jaxprs_in_params

OPEN_ENDED = 30  # iterations assumed for a loop that ends on a condition or a vote, because its limit says little
DRAWN = 250  # operations that take as much time as drawing one random number

_RANDOM = ("random_bits", "random_fold_in", "random_split")
_FOLDS = ("reduce", "arg", "cum", "sort")  # prefixes of primitives whose cost is the size of their inputs


def operations(jaxpr: Jaxpr) -> int:
    """Return the number of additions, multiplications and similar operations in one run of a traced program."""
    return sum(map(_of, jaxpr.eqns))


def largest(jaxpr: Jaxpr) -> int:
    """Return the bytes of the largest array that a traced program computes."""
    inside = [inner for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)]
    return max([_bytes(made) for eqn in jaxpr.eqns for made in eqn.outvars] + [largest(each) for each in inside] + [0])


def equations(jaxpr: Jaxpr) -> int:
    """Return the number of equations of a traced program with its inner programs, a measure of compile time."""
    return sum(1 + sum(map(equations, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _of(eqn: Any) -> int:
    name, params, made = eqn.primitive.name, eqn.params, sum(map(_size, eqn.outvars))
    if name == "cond":
        return max(operations(branch.jaxpr) for branch in params["branches"])
    if inside := list(jaxprs_in_params(params)):
        often = {"scan": params.get("length", 1), "while": OPEN_ENDED}.get(name, 1)
        return often * sum(map(operations, inside))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * made * prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        return 2 * made * _size(eqn.invars[1]) // max(eqn.invars[1].aval.shape[features], 1)
    if name in _RANDOM:
        return DRAWN * made
    return sum(map(_size, eqn.invars)) if name.startswith(_FOLDS) else made


def _bytes(variable: Any) -> int:
    return _size(variable) * getattr(getattr(variable.aval, "dtype", None), "itemsize", 1)


def _size(variable: Any) -> int:
    return getattr(variable.aval, "size", 1)
