"""The nodes of a program, which is one client's code: what the client sends and how it uses what it receives.

A program is a short tree of nodes. Its leaves are pure functions of one client's state, which is any pytree. Only the
messages of the nodes cross between clients. Engines host clients and interpret the tree. So an algorithm is written
once and runs vectorized on one device, sharded over many, or with one process per client.

Random keys are folded from the run's key on the path to a leaf: the position in each `Sequence` and the iteration of
each `Repeat`. Then the leaf's role and the client's number are folded in. So every engine draws the same numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base.errors import InvalidInput

State = PyTree
Message = PyTree


class Role(IntEnum):
    """Purpose of a leaf: a part of the leaf's key, so that no two leaves of a node draw the same numbers."""

    LOCAL = 0
    SEND = 1
    WEIGHTS = 2
    RECEIVE = 3
    ENTER = 4
    LEAVE = 5
    UNTIL = 6
    TIMES = 7
    RECORD = 8
    COMPUTE = 9


# A number above all positions and iterations that are folded into the key on the path to a leaf.
LEAF = 1 << 31


def leaf_key(key: PRNGKeyArray, role: Role, client: Int[Array, ""] | int) -> PRNGKeyArray:
    """Return the key of one client's leaf at a node whose key is `key`."""
    return jax.random.fold_in(jax.random.fold_in(key, LEAF + role), client)


class Context(eqx.Module):
    """Arguments of a leaf besides the client's state.

    Args:
        client: The client's number, from 0.
        clients: Number of clients.
        round: Iteration of the innermost enclosing loop, from 0.
        key: Random key of this leaf, client and round.
        data: The client's own data, such as `Data`.
        common_key: Random key of this leaf and round, the same at every client. It is not secret.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> numbers = hp.programs.Repeat(hp.programs.Local(lambda x, ctx: x + ctx.round + ctx.data), 3)
        >>> start, data = jnp.zeros(2), jnp.array([0.0, 10.0])
        >>> hp.Simulate().run(numbers, hp.networks.Ring(2), start, data, jax.random.key(0)).states.tolist()
        [3.0, 33.0]
    """

    client: Int[Array, ""]
    clients: int = eqx.field(static=True)
    round: Int[Array, ""]
    key: PRNGKeyArray
    data: PyTree
    common_key: PRNGKeyArray | None = None


class Inbox(eqx.Module):
    """Messages that one client received in one exchange.

    Args:
        total: Messages of the *other* clients, combined with their weights. Stacked messages have one row per sender,
            with zeros if no message of that sender arrived.
        own: Weight that the client keeps for its own message.
        heard: True for each sender whose message arrived. None unless the exchange has `observe=True`.
        sent: Weights that the client used as a sender, by receiver. None unless the exchange has `observe=True`.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inbox = hp.programs.Inbox(total=jnp.array(3.0), own=jnp.array(0.5))
        >>> float(inbox.mix(jnp.array(2.0)))  # 0.5·2 + 3
        4.0
    """

    total: Message
    own: Float[Array, ""]
    heard: Bool[Array, " n"] | None = None
    sent: Float[Array, " n"] | None = None

    def mix(self, own: Message) -> Message:
        """Return the weighted sum of the client's own message and the others' messages, in the types of `own`."""
        return jax.tree.map(lambda mine, others: (self.own * mine + others).astype(mine.dtype), own, self.total)


class Local(eqx.Module):
    """Local work without messages: `state ← f(state, context)`.

    Args:
        f: Pure function of one client's state and `Context` that returns the new state.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> add = hp.programs.Local(lambda x, ctx: x + ctx.client)
        >>> hp.Simulate().run(add, hp.networks.Ring(3), jnp.zeros(3), None, jax.random.key(0)).states.tolist()
        [0.0, 1.0, 2.0]
    """

    f: Callable[[State, Context], State] = eqx.field(static=True)


