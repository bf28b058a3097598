"""Check, in the trace of a leaf, that a client's data reach its state and messages only through releases.

A leaf is one of the functions that a client runs in a program. States and messages are clean: each leaf assumes clean
inputs, and the check shows that its outputs are clean, too. Inside a leaf, a value that depends on data is not clean
until it has passed an access and its release. The taint of an array says in which way the array depends on data. The
number of examples of a client (`Ragged.counts`) is public.

There is one exception, for private tasks whose hypers belong to single examples. Arrays with one number per example may
hold values that depend on this example. Each number may be changed elementwise and used by the row of its example. Such
arrays are never sent.

The check does not see numbers that a function closes over; `budget.py` compares closed-over arrays with the data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant
from jaxtyping import PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import Ragged, capacity
from hyperpush.data.promise import single
from hyperpush.privacy.traces import inner_trace, place, refuse_host_calls, split
from hyperpush.programs import Context
from hyperpush.programs.counting import is_mark


@dataclass(frozen=True)
class ExampleRows:
    """Each slice along an axis holds one example, and no example is in two slices."""

    axis: int
    order: tuple[Any, ...] = ()  # moves of rows so far; after equal moves, two arrays have equal examples in each row


class Held(Enum):
    """Ways in which an array depends on data, other than one example per row."""

    OWN = "one number of each example"
    INSIDE = "rows of one access, each by itself"
    MIXED = "anything"
    SPOILED = "anything, in a way that no release repairs"


Taint = ExampleRows | Held | None  # None: the array does not depend on data


def check_leaf(
    f: Callable[..., PyTree], *args: PyTree, own: bool = False, sends: bool = False
) -> tuple[ClosedJaxpr, Any]:
    """Return the trace of a leaf f(*arguments, context) and the structure of its result.

    Args:
        f: The leaf.
        args: The arguments of the leaf; the last is its context.
        own: True if arrays with one number per example may hold values of these examples.
        sends: True if other clients see the result.

    Raises:
        InvalidInput: The leaf lets data through or calls the host. The message names its file and line, and the
            fields that data reach.
    """
    flat, structure = jax.tree.flatten(args)
    # A new function for each call, because JAX caches traces by function and `f` may close over tracers.
    closed, shapes = jax.make_jaxpr(lambda *flat: f(*structure.unflatten(flat)), return_shape=True)(*flat)
    refuse_host_calls(closed.jaxpr, f)
    ctx: Context = args[-1]
    per_example = (capacity(ctx.data.train),) if own else None

    def may_hold_own(leaf: Any) -> bool:
        return leaf.shape == per_example and jnp.issubdtype(leaf.dtype, jnp.inexact)

    everywhere, data = jax.tree.map(lambda _: False, args), iter(_taints(ctx.data))
    is_data = eqx.tree_at(lambda given: given[-1].data, everywhere, jax.tree.map(lambda _: True, ctx.data))
    taints: list[Taint] = [
        next(data) if private else (Held.OWN if may_hold_own(leaf) else None)
        for leaf, private in zip(flat, jax.tree.leaves(is_data), strict=True)
    ]
    outputs = zip(jax.tree_util.tree_leaves_with_path(shapes), flow(closed.jaxpr, taints), strict=True)
    refuse_leaks(
        f,
        {
            jax.tree_util.keystr(path): taint
            for (path, leaf), taint in outputs
            if taint is not None and not (taint is Held.OWN and may_hold_own(leaf) and not sends)
        },
    )
    return closed, jax.tree.structure(shapes)


def refuse_leaks(f: Callable[..., Any], reached: dict[str, Taint]) -> None:
    """Raise InvalidInput if data reach fields of a leaf's result."""
    if not reached:
        return
    fields = ", ".join(field or "its result" for field in reached)
    if all(taint is Held.SPOILED for taint in reached.values()):
        given = f"private data in {fields}, at a point or in a batch made of data without noise"
        allowed = (
            "problem.inner_gradient and the like at released params, hypers and vectors, with costs that see only "
            "their rows: one example each, drawn by hp.extend.minibatch"
        )
    elif Held.OWN in reached.values():
        given = f"hypers of single examples in {fields}, which others would see"
        allowed = "hypers='shared', or a method that never sends arrays with one number per example"
    else:
        given = f"private data in {fields}, without noise"
        allowed = (
            "values of data from problem.inner_gradient, outer_gradients, hessian_product, jacobian_product or "
            "products; take gradients with them, not of the cost"
        )
    raise InvalidInput(f"task.private: {place(f)}", given, allowed)


