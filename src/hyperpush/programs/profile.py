"""Determine the messages, the work and the states of a program from one trace of each of its leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from hyperpush.programs.counting import Work, work_of
from hyperpush.programs.nodes import (
    Average,
    Context,
    Exchange,
    Local,
    Node,
    Path,
    Repeat,
    Role,
    Scope,
    Sequence,
    Server,
    work,
)
from hyperpush.programs.operations import largest, operations
from hyperpush.programs.recipe import ProgramRecipe, as_recipe

# Stands in place of a path for the messages that share how often links are up; they are counted in rows of n numbers.
LEARNING: Path = (-1,)


class Sending(eqx.Module):
    """A sending node of a program: its path, the node, and the shapes of one client's message."""

    path: Path = eqx.field(static=True)
    node: Node  # without its functions
    message: PyTree[jax.ShapeDtypeStruct] = eqx.field(static=True)
    body: Path = eqx.field(static=True)  # path of the body of the innermost enclosing loop; (): none
    answer: jax.ShapeDtypeStruct | None = eqx.field(static=True, default=None)  # returned with an average

    @property
    def floats(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.message))

    @property
    def bytes(self) -> int:
        return bytes_of(self.message)

    @property
    def by_tree(self) -> bool:
        """True if the message is sent along a tree; then the number of messages is known only after the run."""
        return isinstance(self.node, Average) and self.node.by == "tree"

    def messages(self, agreement: int) -> int:
        """Return the number of messages per pass if a vote on ending a loop takes `agreement` rounds.

        An average along a tree counts two messages, an upper bound for the mean over clients without lost messages.
        """
        if isinstance(self.node, Average):
            return {"exact": 1, "tree": 2}.get(self.node.by, self.node.rounds)
        return agreement if isinstance(self.node, Repeat) else 1


@dataclass(frozen=True)
class Profile:
    """One client's messages and work in each pass through the body of each loop of a program.

    Its nodes are without their functions, so they do not depend on the numbers from which the program was built.
    """

    sendings: tuple[Sending, ...]
    loops: tuple[tuple[Path, Path, Repeat], ...]  # (the loop's body, the enclosing body, the loop), outer loops first
    work: dict[Path, Work]  # work of one pass through each loop body, without inner loops; (): outside of all loops
    states: dict[Path, PyTree]  # shapes of the state before each node
    result: PyTree  # shapes of the state after the last node
    scopes: tuple[Path, ...]  # paths of the scopes, outer ones first
    effort: dict[Path, tuple[int, int]]  # number of leaves in one pass through each body, and of their operations
    leaves: int  # largest number of leaves that one pass through the program executes
    largest: int  # bytes of the largest array that a leaf computes

    # Profiles are cached and used by every run, so derived values are cached as well.

    @cached_property
    def by_tree(self) -> tuple[Path, ...]:
        """Paths of the averages along a tree."""
        return tuple([sending.path for sending in self.sendings if sending.by_tree])

    @cached_property
    def width(self) -> dict[Path, int]:
        """Numbers in the message of each sending node."""
        return {sending.path: sending.floats for sending in self.sendings}

    @cached_property
    def rounds(self) -> tuple[tuple[Path, int], ...]:
        """Loop body of each sending node, and its number of rounds; an average along a tree counts as one round."""
        return tuple([(each.body, 1 if each.by_tree else each.messages(1)) for each in self.sendings])

    @cached_property
    def bytes(self) -> dict[Path, int]:
        """Bytes of the message of each sending node."""
        return {sending.path: sending.bytes for sending in self.sendings}

    @cached_property
    def heaviest(self) -> int:
        """Bytes of the largest state plus those of the largest array that a leaf computes."""
        return self.largest + max(bytes_of(state) for state in self.states.values())

    @cached_property
    def has_host_server(self) -> bool:
        """True if a server computes in plain Python."""
        return any(isinstance(sending.node, Server) and sending.node.host for sending in self.sendings)

    @cached_property
    def has_votes(self) -> bool:
        """True if clients vote on the end of a loop."""
        return any(loop.votes for _, _, loop in self.loops)

    def passes(self, agreed: Mapping[Path, int] | None = None) -> dict[Path, int]:
        """Return the number of passes through each loop body.

        `agreed` has the passes of loops whose length is decided during the run. None takes the limits of these loops.
        """
        passes: dict[Path, int] = {(): 1}
        for body, around, node in self.loops:
            if agreed is None or not node.agreed:
                passes[body] = node.at_most * passes[around]
            else:
                passes[body] = int(agreed[body])
        return passes

    def held(self, path: Path) -> list[PyTree]:
        """Return the shapes of the states outside of the scopes around a node, outermost first."""
        return [self.states[each] for each in self.scopes if len(each) < len(path) and each == path[: len(each)]]

    def floats(self, exchanges: Mapping[Path, Any], clients: int) -> Any:
        """Return how many numbers each client sends, from the number of exchanges at each path.

        Along a tree it is the mean over clients, rounded.
        """
        # In an exchange each client sends once. Along a tree `exchanges` counts the messages of all clients together.
        along = {path: self.width[path] for path in self.by_tree} | {LEARNING: clients}
        each = {path: width for path, width in self.width.items() if path not in along}
        shared, rest = np.divmod(_weighted(exchanges, along), clients)
        floats = _weighted(exchanges, each) + shared
        return floats + ((2 * rest > clients) | ((2 * rest == clients) & (floats % 2 == 1)))  # halves to even

    def total(self, agreed: Mapping[Path, int]) -> Work:
        """Return the numbers of gradients and products in a run with these passes of loops."""
        passes, total = self.passes(agreed), Work()
        for body, done in self.work.items():
            total.update({kind: passes[body] * count for kind, count in done.items()})
        return total