class Exchange(eqx.Module):
    """One round: each client sends one message over the network's live links, then uses the messages that arrived.

    Args:
        send: `send(state, context)` returns the message, any pytree.
        receive: `receive(state, inbox, context)` returns the new state from the messages of the *other* clients.
        weights: Weights of messages. `"push"`: column-stochastic weights, set by the sender. `"gossip"`: doubly
            stochastic weights. `"ones"`: all weights are 1. `"reverse"`: the weight with which the receiver pushes to
            that sender. A function of the receiver's state and context returns one weight per sender.
        reduce: Combination of messages: `"sum"`, `"max"`, or `"stack"`, which keeps one unweighted row per sender.
        conserved: True if the sum over clients must survive lost messages, such as push-sum mass. On lossy networks
            such messages are sent as running sums per link, so a later message delivers what was lost.
        observe: True to fill `heard` and `sent` of the inbox.

    Raises:
        InvalidInput: A conserved message is not pushed and summed, or a stacked message is weighted.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> mix = hp.programs.Exchange(lambda x, ctx: x, lambda x, inbox, ctx: inbox.mix(x), weights="gossip")
        >>> network = hp.networks.FullyConnected(2)
        >>> hp.Simulate().run(mix, network, jnp.array([0.0, 1.0]), None, jax.random.key(0)).states.tolist()
        [0.5, 0.5]
    """

    send: Callable[[State, Context], Message] = eqx.field(static=True)
    receive: Callable[[State, Inbox, Context], State] = eqx.field(static=True)
    weights: Literal["push", "gossip", "ones", "reverse"] | Callable[[State, Context], Float[Array, " n"]] = eqx.field(
        static=True, default="push"
    )
    reduce: Literal["sum", "max", "stack"] = eqx.field(static=True, default="sum")
    conserved: bool = eqx.field(static=True, default=False)
    observe: bool = eqx.field(static=True, default=False)

    def take(self, state: State, total: Message, own: Any, heard: Any, sent: Any, ctx: Context) -> State:
        """Return the state after `receive` got an inbox with these fields."""
        return self.receive(state, Inbox(total, own, heard, sent), ctx)

    @property
    def link_weights(self) -> Literal["push", "gossip", "ones"]:
        """Kind of weights to request from the network."""
        if callable(self.weights):
            return "ones"
        return "push" if self.weights == "reverse" else self.weights

    def __check_init__(self):
        if self.conserved and (self.weights != "push" or self.reduce != "sum"):
            raise InvalidInput("Exchange.conserved", (self.weights, self.reduce), "only sums of pushed messages")
        if self.reduce == "stack" and self.weights != "ones":
            raise InvalidInput("Exchange.weights", self.weights, "'ones' for messages that are stacked")


class Average(eqx.Module):
    """An average over clients by `rounds` steps, as one node, so that an engine may compose them into one operator.

    There are four methods:

    - `"push"` starts from (w, ω) = (value, mass) and repeats w ← Pw, ω ← Pω. The average is w/ω (push-sum: Kempe,
      Dobra, Gehrke 2003).
    - `"gossip"` repeats w ← Ww with doubly stochastic W.
    - `"exact"` takes the plain mean in one step, like a server or an all-reduce.
    - `"tree"` also takes the plain mean. Values are summed over the network's links along a tree to client 0, and the
      mean is sent back (`hyperpush.networks.trees`).

    With `"tree"` the links decide the number of rounds. Each client sends at most two messages on average, more on
    lossy links. Engines that host all clients compute the mean in one step and count the cost of the tree; peers send
    along the tree. On random links the first such average of a run also counts the cost of learning how often links
    are up. **Use `"tree"`** where clients trust each other. A parent sees its children's sums and could falsify them.

    Args:
        get: `get(state, context)` returns `(value, mass)`. The value is any pytree, sent as one message.
        put: `put(state, average, mass, context)` returns the new state from the averaged value and the mass.
        rounds: Steps of averaging, 0 or more. 0 leaves each client its own value; more steps come closer to the mean.
            Ignored by `"exact"` and `"tree"`.
        by: Method: `"push"` on any network, `"gossip"` on undirected networks, `"exact"` with a server, or `"tree"`
            without a server.
        ends: `ends(state, context)` returns a truth value or an integer from the state after `put`. Client 0's answer
            returns with the average and becomes the field `ended` of all states. It needs `"exact"` or `"tree"`. A loop
            around the average uses `until=has_ended` and `common=True`, so clients that round differently end together.
            With None no answer is sent.
        answer: `answer(state, average, context)` returns the value that `put` gets in place of an exact mean. It may
            read only values that are equal at every client. Engines that host all clients compute this value once, so
            it is equal to the last bit. Each peer computes the value itself. With None `put` gets the mean.

    Raises:
        InvalidInput: `ends` or `answer` is given for an average that is not exact.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> mean = hp.programs.Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean, rounds=40)
        >>> start, key = jnp.array([0.0, 3.0, 6.0]), jax.random.key(0)
        >>> found = hp.Simulate().run(mean, hp.networks.DirectedRing(3), start, None, key).states
        >>> bool(abs(found - 3).max() < 1e-3)
        True
    """

    get: Callable[[State, Context], tuple[PyTree, Float[Array, ""]]] = eqx.field(static=True)
    put: Callable[[State, PyTree, Float[Array, ""], Context], State] = eqx.field(static=True)
    rounds: int = eqx.field(static=True)
    by: Literal["push", "gossip", "exact", "tree"] = eqx.field(static=True, default="push")
    ends: Callable[[State, Context], Array] | None = eqx.field(static=True, default=None)
    answer: Callable[[State, PyTree, Context], PyTree] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.ends is not None and self.by not in ("exact", "tree"):
            raise InvalidInput("Average.ends", self.by, "None, or an average by 'exact' or 'tree'")
        if self.answer is not None and self.by not in ("tree", "exact"):
            raise InvalidInput("Average.answer", self.by, "by='tree' or 'exact': other means differ between clients")

    def each_answers(self) -> "Average":
        """Return the same average, in which every client computes `answer` itself."""
        answer, put = self.answer, self.put
        if answer is None:
            return self

        def take(state: State, mean: PyTree, mass: Float[Array, ""], ctx: Context) -> State:
            return put(state, answer(state, mean, ctx), mass, ctx)

        return replace(self, put=take, answer=None)

    def stepwise(self) -> "Node":
        """Return the average as single exchanges, for engines that cannot compose them; keep averages along a tree."""
        if self.answer is not None:
            return self.each_answers().stepwise()
        if self.by == "tree":
            return self
        push = self.by == "push"

        def receive(held, inbox: Inbox, ctx):
            return inbox.mix(held) if push else (inbox.mix(held[0]), held[1])

        def leave(state, held, ctx):
            value, mass = held
            return self.put(state, jax.tree.map(lambda v: v / mass, value) if push else value, mass, ctx)

        if self.by == "exact":
            body = Server(
                send=lambda held, ctx: held[0],
                compute=lambda values, key: jax.tree.map(
                    lambda v: jnp.broadcast_to(jnp.mean(v, axis=0, keepdims=True), v.shape), values
                ),
                receive=lambda held, average, ctx: (average, held[1]),
            )
        else:
            exchange = Exchange(
                send=lambda held, ctx: held if push else held[0], receive=receive, weights=self.by, conserved=push
            )
            body = Repeat(exchange, self.rounds)
        average = Scope(body, enter=self.get, leave=leave)
        if self.ends is None:
            return average
        answer = Server(
            send=self.ends,
            compute=lambda answers, key: jnp.broadcast_to(answers[:1], answers.shape),
            receive=lambda state, answer, ctx: with_answer(state, answer),
        )
        return Sequence(average, answer)


