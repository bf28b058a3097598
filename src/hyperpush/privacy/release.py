"""Releases: the places of a leaf at which something about a client's data becomes known, and the noise added there.

A private access bounds what one example can change, then *releases* the result: an identity in the trace that carries
this bound. `noised` runs a leaf's trace and adds noise at every release. Release number k of a leaf has the key
`fold_in(fold_in(ctx.key, RELEASES), k)`. The counter k goes through every loop and branch, so that no draw is used
twice. An ambient key would give every iteration of a loop the same noise.

A release that no noise was added to cannot run: its lowering raises. So whatever path a computation takes, it ends
with noise or with an error.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core import Literal as Constant
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.errors import InvalidInput
from hyperpush.privacy.mechanisms import Mechanism
from hyperpush.programs import Average, Exchange, Local, Node, Profile, Repeat, Role, Scope, Sequence, Server, rewrite
from hyperpush.programs import Path as ProgramPath
from hyperpush.programs.counting import Kind, count_marks, longest_loop

DataSet = str  # "train", "validation", or what else a task calls its data

# Positions, rounds, mini-batches and splits, with which a leaf folds its own key, stay below.
RELEASES = 0xFEED_DA7A

# Call-like primitives whose one inner trace takes the same inputs and gives the same outputs.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_lin"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def release_tree(
    tree: PyTree,
    change: float | Float[Array, ""],
    mechanism: Mechanism | None,
    *,
    kind: Kind = "gradients",
    on: DataSet = "train",
    counted: bool = False,
) -> PyTree:
    """The same numbers, to which noise of scale `change`·mechanism(t) is added when an engine runs them.

    Args:
        tree: What becomes known.
        change: The most that one example can change it, in the mechanism's norm. It must not depend on data itself.
        mechanism: The noise. None declares that nobody else ever sees these numbers: no noise, and no release.
        kind: The access it comes from.
        on: The data set it comes from.
        counted: Whether the mechanism is the task's, whose cost budgets count.

    The schedule's t counts the releases of the leaf within the innermost loop of the program around it, from 0.
    """
    leaves, structure = jax.tree.flatten(tree)
    numbers, noise = jax.tree.flatten(mechanism)
    released = release.bind(
        *leaves,
        jnp.asarray(change, jnp.result_type(float)),
        *(jnp.asarray(number) for number in numbers),
        count=len(leaves),
        noise=None if mechanism is None else noise,
        kind=kind,
        on=on,
        counted=counted or mechanism is None,
        lead=0,
        copies=0 if mechanism is None else 1,
        times=longest_loop(),
        noised=mechanism is None,
    )
    return structure.unflatten(released)


def access_data(public: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """The same (public, batch), at the door of an access whose result will be released.

    The check of flows holds the caller to it: `public` must not depend on data, and the rows of `batch` must be single
    examples, on axis 0. Else one example changes more than its own row, and the release's bound is wrong.
    """
    leaves, structure = jax.tree.flatten((public, batch))
    return structure.unflatten(access.bind(*leaves, public=len(jax.tree.leaves(public)), lead=0))


def releases_of(jaxpr: Jaxpr) -> Counter[DataSet]:
    """How many releases one run of a traced leaf makes, by data set; loops count as often as they run."""
    return +count_marks(jaxpr, release, lambda params: (params["on"],))


@dataclass(frozen=True)
class LeafReleases:
    """What one leaf of a program releases: `count` of `often` releases in each pass, numbered from 0 in each run.

    `passes` of them are a run of the innermost loop around it.
    """

    on: DataSet
    count: int
    often: int
    passes: int
    runs: int

    @property
    def total(self) -> int:
        return self.count * self.passes * self.runs


class ReleaseCount:
    """Counts the releases of the leaves that it visits (`visit_leaves`), at most."""

    def __init__(self) -> None:
        self.found: list[tuple[ProgramPath, Counter[DataSet]]] = []

    def visit(
        self, path: ProgramPath, role: Role, f: Callable[..., Any], jaxpr: ClosedJaxpr | None, shapes: PyTree
    ) -> None:
        if jaxpr is None:
            return
        for eqn in equations(jaxpr.jaxpr):
            if eqn.primitive is release and not eqn.params["counted"]:
                file, line, function = location(f)
                given = "a release with noise of its own"
                allowed = "accesses of the problem: a task's budget counts the task's noise alone"
                raise InvalidInput(f"task.private: {file}:{line} {function}", given, allowed)
        # A loop asks whether to end after each pass, so that is in its body.
        self.found.append(((*path, 0) if role is Role.UNTIL else path, releases_of(jaxpr.jaxpr)))

    def leaves(self, profile: Profile) -> tuple[LeafReleases, ...]:
        """By leaf and data set; loops of an agreed length count as long as they may run."""
        passes: dict[ProgramPath, tuple[int, int]] = {(): (1, 1)}  # of a body: in one run of its loop, and runs
        for body, around, loop in profile.loops:
            passes[body] = loop.at_most, math.prod(passes[around])
        made = []
        for path, releases in self.found:
            body = max((body for body in passes if path[: len(body)] == body), key=len)
            often = sum(releases.values())
            made += [LeafReleases(on, count, often, *passes[body]) for on, count in releases.items()]
        return tuple(each for each in made if each.total)


def noised(f: Callable[..., Any]) -> Callable[..., Any]:
    """The leaf `f(*arguments, context)` with independent noise at each of its releases; `f` itself if it has none.

    Noise depends on the context's key alone, so that all engines draw the same. Adding it twice changes nothing.
    A leaf that has releases must not call back to the host.
    """

    @wraps(f)
    def leaf(*args: PyTree) -> PyTree:
        ctx = args[-1]
        flat, structure = jax.tree.flatten(args)
        # A function of its own for each call: JAX remembers traces by function, and `f` may close over tracers.
        closed, shapes = jax.make_jaxpr(lambda *flat: f(*structure.unflatten(flat)), return_shape=True)(*flat)
        if not _has_release(closed.jaxpr):
            return f(*args)
        refuse_callbacks(closed.jaxpr, f)
        # What nobody uses is no release: it has no number, as it is not counted.
        used, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        closed = ClosedJaxpr(used, closed.consts)
        often = sum(releases_of(closed.jaxpr).values())
        noise = _Noise(jax.random.fold_in(ctx.key, RELEASES), ctx.round * often)
        out, _ = noise.run(closed, flat, jnp.zeros((), jnp.int32))
        return jax.tree.structure(shapes).unflatten(out)

    return leaf


def noised_program(node: Node) -> Node:
    """The program with noise at the releases of all its leaves."""
    made: dict[int, Callable[..., Any]] = {}  # by identity: what stands at several places stays one function

    def noisy(f: Callable[..., Any]) -> Callable[..., Any]:
        return made.setdefault(id(f), noised(f))

    def rewritten(node: Node) -> Node:
        if isinstance(node, Repeat):
            until, times = (None if f is None else noisy(f) for f in (node.until, node.times))
            return replace(node, until=until, times=times)
        if isinstance(node, Scope):
            return Scope(node.body, noisy(node.enter), noisy(node.leave))
        if isinstance(node, Local):
            return Local(noisy(node.f))
        if isinstance(node, Average):
            return replace(node, get=noisy(node.get), put=noisy(node.put))
        if isinstance(node, Server):
            return replace(node, send=noisy(node.send), receive=noisy(node.receive))
        if isinstance(node, Sequence):
            return node
        weights = noisy(node.weights) if callable(node.weights) else node.weights
        return replace(node, send=noisy(node.send), receive=noisy(node.receive), weights=weights)

    return rewrite(node, rewritten)


# ------------------------------------------------------------------ where things are


def location(f: Callable[..., Any]) -> tuple[str, int, str]:
    """(file, line, name) of the function that a leaf was written as."""
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
    return (code.co_filename, code.co_firstlineno, name) if code is not None else ("unknown file", 0, name)


def _caller() -> str:
    """The line that is being executed outside JAX and this package's accesses."""
    frame = sys._getframe(1)
    own = {str(Path(__file__).with_name(name)) for name in ("release.py", "private_problem.py")}
    while frame is not None:
        file = frame.f_code.co_filename
        module = frame.f_globals.get("__name__", "").split(".")[0]
        if file not in own and module not in ("jax", "equinox", "jaxtyping", "beartype", "contextlib", "functools"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def refuse_callbacks(jaxpr: Jaxpr, f: Callable[..., Any]) -> None:
    """Refuse a leaf that calls back to the host, where nobody can see what happens to data."""
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if "callback" in name or name in ("debug_print", "outside_call", "outfeed", "infeed"):
            file, line, function = location(f)
            raise InvalidInput(
                f"task.private: {file}:{line} {function}",
                f"{name} in a leaf",
                "no call to the host (jax.debug.print, pure_callback, io_callback) in a leaf of a private task",
            )


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a trace, those inside others included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inside in jaxprs_in_params(eqn.params):
            yield from equations(inside)


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The trace that a call-like equation runs on exactly its inputs; None for other equations."""
    if eqn.primitive.name not in CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inside = eqn.params.get(name)
        if inside is not None:
            closed = inside if isinstance(inside, ClosedJaxpr) else ClosedJaxpr(inside, ())
            return closed if len(closed.jaxpr.invars) == len(eqn.invars) else None
    return None


# ------------------------------------------------------------------ adding noise


def _has_release(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive is release and not eqn.params["noised"] for eqn in equations(jaxpr))


class _Noise:
    """Runs traces with noise at their releases; `count` is the number of those made so far."""

    def __init__(self, key: PRNGKeyArray, first: Int[Array, ""]):
        self.key, self.first = key, first

    def run(self, closed: ClosedJaxpr, inputs: list[Any], count: Int[Array, ""]) -> tuple[list[Any], Int[Array, ""]]:
        """The outputs of a trace, and the count after it."""
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, Constant) else known[var]

        for eqn in jaxpr.eqns:
            made, count = self._step(eqn, [read(var) for var in eqn.invars], count)
            known.update(zip(eqn.outvars, made, strict=True))
        return [read(var) for var in jaxpr.outvars], count

    def _step(self, eqn: JaxprEqn, inputs: list[Any], count: Int[Array, ""]) -> tuple[list[Any], Int[Array, ""]]:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is release and not params["noised"]:
            return self._released(inputs, count, **params)
        if not any(_has_release(inside) for inside in jaxprs_in_params(params)):
            with eqn.ctx.manager:
                made = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
            return (made if eqn.primitive.multiple_results else [made]), count
        if name == "scan":
            return self._scan(inputs, count, **params)
        if name == "while":
            return self._while(inputs, count, **params)
        if name == "cond":
            branches = [
                lambda count, *given, b=branch: self.run(b, list(given), count) for branch in params["branches"]
            ]
            return jax.lax.switch(inputs[0], branches, count, *inputs[1:])
        if name == "custom_linear_solve":  # its other functions serve derivatives
            lengths = params["const_lengths"]
            begin = lengths.matvec + lengths.vecmat
            right = inputs[sum(lengths) :]
            return self.run(params["jaxprs"].solve, [*inputs[begin : begin + lengths.solve], *right], count)
        inside = called(eqn)
        if inside is None:
            raise InvalidInput(
                "task.private", f"a release inside {name!r}", "releases inside scan, while, cond, jit, vmap or remat"
            )
        return self.run(inside, inputs, count)

    def _released(
        self, inputs: list[Any], number: Int[Array, ""], count: int, noise: Any, lead: int, copies: int, **params: Any
    ) -> tuple[list[Any], Int[Array, ""]]:
        values, (change, *numbers) = inputs[:count], inputs[count:]

        def one(key: PRNGKeyArray, t: Any, change: Any, numbers: list[Any], values: list[Any]) -> list[Any]:
            drawn = noise.unflatten(numbers).noise(key, values, t)
            return [(v + change * d).astype(v.dtype) for v, d in zip(values, drawn, strict=True)]

        shape = change.shape
        keys = jax.random.fold_in(self.key, number)
        if lead:
            keys = jax.random.split(keys, math.prod(shape)).reshape(shape)
        t = self.first + number + jnp.arange(math.prod(shape)).reshape(shape)
        for _ in range(lead):
            one = jax.vmap(one)
        noisy = one(keys, t, change, numbers, values)
        options = {**params, "count": count, "noise": noise, "lead": lead, "copies": copies, "noised": True}
        return release.bind(*noisy, change, *numbers, **options), number + copies

    def _scan(
        self,
        inputs: list[Any],
        count: Int[Array, ""],
        jaxpr: ClosedJaxpr,
        num_consts: int,
        num_carry: int,
        length: int,
        reverse: bool,
        unroll: int,
        **_: Any,
    ) -> tuple[list[Any], Int[Array, ""]]:
        held, first, rows = _split(inputs, num_consts, num_carry)

        def body(carry: Any, row: Any) -> tuple[Any, Any]:
            before, count = carry
            out, count = self.run(jaxpr, [*held, *before, *row], count)
            return (out[:num_carry], count), out[num_carry:]

        (last, count), made = jax.lax.scan(body, (first, count), rows, length, reverse, unroll)
        return [*last, *made], count

    def _while(
        self,
        inputs: list[Any],
        count: Int[Array, ""],
        cond_jaxpr: ClosedJaxpr,
        body_jaxpr: ClosedJaxpr,
        cond_nconsts: int,
        body_nconsts: int,
    ) -> tuple[list[Any], Int[Array, ""]]:
        of_test, of_body, first = _split(inputs, cond_nconsts, body_nconsts)
        if _has_release(cond_jaxpr.jaxpr):
            raise InvalidInput(
                "task.private", "a release in the condition of a while loop", "releases in its body, which are counted"
            )

        def test(loop: tuple[list[Any], Any]) -> Any:
            return jaxpr_as_fun(cond_jaxpr)(*of_test, *loop[0])[0]

        def body(loop: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
            return self.run(body_jaxpr, [*of_body, *loop[0]], loop[1])

        return jax.lax.while_loop(test, body, (first, count))


def _split(inputs: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return inputs[:first], inputs[first : first + second], inputs[first + second :]


# ------------------------------------------------------------------ the primitives


def _values(*inputs: Any, count: int, **_: Any) -> list[Any]:
    return list(inputs[:count])


def _run_plain(*inputs: Any, noised: bool, **params: Any) -> list[Any]:
    if not noised:
        raise InvalidInput(
            "task.private",
            f"{params['kind']} of private data, computed without noise at {_caller()}",
            "those that a program takes while an engine runs it",
        )
    return _values(*inputs, **params)


def _batched(inputs: Any, axes: Any, *, lead: int, copies: int, **params: Any) -> tuple[list[Any], list[int]]:
    """Every member of a batch is a release of its own."""
    wide = next(leaf.shape[axis] for leaf, axis in zip(inputs, axes, strict=True) if axis is not None)
    every = [batching.bdim_at_front(leaf, axis, wide) for leaf, axis in zip(inputs, axes, strict=True)]
    return release.bind(*every, lead=lead + 1, copies=copies * wide, **params), [0] * params["count"]


def _differentiated(*_: Any, **__: Any) -> NoReturn:
    raise InvalidInput(
        f"task.private: {_caller()}",
        "a derivative of a released gradient",
        "gradients and products of the problem themselves: problem.hessian_product instead of a derivative of "
        "problem.inner_gradient; HGP, TrackedHGP or ITDBackward instead of ITDForward",
    )


release = Primitive("hyperpush_release")
release.multiple_results = True
release.def_impl(_run_plain)
release.def_abstract_eval(_values)
mlir.register_lowering(release, lambda ctx, *inputs, **params: _run_plain(*inputs, **params))
batching.primitive_batchers[release] = _batched
ad.primitive_jvps[release] = _differentiated


def _enter_batched(inputs: Any, axes: Any, *, lead: int, public: int) -> tuple[list[Any], list[int]]:
    wide = next(leaf.shape[axis] for leaf, axis in zip(inputs, axes, strict=True) if axis is not None)
    every = [batching.bdim_at_front(leaf, axis, wide) for leaf, axis in zip(inputs, axes, strict=True)]
    return access.bind(*every, lead=lead + 1, public=public), [0] * len(every)


access = Primitive("hyperpush_access")
access.multiple_results = True
access.def_impl(lambda *leaves, **_: list(leaves))
access.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(access, lambda ctx, *leaves, **_: leaves)
batching.primitive_batchers[access] = _enter_batched
ad.primitive_jvps[access] = lambda primals, tangents, **params: (access.bind(*primals, **params), tangents)