def _weighted(counts: Mapping[Path, Any], widths: Mapping[Path, int]) -> np.ndarray:
    """Return the sum of the counts at the given paths times their widths, as 64-bit integers."""
    sent = [width * np.asarray(counts[path], np.int64) for path, width in widths.items() if path in counts]
    return np.asarray(sum(sent), int)


def profile(program: Node | ProgramRecipe, state: PyTree, data: PyTree, clients: int) -> Profile:
    """Walk a program once from one client's state (arrays or shapes) and trace each of its leaves.

    The profile depends on structure and shapes alone and is cached by them.
    """
    shapes = jax.eval_shape(lambda *trees: trees, state, data)
    leaves, structure = jax.tree.flatten((as_recipe(program).shapes(), *shapes))
    return _profile(structure, tuple(leaves), clients, jax.config.read("jax_enable_x64"))


# Called with each leaf of a program: the node's path, the role, the function, its trace, and the shapes it returns.
# The trace's inputs are the leaves of (client, round, key, data, arguments). A leaf that receives the answer of a host
# function has no trace, because the shapes are known only after the call.
Visit = Callable[[Path, Role, Callable[..., Any], ClosedJaxpr | None, PyTree], None]


def visit_leaves(program: Node | ProgramRecipe, state: PyTree, data: PyTree, clients: int, visit: Visit) -> Profile:
    """Trace each leaf of a program from one client's state (arrays or shapes) and pass it to `visit`."""
    shapes = jax.eval_shape(lambda *trees: trees, state, data)
    leaves, structure = jax.tree.flatten((as_recipe(program).shapes(), *shapes))
    return _profile.__wrapped__(structure, tuple(leaves), clients, jax.config.read("jax_enable_x64"), visit)


def one_client(tree: PyTree) -> PyTree:
    """Return the shapes of one of several stacked clients."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves])


def all_clients(tree: PyTree, clients: int) -> PyTree:
    """Return the shapes of `clients` stacked clients from those of one."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((clients, *leaf.shape), leaf.dtype), tree)