def has_ended(state: Any, ctx: Context) -> Bool[Array, ""]:
    """Return client 0's answer to `ends` of the last average."""
    return state.ended


def with_answer(state: Any, answer: Array) -> State:
    """Return the state with client 0's answer to `ends`."""
    own = getattr(state, "with_answer", None)
    return replace(state, ended=answer) if own is None else own(answer)


class Server(eqx.Module):
    """Gather all messages at a server, compute once, and answer each client.

    If clients are peers on several machines, one named peer is the server.

    Args:
        send: `send(state, context)` returns the message.
        compute: `compute(messages, key)` gets the messages stacked on axis 0 and returns the answers stacked on axis 0.
        receive: `receive(state, answer, context)` returns the new state.
        host: True if `compute` is plain Python, such as clustering. False if it can be compiled, which is faster.

    Example:
        Every client gets the largest number.

        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> largest = hp.programs.Server(
        ...     send=lambda x, ctx: x, compute=lambda all_x, key: jnp.full_like(all_x, all_x.max()),
        ...     receive=lambda x, answer, ctx: answer,
        ... )
        >>> start, key = jnp.array([0.0, 3.0, 6.0]), jax.random.key(0)
        >>> hp.Simulate().run(largest, hp.networks.Ring(3), start, None, key).states.tolist()
        [6.0, 6.0, 6.0]
    """

    send: Callable[[State, Context], Message] = eqx.field(static=True)
    compute: Callable[[Message, PRNGKeyArray], PyTree] = eqx.field(static=True)
    receive: Callable[[State, PyTree, Context], State] = eqx.field(static=True)
    host: bool = eqx.field(static=True, default=False)


