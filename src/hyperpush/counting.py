"""How many gradients and products a computation does, read off its trace.

A gradient or product marks its result with an identity that costs nothing when it runs and stays in the traced program.
Counting walks that program: what nobody uses is not counted, a loop of known length counts as often as it runs, and
`jax.vmap` as often as it is wide. A derivative of the inner gradient, forward or backward, is a product with the
Hessian. How often a loop runs that ends on a condition, only its author can say (`repeated`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import PyTree

from hyperpush.checks import whole
from hyperpush.errors import InvalidInput

Kind = Literal["hessian_products", "jacobian_products", "gradients"]
Work = Counter[Kind]

_times: ContextVar[int | None] = ContextVar("times", default=None)


def marked(kind: Kind, result: PyTree, derivative: Kind | None = None) -> PyTree:
    """The same numbers, marked as what one gradient or product gave; `derivative` says what a derivative counts as."""
    leaves, structure = jax.tree.flatten(result)
    return structure.unflatten(_mark.bind(*leaves, kind=kind, derivative=derivative, copies=1, times=_times.get()))


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Say how often the loops traced inside run, at most, that end on a condition (`jax.lax.while_loop`, solvers)."""
    outer = _times.get()
    before = _times.set(whole("times", times, least=0) * (1 if outer is None else outer))
    try:
        yield
    finally:
        _times.reset(before)


def work_of(jaxpr: Jaxpr) -> Work:
    """The gradients and products in one run of a traced program; where it branches, the most of each kind."""
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _work(used, 1, False)


def _work(jaxpr: Jaxpr, runs: int, open_ended: bool) -> Work:
    total = Work()
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is _mark:
            times = params["times"] if open_ended else 1
            if times is None:
                raise InvalidInput(
                    params["kind"],
                    "in a loop that ends on a condition",
                    "there with `hyperpush.counting.repeated(times)` around the loop: how often it runs at most",
                )
            total[params["kind"]] += runs * params["copies"] * times
        elif name == "cond":
            most = Work()
            for branch in params["branches"]:
                most |= _work(branch.jaxpr, runs, open_ended)
            total += most
        elif name == "custom_linear_solve":  # its other functions serve derivatives
            total += _work(params["jaxprs"].solve.jaxpr, runs, open_ended)
        else:
            often = runs * params["length"] if name == "scan" else runs
            for inside in jaxprs_in_params(params):
                total += _work(inside, often, open_ended or name == "while")
    return total


def _batched(leaves: Any, axes: Any, *, copies: int, **params: Any) -> tuple[list[Any], Any]:
    wide = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None)
    return _mark.bind(*leaves, copies=copies * wide, **params), axes


def _differentiated(primals: Any, tangents: Any, *, derivative: Kind | None, **params: Any) -> tuple[list[Any], Any]:
    after = _mark.bind(*primals, derivative=derivative, **params)
    return after, _mark_some(tangents, **{**params, "kind": derivative}) if derivative else tangents


def _mark_some(leaves: Any, **params: Any) -> list[Any]:
    """Mark the leaves that are not known to be zero."""
    some = iter(_mark.bind(*(leaf for leaf in leaves if type(leaf) is not ad.Zero), **{**params, "derivative": None}))
    return [leaf if type(leaf) is ad.Zero else next(some) for leaf in leaves]


_mark = Primitive("hyperpush_mark")
_mark.multiple_results = True
_mark.def_impl(lambda *leaves, **_: list(leaves))
_mark.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(_mark, lambda ctx, *leaves, **_: leaves)
batching.primitive_batchers[_mark] = _batched
ad.primitive_jvps[_mark] = _differentiated
ad.primitive_transposes[_mark] = lambda cotangents, *leaves, **params: _mark_some(cotangents, **params)