def bytes_of(tree: PyTree) -> int:
    """Return the bytes of the arrays, or shapes of arrays, in a pytree."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return sum([leaf.size * leaf.dtype.itemsize for leaf in leaves])


def outline(node: Node) -> Node:
    """Return a node without its functions and without the nodes below it."""
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    bare = {name: _no_function for name, value in values.items() if callable(value)}
    return replace(node, **bare, **({"body": Sequence()} if "body" in values else {}))


def _no_function(*_: Any) -> None:
    raise AssertionError("the nodes of a profile lack their functions")


def traced(f: Callable[..., Any], clients: int, data: PyTree, *args: PyTree) -> tuple[Any, Work]:
    """Return the shapes that a leaf returns, and its gradients and products, from the shapes of one client."""
    shapes, jaxpr = trace_leaf(f, clients, data, *args)
    return shapes, work_of(jaxpr.jaxpr)


def trace_leaf(f: Callable[..., Any], clients: int, data: PyTree, *args: PyTree) -> tuple[PyTree, ClosedJaxpr]:
    """Return the shapes that a leaf returns, and its trace, from the shapes of one client."""

    def call(client, round, key, data, *args):
        return f(*args, Context(client, clients, round, key, data, key))

    integer, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(integer, integer, key, data, *args)
    return shapes, jaxpr


@lru_cache(maxsize=256)  # tracing costs as much as many rounds
def _profile(structure: Any, leaves: tuple[Any, ...], clients: int, wide: bool, visit: Visit | None = None) -> Profile:
    recipe, state, data = structure.unflatten(leaves)
    numbers, rest = eqx.partition(recipe, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    tracer = _Tracer(data, clients, visit)
    results: list[tuple[PyTree, int]] = []

    def trace(numbers: ProgramRecipe) -> None:
        program = eqx.combine(numbers, rest).program()
        results.append((tracer.walk(program, state, (), ()), work(program)))

    jax.eval_shape(trace, numbers)
    (result, leaves_run), sendings, loops = results[0], tuple(tracer.sendings), tuple(tracer.loops)
    scopes, most = tuple(tracer.scopes), tracer.largest
    return Profile(sendings, loops, tracer.work, tracer.states, result, scopes, tracer.effort, leaves_run, most)


class _Tracer:
    """One walk over a program with the shapes of one client's state.

    In all methods, `body` is the path of the body of the innermost enclosing loop.
    """

    def __init__(self, data: PyTree, clients: int, visit: Visit | None):
        self.data, self.clients, self.visit = data, clients, visit
        self.number, self.key = jax.eval_shape(lambda: (jnp.zeros(()), jax.random.key(0)))
        self.sendings: list[Sending] = []
        self.loops: list[tuple[Path, Path, Repeat]] = []
        self.work: dict[Path, Work] = {}
        self.states: dict[Path, PyTree] = {}
        self.scopes: list[Path] = []
        # A leaf that occurs at several places of a program is traced once.
        self.seen: dict[Any, tuple[Any, ClosedJaxpr, Work, int]] = {}
        self.effort: dict[Path, tuple[int, int]] = {}
        self.largest = 0

    def walk(self, node: Node, state: PyTree, path: Path, body: Path) -> PyTree:
        """Return the shapes of the state after a node."""
        self.states[path] = state
        return _WALKS[type(node)](self, node, state, path, body)

    def local(self, node: Local, state: PyTree, path: Path, body: Path) -> PyTree:
        return self.leaf(path, Role.LOCAL, node.f, body, state)

    def sequence(self, node: Sequence, state: PyTree, path: Path, body: Path) -> PyTree:
        for position, child in enumerate(node.nodes):
            state = self.walk(child, state, (*path, position), body)
        return state

    def scope(self, node: Scope, state: PyTree, path: Path, body: Path) -> PyTree:
        self.scopes.append(path)
        inner = self.walk(node.body, self.leaf(path, Role.ENTER, node.enter, body, state), (*path, 0), body)
        return self.leaf(path, Role.LEAVE, node.leave, body, state, inner)

    def repeat(self, node: Repeat, state: PyTree, path: Path, body: Path) -> PyTree:
        inside = (*path, 0)
        self.loops.append((inside, body, cast(Repeat, outline(node))))
        if node.times is not None:
            self.leaf(path, Role.TIMES, node.times, body, state)
        self.walk(node.body, state, inside, inside)
        if node.until is not None:
            self.leaf(path, Role.UNTIL, node.until, inside, state)
        if node.votes:
            self.send(node, jax.ShapeDtypeStruct((), jnp.float32), path, inside)
        return state

    def exchange(self, node: Exchange, state: PyTree, path: Path, body: Path) -> PyTree:
        total = self.send(node, self.leaf(path, Role.SEND, node.send, body, state), path, body)
        if node.reduce == "sum":
            total = self.sum_messages(total)
        elif node.reduce == "stack":
            total = self.stack_messages(total)
        if callable(node.weights):
            self.leaf(path, Role.WEIGHTS, node.weights, body, state)
        heard = jax.ShapeDtypeStruct((self.clients,), jnp.bool_) if node.observe else None
        sent = self.stack_messages(self.number) if node.observe else None
        return self.leaf(path, Role.RECEIVE, node.take, body, state, total, self.number, heard, sent)

    def average(self, node: Average, state: PyTree, path: Path, body: Path) -> PyTree:
        value, mass = self.leaf(path, Role.ENTER, node.get, body, state)
        self.send(node, (value, mass) if node.by == "push" else value, path, body)
        put = node.each_answers().put
        after = self.leaf(path, Role.LEAVE, put, body, state, self.sum_messages(value), mass)
        if node.ends is not None:
            answer = self.leaf(path, Role.UNTIL, node.ends, body, after)
            self.sendings[-1] = replace(self.sendings[-1], answer=answer)
        return after

    def server(self, node: Server, state: PyTree, path: Path, body: Path) -> PyTree:
        message = self.send(node, self.leaf(path, Role.SEND, node.send, body, state), path, body)
        if node.host:  # the answer's shapes are known only after the call; most keep the shape of the state
            if self.visit is not None:
                self.visit(path, Role.RECEIVE, node.receive, None, None)
            return state
        answers = jax.eval_shape(node.compute, self.stack_messages(message), self.key)
        return self.leaf(path, Role.RECEIVE, node.receive, body, state, one_client(answers))

    def leaf(self, path: Path, role: Role, f: Callable[..., Any], body: Path, *args: PyTree) -> Any:
        """Return the shapes that a leaf returns, and count its work."""
        given, around = jax.tree.flatten(args)
        asked = (f, around, *given)
        if asked not in self.seen:
            shapes, jaxpr = trace_leaf(f, self.clients, self.data, *args)
            self.seen[asked] = shapes, jaxpr, work_of(jaxpr.jaxpr), operations(jaxpr.jaxpr)
            self.largest = max(self.largest, largest(jaxpr.jaxpr))
        shapes, jaxpr, done, taken = self.seen[asked]
        self.work[body] = self.work.get(body, Work()) + done
        count, so_far = self.effort.get(body, (0, 0))
        self.effort[body] = count + 1, so_far + taken
        if self.visit is not None:
            self.visit(path, role, f, jaxpr, shapes)
        return shapes

    def send(self, node: Node, message: PyTree, path: Path, body: Path) -> PyTree:
        self.sendings.append(Sending(path, outline(node), message, body))
        return message

    def sum_messages(self, message: PyTree) -> PyTree:
        """Return the shapes of a weighted sum of messages; integers become floats."""
        floating = self.number.dtype
        return jax.tree.map(
            lambda m: m if jnp.issubdtype(m.dtype, jnp.inexact) else jax.ShapeDtypeStruct(m.shape, floating), message
        )

    def stack_messages(self, message: PyTree) -> PyTree:
        """Return the shapes of all clients' messages, stacked."""
        return all_clients(message, self.clients)


_WALKS: dict[type, Callable[..., PyTree]] = {
    Local: _Tracer.local,
    Sequence: _Tracer.sequence,
    Scope: _Tracer.scope,
    Repeat: _Tracer.repeat,
    Exchange: _Tracer.exchange,
    Average: _Tracer.average,
    Server: _Tracer.server,
}