class Repeat(eqx.Module):
    """A loop that runs `body` a number of times, or until all clients vote to end.

    Args:
        body: Node to repeat; it must keep the structure of the state.
        at_most: Number of iterations, 0 or more. With `until` or `times` it is the upper limit.
        until: `until(state, context)` ends the loop when it is true at *every* client. The clients vote by
            max-consensus after each iteration, so all end in the same iteration. None: no condition.
        times: `times(state, context)` returns the number of iterations. It must be equal at every client. None takes
            `at_most` iterations.
        common: True if `until` reads only values that are equal at every client, such as an exact average. Then no
            vote is needed.
        name: Name of the loop in records, progress and errors.

    Raises:
        InvalidInput: `at_most` is negative.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> double = hp.programs.Repeat(hp.programs.Local(lambda x, ctx: 2 * x), 5)
        >>> hp.Simulate().run(double, hp.networks.Ring(2), jnp.ones(2), None, jax.random.key(0)).states.tolist()
        [32.0, 32.0]
    """

    body: "Node"
    at_most: int = eqx.field(static=True)
    until: Callable[[State, Context], Bool[Array, ""]] | None = eqx.field(static=True, default=None)
    times: Callable[[State, Context], Int[Array, ""]] | None = eqx.field(static=True, default=None)
    name: str = eqx.field(static=True, default="loop")
    common: bool = eqx.field(static=True, default=False)

    @property
    def votes(self) -> bool:
        """True if the clients vote after each iteration."""
        return self.until is not None and not self.common

    @property
    def agreed(self) -> bool:
        """True if the number of iterations is decided during the run."""
        return self.until is not None or self.times is not None

    def __check_init__(self):
        if self.at_most < 0:
            raise InvalidInput(f"{self.name}: number of rounds", self.at_most, "0 or more")


class Scope(eqx.Module):
    """Run `body` on an inner state that exists only inside the scope.

    Args:
        body: Node that runs on the inner state.
        enter: `enter(state, context)` returns the inner state.
        leave: `leave(state, inner, context)` returns the state after the scope from the outer and the inner state.

    Example:
        Inside, the state is a pair; outside, the number alone.

        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> swap = hp.programs.Local(lambda pair, ctx: (pair[1], pair[0]))
        >>> program = hp.programs.Scope(swap, lambda x, ctx: (x, 10 * x), lambda x, pair, ctx: pair[0])
        >>> hp.Simulate().run(program, hp.networks.Ring(2), jnp.ones(2), None, jax.random.key(0)).states.tolist()
        [10.0, 10.0]
    """

    body: "Node"
    enter: Callable[[State, Context], State] = eqx.field(static=True)
    leave: Callable[[State, State, Context], State] = eqx.field(static=True)


class Sequence(eqx.Module):
    """A node that runs other nodes one after the other.

    Args:
        nodes: Nodes in the order in which they run. An empty sequence does nothing.
        appended: True if the first node is a whole program and the others only read its end state. Then the first
            node draws the same random numbers as it does alone; the others draw none.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> add, double = (hp.programs.Local(f) for f in (lambda x, ctx: x + 1, lambda x, ctx: 2 * x))
        >>> both = hp.programs.Sequence(add, double)
        >>> hp.Simulate().run(both, hp.networks.Ring(2), jnp.zeros(2), None, jax.random.key(0)).states.tolist()
        [2.0, 2.0]
    """

    nodes: tuple["Node", ...]
    appended: bool = eqx.field(static=True)

    def __init__(self, *nodes: "Node", appended: bool = False):
        self.nodes, self.appended = nodes, appended

    def keeps_key(self, position: int) -> bool:
        """Return True if the node at this position draws the same numbers as it does alone."""
        return self.appended and position == 0


Node = Local | Exchange | Average | Server | Repeat | Scope | Sequence

Path = tuple[int, ...]  # place of a node in the tree: its position in each sequence above it, and 0 for a loop or scope


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below a node."""
    if isinstance(node, Sequence):
        return node.nodes
    if isinstance(node, Repeat | Scope):
        return (node.body,)
    return ()


def contains(node: Node, test: Callable[[Node], bool]) -> bool:
    """Return True if `test` holds for the node or for any node below it."""
    for each in _below(node):  # noqa: SIM110 (saves a call per node, which `any` of a generator needs)
        if test(each):
            return True
    return False


def _below(node: Node) -> tuple[Node, ...]:
    """Return the node and all nodes below it; the result is cached, because engines ask often."""
    known = vars(node).get("_below")
    if known is None:
        known = (node,)
        for child in children(node):
            known += _below(child)
        object.__setattr__(node, "_below", known)  # not a field, so equality and JAX ignore it
    return known


def work(node: Node) -> int:
    """Return the largest number of leaves that one pass through the node executes."""
    known = vars(node).get("_work")
    if known is None:
        inside = sum(map(work, children(node))) or 1
        known = inside * node.at_most if isinstance(node, Repeat) else inside
        object.__setattr__(node, "_work", known)
    return known
