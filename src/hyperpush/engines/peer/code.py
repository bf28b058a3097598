"""A digest of a program's computation, which parties compare: its operations, literals, captured arrays and shapes.

Every function of the program is traced for a fixed number of examples, so the size of a party's data does not matter.
Numbers of a recipe's parts, such as step sizes, are arguments of the trace and do not enter the digest.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import PyTree

from hyperpush.engines.keys import as_bits
from hyperpush.programs import ProgramRecipe
from hyperpush.programs.profile import visit_leaves

CODE_BYTES = 16
NOT_COMPARED = bytes(CODE_BYTES)
# Numbers of examples to try for the trace: first one, then enough for mini-batches drawn without replacement.
EXAMPLES = (1, 1 << 16)
# Errors that functions may raise for an unsuitable number of examples, such as fewer than a batch. All other errors are
# bugs, and end the run.
REFUSALS = (ValueError, TypeError, IndexError, AssertionError, ArithmeticError)


class Code(NamedTuple):
    """Digests of a program's code: one that parties compare, and one that may depend on this party's data."""

    common: bytes  # digest that parties compare; zeros if it is undefined
    own: bytes
    undefined: str = ""  # the reason why `common` is undefined; empty if it is defined


def code_digest(recipe: ProgramRecipe, state: PyTree, data: PyTree, clients: int) -> Code:
    """Return the digests of a program. `common` is the same at all parties that run the same code.

    `common` is undefined if the state has a row for each example, because then every party's trace differs. It is also
    undefined if the functions raise errors for all numbers of examples that are tried. Both conditions follow from the
    code alone, so `common` is undefined at all parties or at none.
    """
    if _by_example(recipe):
        return Code(NOT_COMPARED, _digest(recipe, state, data, clients), "its state has a row for each example")
    words = ""
    for examples in EXAMPLES:
        try:
            found = _digest(recipe, state, _with_examples(data, examples), clients)
            return Code(found, found)
        except REFUSALS as error:
            first = " ".join(str(error).split())[:200]
            words = f"its functions refuse {examples:,} examples ({type(error).__name__}: {first})"
    return Code(NOT_COMPARED, _digest(recipe, state, data, clients), words)


def _by_example(recipe: ProgramRecipe) -> bool:
    parts = jax.tree.leaves(recipe.parts, is_leaf=lambda each: hasattr(each, "by_example"))
    return any(any(getattr(each, "by_example", ())) for each in parts)


def _with_examples(data: PyTree, examples: int) -> PyTree:
    """Return the shapes of data with `examples` rows on axis 0."""

    def shape(leaf: Any) -> Any:
        sizes = np.shape(leaf)
        return jax.ShapeDtypeStruct((examples, *sizes[1:]) if sizes else (), leaf.dtype)

    return jax.tree.map(shape, data)


def _digest(recipe: ProgramRecipe, state: PyTree, data: PyTree, clients: int) -> bytes:
    digest = blake2b(digest_size=CODE_BYTES)

    def visit(path: Any, role: Any, f: Any, jaxpr: ClosedJaxpr | None, shapes: PyTree) -> None:
        digest.update(f"{path} {int(role)}".encode())
        if jaxpr is not None:
            _add_closed(digest, jaxpr)

    visit_leaves(recipe, state, data, clients, visit)
    return digest.digest()


def _add_closed(digest: Any, closed: ClosedJaxpr) -> None:
    _add(digest, list(closed.consts))
    _add_jaxpr(digest, closed.jaxpr)


def _add_jaxpr(digest: Any, jaxpr: Jaxpr) -> None:
    numbers: dict[Any, int] = {}

    def name(variable: Any) -> str:
        if isinstance(variable, Literal):
            _add(digest, variable.val)
            return f"literal {variable.aval}"
        return f"{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

    digest.update(" ".join(map(name, (*jaxpr.constvars, *jaxpr.invars))).encode())
    for equation in jaxpr.eqns:
        digest.update(equation.primitive.name.encode())
        digest.update(" ".join(map(name, (*equation.invars, *equation.outvars))).encode())
        for key in sorted(equation.params):
            digest.update(key.encode())
            _add(digest, equation.params[key])
    digest.update(" ".join(map(name, jaxpr.outvars)).encode())


def _add(digest: Any, value: Any) -> None:
    """Add a parameter of an operation to the digest, without its memory address."""
    if isinstance(value, ClosedJaxpr):
        _add_closed(digest, value)
    elif isinstance(value, Jaxpr):
        _add_jaxpr(digest, value)
    elif isinstance(value, Tracer):  # a number of the recipe
        digest.update(str(value.aval).encode())
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        bits = np.asarray(as_bits(value))
        digest.update(f"{bits.dtype}{bits.shape}".encode() + np.ascontiguousarray(bits).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, tuple | list):
        digest.update(f"{len(value)}".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, frozenset | set):
        _add(digest, sorted(map(str, value)))
    elif callable(value) and not isinstance(value, type):  # rules of derivatives; their operations are in the trace
        digest.update(getattr(value, "__name__", type(value).__name__).encode())
    else:
        digest.update(re.sub(" at 0x[0-9a-f]+", "", repr(value)).encode())
