"""What of a client's data reaches its state and its messages, read off the traces of a program's leaves.

States and messages are clean: this is what the check establishes leaf by leaf, so every leaf may assume it of what it
gets. In a leaf, whatever depends on data is not clean until it has passed a release. How many examples a client owns
(`Ragged.counts`) is public.

Not seen are arrays that a function closes over, rows drawn twice into one batch, and leaves of a batch whose rows
belong to different examples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant
from jaxtyping import PyTree

from hyperpush.data.batches import Ragged
from hyperpush.errors import InvalidInput
from hyperpush.privacy.release import access, called, location, refuse_callbacks, release
from hyperpush.programs import Context, Node, Path, Recipe, Role, State, trace_leaf, visit_leaves
from hyperpush.programs.counting import is_mark

# How much of the data an array holds: nothing (None); one example in each slice along an axis (its number); anything
# (MIXED); anything, in a way that no release repairs (SPOILED).
Taint = int | None
MIXED, SPOILED = -1, -2

CONTEXT = 3  # inputs of a leaf's trace before the data: client, round and key


@dataclass(frozen=True)
class Leak:
    """A leaf that lets data through, and where it does."""

    file: str
    line: int
    function: str
    path: Path
    role: str
    fields: tuple[str, ...]  # of what it returns; "" is all of it
    spoiled: bool = False  # a release is there, but its bound does not hold

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class LeakSearch:
    """Finds leaks in the leaves that it visits (`visit_leaves`).

    Data stop at releases, or with `private=False` at any gradient or product of the problem. A leaf of a private task
    that calls back to the host is refused at once.
    """

    def __init__(self, data: PyTree, private: bool = True):
        self.data, self.private = data, private
        self.found: list[Leak] = []

    def visit(self, path: Path, role: Role, f: Callable[..., Any], jaxpr: ClosedJaxpr | None, shapes: PyTree) -> None:
        if jaxpr is not None:
            self.found += _leaks(path, role.name.lower(), f, jaxpr, shapes, self.data, self.private)
        elif self.private:
            self.found.append(Leak(*location(f), path, role.name.lower(), ("",)))


def leaks(program: Node | Recipe, state: State, data: PyTree, clients: int, private: bool = True) -> list[Leak]:
    """Every leaf of a program that lets data through, from one client's state and data (arrays or shapes)."""
    search = LeakSearch(data, private)
    visit_leaves(program, state, data, clients, search.visit)
    return search.found


def leaf_leaks(
    f: Callable[..., Any], clients: int, data: PyTree, *args: PyTree, role: Role = Role.RECORD, private: bool = True
) -> list[Leak]:
    """The same for one function f(*arguments, context) outside a program, such as one that records."""
    shapes, jaxpr = trace_leaf(f, clients, *jax.eval_shape(lambda *trees: trees, data, *args))
    return _leaks((), role.name.lower(), f, jaxpr, shapes, data, private)


def without_data(f: Callable[[State, Context], PyTree]) -> Callable[[State, Context], PyTree]:
    """A function that records, the same; refused where it is traced if it lets data through."""

    @wraps(f)
    def recorded(state: State, ctx: Context) -> PyTree:
        refuse_leaks(leaf_leaks(f, ctx.clients, ctx.data, state))
        return f(state, ctx)

    return recorded


def refuse_leaks(found: Sequence[Leak]) -> None:
    """Refuse what leaks were found in, naming the first."""
    if not found:
        return
    leak = found[0]
    fields = ", ".join(field or "its result" for field in leak.fields)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    if leak.spoiled:
        given = f"private data in {fields}, at a point or in a batch made of data without noise{more}"
        allowed = (
            "problem.inner_gradient and the like at params, hypers and vectors that were released, "
            "on rows that hold one example each"
        )
    else:
        given = f"private data in {fields}, without noise{more}"
        allowed = (
            "what comes of data through problem.inner_gradient, outer_gradients, hessian_product, jacobian_product or "
            "products; take gradients through them, not through the cost"
        )
    raise InvalidInput(f"task.private: {leak.place}", given, allowed)


