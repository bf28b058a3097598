"""Add noise at the releases of a program's leaves, and check that data leave them in no other way.

Release number k of a leaf has the key `fold_in(fold_in(ctx.key, RELEASES), k)`. The counter k passes through each loop
and branch, so no draw is used twice. With one ambient key all iterations of a loop would get the same noise.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core import Literal as Constant
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, UInt32

from hyperpush.base.errors import InvalidInput
from hyperpush.privacy.flow import check_leaf
from hyperpush.privacy.mechanisms import Mechanism
from hyperpush.privacy.release import release
from hyperpush.privacy.traces import equations, inner_trace, split
from hyperpush.programs import Average, Context, Local, Node, Repeat, Scope, Sequence, Server, State, rewrite
from hyperpush.programs.counting import Work, count_marks

# Larger than every number that a leaf folds into its key: positions, rounds, mini-batches and splits.
RELEASES = 0xFEED_DA7A

Leaf = Callable[..., PyTree]
Counted = tuple[list[Any], Int[Array, ""]]  # outputs, and the number of releases so far


class Noising(eqx.Module):
    """Adds independent noise at each release of a leaf, in units of the largest change by one example.

    The noise depends on the context's key alone, so all engines draw the same. A program that already has noise gets
    no second noise.
    """

    mechanism: Mechanism
    own: bool = eqx.field(static=True, default=False)  # True if hypers belong to single examples
    run: UInt32[Array, ""] | None = (
        None  # number of earlier releases, so that a second run with the same key draws anew
    )

    def add(self, f: Leaf, sends: bool = False) -> Leaf:
        """Return the leaf `f(*arguments, context)` with noise at its releases.

        The returned leaf raises `InvalidInput` if data reach its result without a release.
        """

        @wraps(f)
        def leaf(*args: PyTree) -> PyTree:
            ctx: Context = args[-1]
            closed, structure = check_leaf(f, *args, own=self.own, sends=sends)
            if not _has_release(closed.jaxpr):
                return f(*args)
            # Unused results are not released, so they are neither numbered nor counted.
            used, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
            often = sum(count_releases(used).values())
            key = jax.random.fold_in(ctx.key, RELEASES)
            key = key if self.run is None else jax.random.fold_in(key, self.run)
            interpreter = _Interpreter(self.mechanism, key, ctx.round * often)
            out, _ = interpreter.run(ClosedJaxpr(used, closed.consts), jax.tree.leaves(args), jnp.zeros((), jnp.int32))
            return structure.unflatten(out)

        return leaf

    def add_everywhere(self, program: Node) -> Node:
        """Return the program with noise at the releases of all its leaves."""
        made: dict[Any, Leaf] = {}  # by identity: a function at several places stays one function

        def noisy(f: Leaf, sends: bool = False) -> Leaf:
            return made.setdefault((id(f), sends), self.add(f, sends))

        def rewrite_one(node: Node) -> Node:
            if isinstance(node, Repeat):
                until, times = (None if f is None else noisy(f, True) for f in (node.until, node.times))
                return replace(node, until=until, times=times)
            if isinstance(node, Scope):
                return Scope(node.body, noisy(node.enter), noisy(node.leave))
            if isinstance(node, Local):
                return Local(noisy(node.f))
            if isinstance(node, Average):
                node = node.each_answers()
                ends = None if node.ends is None else noisy(node.ends, True)
                return replace(node, get=noisy(node.get, True), put=noisy(node.put), ends=ends)
            if isinstance(node, Server):
                return replace(node, send=noisy(node.send, True), receive=noisy(node.receive))
            if isinstance(node, Sequence):
                return node
            weights = noisy(node.weights, True) if callable(node.weights) else node.weights
            return replace(node, send=noisy(node.send, True), receive=noisy(node.receive), weights=weights)

        return rewrite(program, rewrite_one)


def without_data(f: Callable[[State, Context], PyTree]) -> Callable[[State, Context], PyTree]:
    """Return a recording function that raises `InvalidInput` if data reach its result without a release."""

    @wraps(f)
    def record(state: State, ctx: Context) -> PyTree:
        check_leaf(f, state, ctx)
        return f(state, ctx)

    return record


def count_releases(jaxpr: Jaxpr) -> Work:
    """Count the releases of one run of a traced leaf, by data set; loops count once per iteration."""
    return +count_marks(jaxpr, release, lambda params: (params["on"],))


def _has_release(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive is release and not eqn.params["noisy"] for eqn in equations(jaxpr))


class _Interpreter:
    """Runs traced functions and adds noise at their releases."""

    def __init__(self, mechanism: Mechanism, key: PRNGKeyArray, first: Int[Array, ""]):
        self.mechanism, self.key, self.first = mechanism, key, first

    def run(self, closed: ClosedJaxpr, inputs: list[Any], count: Int[Array, ""]) -> Counted:
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, Constant) else known[var]

        for eqn in jaxpr.eqns:
            made, count = self._step(eqn, [read(var) for var in eqn.invars], count)
            known.update(zip(eqn.outvars, made, strict=True))
        return [read(var) for var in jaxpr.outvars], count

    def _step(self, eqn: JaxprEqn, inputs: list[Any], count: Int[Array, ""]) -> Counted:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is release and not params["noisy"]:
            return self._release(inputs, count, **params)
        if not any(_has_release(inside) for inside in jaxprs_in_params(params)):
            with eqn.ctx.manager:
                made = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
            return (made if eqn.primitive.multiple_results else [made]), count
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in special:
            return special[name](inputs, count, **params)
        inside = inner_trace(eqn)
        if inside is None:
            allowed = "releases inside scan, while, cond, jit, vmap or remat"
            raise InvalidInput("task.private", f"a release inside {name!r}", allowed)
        return self.run(inside[0], [inputs[number] for number in inside[1]], count)

    def _release(self, inputs: list[Any], number: Int[Array, ""], lead: int, copies: int, **params: Any) -> Counted:
        *values, change = inputs

        def add(key: PRNGKeyArray, t: Any, change: Any, values: list[Any]) -> list[Any]:
            scale = change * self.mechanism.norm_of_unit(sum(value.size for value in values))
            drawn = self.mechanism.noise(key, values, t)
            return [(v + scale * d).astype(v.dtype) for v, d in zip(values, drawn, strict=True)]

        keys = jax.random.fold_in(self.key, number)
        if lead:
            keys = jax.random.split(keys, math.prod(change.shape)).reshape(change.shape)
        for _ in range(lead):
            add = jax.vmap(add)
        t = self.first + number + jnp.arange(math.prod(change.shape)).reshape(change.shape)
        noisy = add(keys, t, change, values)
        return release.bind(
            *noisy, change, **{**params, "lead": lead, "copies": copies, "noisy": True}
        ), number + copies

    def _cond(self, inputs: list[Any], count: Int[Array, ""], branches: Any, **_: Any) -> Counted:
        def branch(closed: ClosedJaxpr, count: Int[Array, ""], *given: Any) -> Counted:
            return self.run(closed, list(given), count)

        return jax.lax.switch(inputs[0], [partial(branch, each) for each in branches], count, *inputs[1:])

    def _scan(self, inputs: list[Any], count: Int[Array, ""], jaxpr: ClosedJaxpr, **params: Any) -> Counted:
        held, first, rows = split(inputs, params["num_consts"], params["num_carry"])

        def body(carry: Any, row: Any) -> tuple[Any, Any]:
            before, count = carry
            out, count = self.run(jaxpr, [*held, *before, *row], count)
            return (out[: len(first)], count), out[len(first) :]

        how = {name: params[name] for name in ("length", "reverse", "unroll")}
        (last, count), made = jax.lax.scan(body, (first, count), rows, **how)
        return [*last, *made], count

    def _while(self, inputs: list[Any], count: Int[Array, ""], **params: Any) -> Counted:
        of_test, of_body, first = split(inputs, params["cond_nconsts"], params["body_nconsts"])
        if _has_release(params["cond_jaxpr"].jaxpr):
            given = "a release in the condition of a while loop"
            raise InvalidInput("task.private", given, "releases in its body, which are counted")

        def test(loop: Counted) -> Any:
            return jaxpr_as_fun(params["cond_jaxpr"])(*of_test, *loop[0])[0]

        def body(loop: Counted) -> Counted:
            return self.run(params["body_jaxpr"], [*of_body, *loop[0]], loop[1])

        return jax.lax.while_loop(test, body, (first, count))
