"""Turn the program of one run into a program of several runs that share every message."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.programs.nodes import Average, Context, Local, Node, Repeat, Scope, Sequence, State

ALLOWED = "local work, averages by 'tree' or 'exact', and loops that end without a vote"


class Runs(eqx.Module):
    """A client's states of several runs.

    Args:
        state: State of each run, on axis 0.
        ended: True for runs whose enclosing loop has ended; their states do not change.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.programs.Runs.start(jnp.zeros((3, 2))).ended.tolist()
        [False, False, False]
    """

    state: State
    ended: Bool[Array, "*clients k"]

    @staticmethod
    def start(state: State, axis: int = 0) -> "Runs":
        """Return runs that have not ended; they are on this `axis` of the state."""
        shape = jax.tree.leaves(state)[0].shape[: axis + 1]
        return Runs(state, jnp.zeros(shape, bool))

    def with_answer(self, answer: Array) -> "Runs":
        """Return the runs with the root's answer, for each run that has not ended."""
        return Runs(replace(self.state, ended=jnp.where(self.ended, self.state.ended, answer)), self.ended)

    def moved(self, after: State) -> "Runs":
        """Return the runs with the states `after` a leaf; runs that have ended keep their states."""
        if jax.tree.map(jnp.shape, after) != jax.tree.map(jnp.shape, self.state):
            return Runs(after, self.ended)  # the leaf changed the state's structure, so all runs take the new state

        def pick(old: Array, new: Array) -> Array:
            return new if old is new else jnp.where(self.ended.reshape(-1, *[1] * (new.ndim - 1)), old, new)

        return Runs(jax.tree.map(pick, self.state, after), self.ended)


class _Counted(eqx.Module):
    """Runs inside a loop, and the number of remaining iterations of each run."""

    runs: Runs
    left: Int[Array, " k"]


def stack(node: Node) -> Node:
    """Return a program of several runs from the program of one; it works on `Runs`, and runs share every message.

    Each run ends its loops by itself. A run that has ended keeps its state until the last run ends, and its part of the
    messages is still sent. Leaves of all runs draw the same random numbers.

    Args:
        node: Program of local work, exact averages, and loops that end by a count or by a condition that is equal at
            every client.

    Raises:
        InvalidInput: The program has another kind of message, or a loop with votes.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> double = hp.programs.Local(lambda x, ctx: 2 * x)
        >>> loop = hp.programs.Repeat(double, 9, until=lambda x, ctx: x > 9, common=True)
        >>> start = hp.programs.Runs.start(jnp.array([[1.0, 3.0], [1.0, 3.0]]), axis=1)
        >>> program, network = hp.programs.stack(loop), hp.networks.Ring(2)
        >>> hp.Simulate().run(program, network, start, jnp.zeros(2), jax.random.key(0)).states.state[0].tolist()
        [16.0, 12.0]
    """
    if isinstance(node, Local):
        return Local(lambda runs, ctx: runs.moved(_over(node.f, ctx, runs.state)))
    if isinstance(node, Sequence):
        return Sequence(*map(stack, node.nodes), appended=node.appended)
    if isinstance(node, Scope):
        return _stack_scope(node)
    if isinstance(node, Average) and node.by in ("tree", "exact"):
        return _stack_average(node)
    if isinstance(node, Repeat) and not node.votes:
        return _stack_loop(node)
    raise InvalidInput("stack", type(node).__name__, ALLOWED)


def _over(f: Callable[..., Any], ctx: Context, *stacked: PyTree) -> Any:
    """Return the results of a leaf for every run."""
    return jax.vmap(lambda *own: f(*own, ctx))(*stacked)


def _stack_scope(node: Scope) -> Scope:
    def enter(runs: Runs, ctx: Context) -> Runs:
        return Runs(_over(node.enter, ctx, runs.state), runs.ended)

    def leave(runs: Runs, inner: Runs, ctx: Context) -> Runs:
        return runs.moved(_over(node.leave, ctx, runs.state, inner.state))

    return Scope(stack(node.body), enter, leave)


def _stack_average(node: Average) -> Average:
    def get(runs: Runs, ctx: Context) -> tuple[PyTree, Array]:
        values, masses = _over(node.get, ctx, runs.state)
        return values, jnp.ones((), masses.dtype)

    def put(runs: Runs, means: PyTree, mass: Array, ctx: Context) -> Runs:
        return runs.moved(_over(lambda own, mean, ctx: node.put(own, mean, mass, ctx), ctx, runs.state, means))

    def answer(runs: Runs, means: PyTree, ctx: Context) -> PyTree:
        assert node.answer is not None
        return _over(node.answer, ctx, runs.state, means)

    def ends(runs: Runs, ctx: Context) -> Array:
        assert node.ends is not None
        return _over(node.ends, ctx, runs.state)

    answered, ended = None if node.answer is None else answer, None if node.ends is None else ends
    return replace(node, get=get, put=put, answer=answered, ends=ended)


def _stack_loop(node: Repeat) -> Node:
    """Return the loop of several runs, in which each run ends by itself; the loop ends with the last run.

    After the loop, those runs continue that have not ended in the enclosing loop.
    """
    if not node.agreed:
        return replace(node, body=stack(node.body))

    def enter(runs: Runs, ctx: Context) -> _Counted:
        most = jnp.full(runs.ended.shape, node.at_most, jnp.int32)
        left = most if node.times is None else jnp.minimum(most, _over(node.times, ctx, runs.state))
        return _Counted(Runs(runs.state, runs.ended | (left <= 0)), jnp.where(runs.ended, 0, left))

    def count(state: _Counted, ctx: Context) -> _Counted:
        left, ended = state.left - 1, state.runs.ended | (state.left <= 1)
        if node.until is not None:
            ended = ended | _over(node.until, ctx, state.runs.state)
        return _Counted(Runs(state.runs.state, ended), left)

    def leave(runs: Runs, state: _Counted, ctx: Context) -> Runs:
        return Runs(state.runs.state, runs.ended)

    body = Scope(stack(node.body), lambda state, ctx: state.runs, lambda state, runs, ctx: replace(state, runs=runs))
    loop = replace(
        node,
        body=Sequence(body, Local(count)),
        until=None if node.until is None else lambda state, ctx: jnp.all(state.runs.ended),
        times=lambda state, ctx: jnp.max(state.left),
    )
    return Scope(loop, enter, leave)
