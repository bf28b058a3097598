"""Read traces: find the source line of a leaf, traces inside a trace, and calls to the host."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from hyperpush.base.errors import InvalidInput
from hyperpush.programs import Exchange

# Call-like primitives whose one inner trace takes the same inputs and gives the same outputs.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_lin"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
HOST = {"debug_print", "outside_call", "outfeed", "infeed", "ffi_call"}
# `calling_line` skips lines of these modules, because tasks only pass on the accesses of their callers.
OUTSIDE = (
    "jax",
    "equinox",
    "jaxtyping",
    "beartype",
    "contextlib",
    "functools",
    "hyperpush.privacy",
    "hyperpush.task",
)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations of a trace, including those of inner traces."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inside in jaxprs_in_params(eqn.params):
            yield from equations(inside)


def inner_trace(eqn: JaxprEqn) -> tuple[ClosedJaxpr, list[int]] | None:
    """Return the trace that a call-like equation runs once, and which inputs it takes; None for other equations."""
    if eqn.primitive.name == "custom_linear_solve":  # its other functions serve derivatives
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        places = [*range(first, first + lengths.solve), *range(sum(lengths), len(eqn.invars))]
        return eqn.params["jaxprs"].solve, places
    if eqn.primitive.name in CALLS:
        names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
        inside = next((eqn.params[name] for name in names if eqn.params.get(name) is not None), None)
        closed = ClosedJaxpr(inside, ()) if isinstance(inside, Jaxpr) else inside
        if closed is not None and len(closed.jaxpr.invars) == len(eqn.invars):
            return closed, list(range(len(eqn.invars)))
    return None


def split(inputs: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Split the inputs of a loop into the first `first`, the next `second`, and the remaining ones."""
    return inputs[:first], inputs[first : first + second], inputs[first + second :]


def refuse_host_calls(jaxpr: Jaxpr, f: Callable[..., Any]) -> None:
    """Refuse a leaf that calls back to the host or writes into references, because data cannot be followed there."""
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if "callback" in name or name in HOST or eqn.effects:
            allowed = "neither calls to the host (jax.debug.print, pure_callback, io_callback) nor references"
            raise InvalidInput(f"task.private: {place(f)}", f"{name} in a leaf", f"{allowed} in a private task's leaf")


def place(f: Callable[..., Any]) -> str:
    """Return the place in the source where a leaf's function is defined, as `file:line name`."""
    while True:
        owner = getattr(f, "__self__", None)
        if isinstance(owner, Exchange):  # its own `take` only packs what arrived for `receive`
            f = owner.receive
        elif isinstance(f, partial):
            f = f.func
        elif hasattr(f, "__wrapped__") or hasattr(f, "__func__"):
            f = getattr(f, "__wrapped__", None) or getattr(f, "__func__")  # noqa: B009
        else:
            break
    code = getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None)
    name = getattr(f, "__qualname__", type(f).__qualname__).replace("<locals>.", "")
    return f"unknown file {name}" if code is None else f"{code.co_filename}:{code.co_firstlineno} {name}"


def calling_line() -> str:
    """Return the innermost executing line, as `file:line`, outside of the modules in `OUTSIDE`."""
    frame = sys._getframe(1)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if not module.startswith(tuple(f"{name}." for name in OUTSIDE)):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