def _leaks(
    path: Path,
    role: str,
    f: Callable[..., Any],
    closed: ClosedJaxpr,
    shapes: PyTree,
    data: PyTree,
    private: bool,
) -> list[Leak]:
    if private:
        refuse_callbacks(closed.jaxpr, f)
    own = _taints(data)
    rest = len(closed.jaxpr.invars) - CONTEXT - len(own)
    made = Flow(private).outputs(closed.jaxpr, [None] * CONTEXT + own + [None] * rest)
    outputs = jax.tree_util.tree_leaves_with_path(shapes)
    reached = [(jax.tree_util.keystr(key), t) for (key, _), t in zip(outputs, made, strict=True) if t is not None]
    if not reached:
        return []
    fields = tuple(field for field, _ in reached)
    return [Leak(*location(f), path, role, fields, all(t == SPOILED for _, t in reached))]


def _taints(data: PyTree) -> list[Taint]:
    """What each leaf of one client's data holds: one example per row, and nothing that counts examples."""

    def of(part: PyTree) -> PyTree:
        if isinstance(part, Ragged):
            return [*jax.tree.leaves(jax.tree.map(rows, part.examples)), "public"]
        return [rows(part)]

    def rows(leaf: Any) -> int:
        return 0 if len(leaf.shape) else MIXED

    parts = jax.tree.leaves(data, is_leaf=lambda part: isinstance(part, Ragged))
    return [None if taint == "public" else taint for part in parts for taint in of(part)]


def join(*taints: Taint) -> Taint:
    """What an array holds that is sometimes one, sometimes another of these."""
    known = {taint for taint in taints if taint is not None}
    if SPOILED in known:
        return SPOILED
    return None if not known else known.pop() if len(known) == 1 else MIXED


def combined(taints: Sequence[Taint]) -> Taint:
    """What an array holds that is computed from arrays of these."""
    return SPOILED if SPOILED in taints else None if all(taint is None for taint in taints) else MIXED


class Flow:
    """Carries taints through a trace."""

    def __init__(self, private: bool = True):
        self.private = private

    def outputs(self, jaxpr: Jaxpr, given: Sequence[Taint]) -> list[Taint]:
        """What the outputs of a trace hold, if its inputs hold this."""
        known = dict(zip(jaxpr.invars, given, strict=True))

        def read(var: Any) -> Taint:
            return None if isinstance(var, Constant) else known.get(var)

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._step(eqn, [read(var) for var in eqn.invars]), strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _step(self, eqn: JaxprEqn, given: list[Taint]) -> list[Taint]:
        name, params = eqn.primitive.name, eqn.params
        if all(taint is None for taint in given):
            return [None] * len(eqn.outvars)
        if eqn.primitive is release:
            return _released(given, params["count"])
        if eqn.primitive is access:
            return _accessed(given, params["public"], params["lead"])
        if is_mark(eqn.primitive):
            return given if self.private else [None] * len(given)
        if name == "scan":
            return self._scan(given, params["jaxpr"].jaxpr, params["num_consts"], params["num_carry"])
        if name == "while":
            return self._while(given, params)
        if name == "cond":
            made = [self.outputs(branch.jaxpr, given[1:]) for branch in params["branches"]]
            return [join(*branches, combined(given[:1])) for branches in zip(*made, strict=True)]
        if name == "custom_linear_solve":  # its other functions serve derivatives
            lengths = params["const_lengths"]
            begin = lengths.matvec + lengths.vecmat
            inside = [*given[begin : begin + lengths.solve], *given[sum(lengths) :]]
            return self.outputs(params["jaxprs"].solve.jaxpr, inside)
        inside = called(eqn)
        if inside is not None:
            return self.outputs(inside.jaxpr, given)
        return [_moved(eqn, given)] * len(eqn.outvars)

    def _scan(self, given: list[Taint], body: Jaxpr, num_consts: int, num_carry: int) -> list[Taint]:
        held, carry, rows = (
            given[:num_consts],
            given[num_consts : num_consts + num_carry],
            given[num_consts + num_carry :],
        )
        # A row of a scan has lost the first axis; if that was the examples', one example is all it holds.
        row = [t if t is None or t < 0 else t - 1 if t > 0 else MIXED for t in rows]
        while True:
            made = self.outputs(body, [*held, *carry, *row])
            after = [join(*pair) for pair in zip(carry, made[:num_carry], strict=True)]
            if after == carry:
                return carry + [t if t is None or t < 0 else t + 1 for t in made[num_carry:]]
            carry = after

    def _while(self, given: list[Taint], params: dict[str, Any]) -> list[Taint]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_test, of_body, carry = given[:first], given[first:second], given[second:]
        while True:
            made = self.outputs(params["body_jaxpr"].jaxpr, [*of_body, *carry])
            # How often the loop runs is known from everything it carries.
            test = combined(self.outputs(params["cond_jaxpr"].jaxpr, [*of_test, *carry]))
            after = [join(*pair, test) for pair in zip(carry, made, strict=True)]
            if after == carry:
                return carry
            carry = after