def _taints(data: PyTree) -> list[Taint]:
    """Return the taint of each leaf of one client's data: one example per row; counts of examples are public."""

    def rows(tree: PyTree) -> list[Taint]:
        return [ExampleRows(0) if leaf.shape else Held.MIXED for leaf in jax.tree.leaves(tree)]

    parts = jax.tree.leaves(data, is_leaf=lambda part: isinstance(part, Ragged))
    return [
        taint for part in parts for taint in ([*rows(part.examples), None] if isinstance(part, Ragged) else rows(part))
    ]


# ------------------------------------------------------------------ through a trace


def join(*taints: Taint) -> Taint:
    """Return the taint of an array that equals one of several arrays, without knowing which."""
    known = set(taints) - {None}
    if Held.SPOILED in known:
        return Held.SPOILED
    return known.pop() if len(known) == 1 else Held.MIXED if known else None


def combine(taints: Sequence[Taint]) -> Taint:
    """Return the taint of an array computed from several arrays."""
    joint = join(*taints)
    return joint if joint in (None, Held.INSIDE, Held.SPOILED) else Held.MIXED


def flow(jaxpr: Jaxpr, given: Sequence[Taint]) -> list[Taint]:
    """Return the taints of the outputs of a trace from those of its inputs."""
    known: dict[Any, Taint] = dict(zip(jaxpr.invars, given, strict=True))

    def read(var: Any) -> Taint:
        return None if isinstance(var, Constant) else known.get(var)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _step(eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in jaxpr.outvars]


def _step(eqn: JaxprEqn, given: list[Taint]) -> list[Taint]:
    special = {
        "hyperpush_release": _release,
        "hyperpush_access": _access,
        "scan": _scan,
        "while": _while,
        "cond": _cond,
    }
    if all(taint is None for taint in given):
        return [None] * len(eqn.outvars)
    if is_mark(eqn.primitive) or eqn.primitive.name == "optimization_barrier":
        return given
    if eqn.primitive is single:  # the code that drew the rows promises one example each
        rows = ExampleRows(eqn.params["lead"], (eqn.outvars[0],))
        return [taint if taint in (None, Held.SPOILED) else rows for taint in given]
    if eqn.primitive.name in special:
        return special[eqn.primitive.name](given, **eqn.params)
    inside = inner_trace(eqn)
    if inside is not None:
        return flow(inside[0].jaxpr, [given[number] for number in inside[1]])
    return [_compute(eqn, given)] * len(eqn.outvars)


def _release(given: list[Taint], kept: bool, **_: Any) -> list[Taint]:
    *values, change = given  # noise whose scale depends on data leaks them
    fine = Held.OWN if kept else None
    return [
        None if taint is None and change is None else fine if taint is Held.INSIDE and change is None else Held.SPOILED
        for taint in values
    ]


def _access(given: list[Taint], public: int, own: tuple[int, ...], lead: int) -> list[Taint]:
    clean = all(t is None or (t is Held.OWN and number in own) for number, t in enumerate(given[:public]))
    rows = set(given[public:]) - {None}
    single = not rows or (len(rows) == 1 and isinstance(each := rows.pop(), ExampleRows) and each.axis == lead)
    return [None if taint is None else Held.INSIDE if clean and single else Held.SPOILED for taint in given]


def _cond(given: list[Taint], branches: Sequence[ClosedJaxpr], **_: Any) -> list[Taint]:
    made = [flow(branch.jaxpr, given[1:]) for branch in branches]
    return [join(*each, combine(given[:1])) for each in zip(*made, strict=True)]


