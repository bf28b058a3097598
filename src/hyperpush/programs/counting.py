"""Count the gradients and products of a computation from its trace.

A gradient or product marks its result with an identity operation, which costs nothing at run time and stays in the
traced program. Counting walks that program. Unused results are not counted. A mark in a loop of known length counts
once per iteration, and under `jax.vmap` once per member. A derivative of the inner gradient, forward or backward,
counts as a product with the Hessian. The author of a loop that ends on a condition must declare its limit (`repeated`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import PyTree

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput

Kind = Literal["hessian_products", "jacobian_products", "gradients", "metrics"]
Work = Counter[str]  # number of results by kind, and under `accesses(name)` of those that used the data set `name`
Labels = Callable[[Mapping[str, Any]], tuple[str, ...]]  # names under which a mark with these parameters counts

_times: ContextVar[int | None] = ContextVar("times", default=None)
_marking: ContextVar[bool] = ContextVar("marking", default=True)


def mark(kind: Kind, result: PyTree, on: str = "", derivative: Kind | None = None) -> PyTree:
    """Return `result` unchanged, but marked as the result of one gradient or product of this kind.

    `on` names the data set that was used. `derivative` is the kind under which a derivative of the result counts.
    """
    if not _marking.get():
        return result
    leaves, structure = jax.tree.flatten(result)
    params = {"kind": kind, "on": on, "derivative": derivative, "copies": 1, "times": longest_loop()}
    return structure.unflatten(_mark.bind(*leaves, **params))


def longest_loop() -> int | None:
    """Return the limit that `repeated` declares for loops that end on a condition; None outside of `repeated`."""
    return _times.get()


@contextmanager
def without_marks() -> Iterator[None]:
    """Leave results inside unmarked: they are parts of a result that is marked outside, such as examples' gradients."""
    before = _marking.set(False)
    try:
        yield
    finally:
        _marking.reset(before)


def accesses(on: str) -> str:
    """Return the name under which `Work` counts the gradients and products that used a data set."""
    return f"accesses to {on}"


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Declare the limit of iterations of loops inside that end on a condition (`jax.lax.while_loop`, solvers)."""
    outer = _times.get()
    before = _times.set(check_integer("times", times, minimum=0) * (1 if outer is None else outer))
    try:
        yield
    finally:
        _times.reset(before)


def work_of(jaxpr: Jaxpr) -> Work:
    """Return the gradients and products of one run of a traced program.

    If the program branches, the branch with the most results of a kind counts for that kind.
    """
    return count_marks(jaxpr, _mark, lambda params: (params["kind"], accesses(params["on"])))


def count_marks(jaxpr: Jaxpr, mark: Primitive, labels: Labels) -> Counter[str]:
    """Count the passes through `mark` in one run of a traced program, by the labels of its parameters.

    A mark has the parameters `kind`, `copies` (its width under `vmap`) and `times` (from `longest_loop`). Unused
    results do not count. If the program branches, the branch with the most passes of a label counts for that label.
    """
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _count(used, mark, labels, 1, False)


def _count(jaxpr: Jaxpr, mark: Primitive, labels: Labels, runs: int, open_ended: bool) -> Counter[str]:
    total: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is mark:
            times = params["times"] if open_ended else 1
            if times is None:
                raise InvalidInput(
                    params["kind"],
                    "in a loop that ends on a condition",
                    "the same inside `with programs.counting.repeated(times)`, which declares the most iterations",
                )
            total.update(dict.fromkeys(labels(params), runs * params["copies"] * times))
        elif name == "cond":
            most: Counter[str] = Counter()
            for branch in params["branches"]:
                most |= _count(branch.jaxpr, mark, labels, runs, open_ended)
            total += most
        elif name == "custom_linear_solve":  # the other functions in `jaxprs` are for derivatives
            total += _count(params["jaxprs"].solve.jaxpr, mark, labels, runs, open_ended)
        else:
            often = runs * params["length"] if name == "scan" else runs
            for inside in jaxprs_in_params(params):
                total += _count(inside, mark, labels, often, open_ended or name == "while")
    return total


def is_mark(primitive: Primitive) -> bool:
    """Return True if a primitive marks a gradient or a product."""
    return primitive is _mark


def _batch_mark(leaves: Any, axes: Any, *, copies: int, **params: Any) -> tuple[list[Any], Any]:
    wide = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None)
    return _mark.bind(*leaves, copies=copies * wide, **params), axes


def _differentiate_mark(
    primals: Any, tangents: Any, *, derivative: Kind | None, **params: Any
) -> tuple[list[Any], Any]:
    after = _mark.bind(*primals, derivative=derivative, **params)
    return after, _mark_some(tangents, **{**params, "kind": derivative}) if derivative else tangents


def _mark_some(leaves: Any, **params: Any) -> list[Any]:
    """Return the leaves, marked unless they are symbolic zeros."""
    some = iter(_mark.bind(*(leaf for leaf in leaves if type(leaf) is not ad.Zero), **{**params, "derivative": None}))
    return [leaf if type(leaf) is ad.Zero else next(some) for leaf in leaves]


_mark = Primitive("hyperpush_mark")
_mark.multiple_results = True
_mark.def_impl(lambda *leaves, **_: list(leaves))
_mark.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(_mark, lambda ctx, *leaves, **_: leaves)
batching.primitive_batchers[_mark] = _batch_mark
ad.primitive_jvps[_mark] = _differentiate_mark
ad.primitive_transposes[_mark] = lambda cotangents, *leaves, **params: _mark_some(cotangents, **params)