def _released(given: list[Taint], count: int) -> list[Taint]:
    # Noise whose scale depends on data betrays them.
    wrong = any(taint is not None for taint in given[count:])
    return [SPOILED if wrong or taint == SPOILED else None for taint in given[:count]]


def _accessed(given: list[Taint], public: int, lead: int) -> list[Taint]:
    clean = all(taint is None for taint in given[:public])
    single = all(taint is None or taint == lead for taint in given[public:])
    if clean and single:
        return given
    return [None if taint is None else SPOILED for taint in given]


# ------------------------------------------------------------------ examples that stay in their rows

SAME_AXIS = {"convert_element_type", "copy", "copy_p", "rev", "slice", "dynamic_slice", "pad", "reduce_precision"}
SAME_AXIS |= {
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "max",
    "min",
    "select_n",
    "integer_pow",
    "square",
    "sqrt",
    "exp",
    "log",
}
SAME_AXIS |= {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "abs", "sign", "clamp", "stop_gradient"}


def _moved(eqn: JaxprEqn, given: list[Taint]) -> Taint:
    """What a plain operation makes of examples: they stay apart if it takes one array of them and moves rows alone."""
    tainted = [place for place, taint in enumerate(given) if taint is not None]
    taint = given[tainted[0]]
    if len(tainted) > 1 or taint is None or taint < 0:
        return combined(given)
    before, after = (getattr(var.aval, "shape", ()) for var in (eqn.invars[tainted[0]], eqn.outvars[0]))
    found = _new_axis(eqn.primitive.name, eqn.params, taint, tainted[0], before, after)
    return MIXED if found is None else found


def _new_axis(
    name: str, params: dict[str, Any], axis: int, place: int, before: tuple[int, ...], after: tuple[int, ...]
) -> int | None:
    """The axis of the examples afterwards; None if they do not stay apart."""
    if name in SAME_AXIS:
        return axis if len(before) == len(after) else None
    if name == "broadcast_in_dim" and place == 0:
        new = params["broadcast_dimensions"][axis]
        return int(new) if after[new] == before[axis] else None
    if name == "squeeze":
        return None if axis in params["dimensions"] else axis - sum(d < axis for d in params["dimensions"])
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "reshape" and place == 0:
        return axis if before[: axis + 1] == after[: axis + 1] else None
    if name == "gather" and place == 0:
        return _gathered(params["dimension_numbers"], axis, after)
    return None


def _gathered(numbers: Any, axis: int, after: tuple[int, ...]) -> int | None:
    """The last of the axes that picked rows are on; None if it is not the examples that were picked."""
    rows = [d for d in range(len(after)) if d not in numbers.offset_dims]
    picked = tuple(numbers.collapsed_slice_dims) == (axis,) == tuple(numbers.start_index_map)
    return rows[-1] if picked and rows and not numbers.operand_batching_dims else None