def _scan(given: list[Taint], jaxpr: ClosedJaxpr, num_consts: int, num_carry: int, **_: Any) -> list[Taint]:
    held, carry, rows = split(given, num_consts, num_carry)
    row = [_move(taint, -1) for taint in rows]
    while True:
        made = flow(jaxpr.jaxpr, [*held, *carry, *row])
        after = [join(*pair) for pair in zip(carry, made[:num_carry], strict=True)]
        if after == carry:
            return carry + [_move(taint, 1) for taint in made[num_carry:]]
        carry = after


def _move(taint: Taint, by: int) -> Taint:
    """Return the taint of one row of an array with this taint (`by` −1), or of an array of such rows (`by` 1)."""
    if isinstance(taint, ExampleRows):
        return ExampleRows(taint.axis + by, taint.order) if taint.axis + by >= 0 else Held.MIXED
    return Held.MIXED if taint is Held.OWN else taint


def _while(given: list[Taint], cond_jaxpr: ClosedJaxpr, body_jaxpr: ClosedJaxpr, **lengths: int) -> list[Taint]:
    of_test, of_body, carry = split(given, lengths["cond_nconsts"], lengths["body_nconsts"])
    while True:
        made = flow(body_jaxpr.jaxpr, [*of_body, *carry])
        # The carried values reveal the number of iterations.
        test = combine(flow(cond_jaxpr.jaxpr, [*of_test, *carry]))
        after = [join(*pair, test) for pair in zip(carry, made, strict=True)]
        if after == carry:
            return carry
        carry = after


# ------------------------------------------------------------------ examples that stay in their rows

ELEMENTWISE = {"convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient", "select_n", "clamp"}
ELEMENTWISE |= {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "is_finite", "not", "and"}
ELEMENTWISE |= {"or", "eq", "ne", "lt", "le", "gt", "ge", "pow", "integer_pow", "square", "sqrt", "rsqrt", "exp"}
ELEMENTWISE |= {"expm1", "log", "log1p", "tanh", "logistic"}
# Operations that move rows, and their moves. The start of a dynamic slice is assumed equal for all parts of a batch.
MOVES: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "rev": lambda params, axis: (),
    "slice": lambda params, axis: (params["start_indices"][axis], (params["strides"] or {axis: 1})[axis]),
    "dynamic_slice": lambda params, axis: "dynamic",
    "pad": lambda params, axis: params["padding_config"][axis],
}


def _compute(eqn: JaxprEqn, given: list[Taint]) -> Taint:
    """Return the taint of an operation's result; examples keep separate rows if one tainted array's rows only move."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    tainted = [number for number, taint in enumerate(given) if taint is not None]
    taint, shape = given[tainted[0]], getattr(eqn.invars[tainted[0]].aval, "shape", ())
    if join(*given) is Held.OWN:
        return Held.OWN if name in ELEMENTWISE and getattr(out, "shape", None) == shape else Held.MIXED
    if len(tainted) > 1 or not isinstance(taint, ExampleRows):
        return combine(given)
    axis = _new_axis(name, eqn.params, taint.axis, tainted[0], shape, getattr(out, "shape", ()))
    if axis is None:
        return Held.MIXED
    reversed_rows = name == "rev" and taint.axis in eqn.params["dimensions"]
    if name in MOVES and (reversed_rows or shape[axis] != getattr(out, "shape", ())[axis]):
        return ExampleRows(axis, (*taint.order, name, MOVES[name](eqn.params, axis)))
    return ExampleRows(axis, taint.order)


def _new_axis(
    name: str, params: dict[str, Any], axis: int, input: int, before: tuple[int, ...], after: tuple[int, ...]
) -> int | None:
    """Return the axis of the examples after an operation; None if it mixes their rows."""
    if name in ELEMENTWISE or name in MOVES:
        return axis if len(before) == len(after) else None
    if name == "squeeze":
        return None if axis in params["dimensions"] else axis - sum(d < axis for d in params["dimensions"])
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "broadcast_in_dim" and input == 0:
        new = params["broadcast_dimensions"][axis]
        return int(new) if after[new] == before[axis] else None
    if name == "reshape" and input == 0:
        return axis if before[: axis + 1] == after[: axis + 1] else None
    return None
