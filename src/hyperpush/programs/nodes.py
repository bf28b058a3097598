"""An algorithm as what one client does: what it sends, and what it does with what arrives.

A program is a short tree of nodes. Its leaves are pure functions of one client's state (any pytree); nothing but the
messages of the nodes below ever crosses between clients. Engines host clients and interpret the tree, so an
algorithm is written once and runs vectorized on one device, sharded over many, or with one process per client.

Random keys are folded from the run's key along the way to a leaf (position in each `Sequence`, iteration of each
`Repeat`), then with the leaf's role and the client's number, so every engine draws the same numbers.
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
    """What a leaf is for; part of its key, so that no two leaves of a node draw the same numbers."""

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


# Positions and iterations, with which keys are folded on the way to a leaf, stay below.
LEAF = 1 << 31


def leaf_key(key: PRNGKeyArray, role: Role, client: Int[Array, ""] | int) -> PRNGKeyArray:
    """The key of one client's leaf at a node whose key is `key`."""
    return jax.random.fold_in(jax.random.fold_in(key, LEAF + role), client)


class Context(eqx.Module):
    """What a leaf may know besides the client's state.

    Args:
        client: The client's number, from 0.
        clients: How many there are.
        round: The iteration of the innermost loop around, from 0.
        key: The leaf's own, for this client and round.
        data: The client's own data, such as `Data`.
        common_key: Of this leaf and round, the same at every client; never secret.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> numbers = hp.programs.Repeat(hp.programs.Local(lambda x, ctx: x + ctx.round + ctx.data), 3)
        >>> start, data = jnp.zeros(2), jnp.array([0.0, 10.0])
        >>> hp.Simulate().run(numbers, hp.networks.Ring(2), start, data, jax.random.key(0)).states.tolist()
        [3.0, 33.0]
    """

    client: Int[Array, ""]
    clients: int = eqx.field(static=True)
    round: Int[Array, ""]  # iteration of the innermost enclosing Repeat
    key: PRNGKeyArray  # this leaf's own, for this client and round
    data: PyTree  # the client's private data
    common_key: PRNGKeyArray | None = None  # of this leaf and round, for draws that are the same at every client


class Inbox(eqx.Module):
    """What one client received in one exchange.

    Args:
        total: The messages of the *others*, combined with their weights.
        own: The weight that the client keeps for its own message.
        heard: Who was heard; None unless the exchange observes.
        sent: The weights used as a sender, by receiver; None unless the exchange observes.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inbox = hp.programs.Inbox(total=jnp.array(3.0), own=jnp.array(0.5))
        >>> float(inbox.mix(jnp.array(2.0)))  # 0.5·2 + 3
        4.0
    """

    total: Message  # the messages of the *others*, combined with their weights; stacked, zeros where none was heard
    own: Float[Array, ""]  # the weight the client keeps for its own message
    heard: Bool[Array, " n"] | None = None  # who was heard (only with `observe`)
    sent: Float[Array, " n"] | None = None  # the weights used as a sender, by receiver (only with `observe`)

    def mix(self, own: Message) -> Message:
        """The client's own message and the others', weighed; in the own message's types."""
        return jax.tree.map(lambda mine, others: (self.own * mine + others).astype(mine.dtype), own, self.total)


class Local(eqx.Module):
    """Work without talking: `state ← f(state, context)`.

    Args:
        f: A pure function of one client's state and `Context`; it returns the new state.

    Example:
        >>> import jax, jax.numpy as jnp, hyperpush as hp
        >>> add = hp.programs.Local(lambda x, ctx: x + ctx.client)
        >>> hp.Simulate().run(add, hp.networks.Ring(3), jnp.zeros(3), None, jax.random.key(0)).states.tolist()
        [0.0, 1.0, 2.0]
    """

    f: Callable[[State, Context], State] = eqx.field(static=True)


class Exchange(eqx.Module):
    """One round: everybody sends one message over the network's live links, then takes in what arrived.

    Args:
        send: `send(state, context)` makes the message, any pytree.
        receive: `receive(state, inbox, context)` makes the new state from what the *others* sent.
        weights: Who weighs a message: the sender (`"push"`, column-stochastic), both (`"gossip"`, doubly stochastic),
            nobody (`"ones"`), or the receiver: as much as it pushes to that sender (`"reverse"`), or by a function of
            its state and context that returns one weight per sender.
        reduce: How messages meet: their `"sum"`, their `"max"`, or `"stack"`: one row per sender, none of them weighed.
        conserved: Whether the sum over clients must survive loss (push-sum mass). On a faulty network such messages
            travel as running sums per link, so that nothing is lost for good.
        observe: Whether the inbox says who was heard, and the weights used as a sender.

    Raises:
        InvalidInput: A conserved message that is not pushed and summed, or a stacked one that is weighed.

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
        """The state after this has arrived."""
        return self.receive(state, Inbox(total, own, heard, sent), ctx)

    @property
    def link_weights(self) -> Literal["push", "gossip", "ones"]:
        """The weights to ask the network for."""
        if callable(self.weights):
            return "ones"
        return "push" if self.weights == "reverse" else self.weights

    def __check_init__(self):
        if self.conserved and (self.weights != "push" or self.reduce != "sum"):
            raise InvalidInput("Exchange.conserved", (self.weights, self.reduce), "only sums of pushed messages")
        if self.reduce == "stack" and self.weights != "ones":
            raise InvalidInput("Exchange.weights", self.weights, "'ones' for messages that are stacked")


class Average(eqx.Module):
    """`rounds` steps of averaging, a node of its own so that an engine may compose them into one operator.

    `"push"`: w ← Pw, ω ← Pω from (value, mass), average = w/ω (push-sum: Kempe, Dobra, Gehrke 2003). `"gossip"`:
    w ← Ww with doubly stochastic W. `"exact"`: the plain mean at once, as a server or an all-reduce would give it.
    `"tree"`: the plain mean again, summed over the network's own links along a tree to client 0 and sent back, as
    `hyperpush.networks.trees` describes. It takes as many rounds as the links allow, and each client sends at most two
    messages on average, more where links lose some. Engines that host all clients compute the mean at once, and count
    what the tree takes; peers send along it. The first such average of a run on random links also counts what it takes
    to learn how often they are up. **Use it** where clients trust each other. A parent sees its children's sums and
    could falsify them.

    Args:
        get: `get(state, context)` gives `(value, mass)`. A value is any pytree: several travel in one message.
        put: `put(state, average, mass, context)` takes back the averaged value and the mass.
        rounds: Steps of averaging, 0 or more; 0 leaves everybody its own value. More are closer to the mean. Exact
            means ignore it.
        by: How: `"push"` on any network, `"gossip"` on undirected ones, `"exact"` with a server, `"tree"` without one.
        ends: `ends(state, context)` on the state after `put`: a truth value or an integer. The answer of client 0 comes
            back with the average, by `"exact"` or `"tree"`, and becomes the field `ended` of all states. A loop around
            it takes `until=has_ended` and `common=True`: clients that round differently end it together. None: nothing
            is asked.
        answer: `answer(state, average, context)` is what `put` takes in place of an exact mean. It looks only at what
            is the same at every client. Engines that host all clients compute it once, so that it is the same to the
            last bit, and vectors that follow from it never part. Among peers each computes it. None: the mean itself.

    Raises:
        InvalidInput: An `ends` or an `answer` of an average that is not exact.

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
        """The same average, whose answer every client computes."""
        answer, put = self.answer, self.put
        if answer is None:
            return self

        def take(state: State, mean: PyTree, mass: Float[Array, ""], ctx: Context) -> State:
            return put(state, answer(state, mean, ctx), mass, ctx)

        return replace(self, put=take, answer=None)

    def stepwise(self) -> "Node":
        """The same average as single exchanges, for engines that cannot compose them; along a tree it stays one."""
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
    """The answer that client 0 gave to `ends` of the last average."""
    return state.ended


def with_answer(state: Any, answer: Array) -> State:
    """The state with the answer of client 0 to `ends`."""
    own = getattr(state, "with_answer", None)
    return replace(state, ended=answer) if own is None else own(answer)


class Server(eqx.Module):
    """Gather everyone's message, compute once, answer each. On real peers one named peer plays the server.

    Args:
        send: `send(state, context)` makes the message.
        compute: `compute(messages, key)` sees the messages stacked on axis 0 and returns the answers stacked alike.
        receive: `receive(state, answer, context)` makes the new state.
        host: Whether `compute` is plain Python (clustering, a solver); otherwise it must be jittable, which is faster.

    Example:
        Everybody gets the largest number.

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
    """A loop over `body`.

    Args:
        body: What is repeated; it must keep the structure of the state.
        at_most: How often, 0 or more; with `until` or `times` at most so often.
        until: `until(state, context)` ends the loop when it holds at *every* client. The clients find that out by
            max-consensus after each iteration, so nobody falls out of step.
        times: `times(state, context)` says how often; every client must hold the same number, e.g. one agreed on.
        common: Whether `until` looks only at what is the same at every client, such as an exact average. Then all know
            without a vote when to end.
        name: By which the loop is recorded, shown, and named when it diverges.

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
        """Whether the clients vote after each iteration."""
        return self.until is not None and not self.common

    @property
    def agreed(self) -> bool:
        """Whether the clients decide during the run how often it runs."""
        return self.until is not None or self.times is not None

    def __check_init__(self):
        if self.at_most < 0:
            raise InvalidInput(f"{self.name}: number of rounds", self.at_most, "0 or more")


class Scope(eqx.Module):
    """Run `body` on a state of its own.

    Args:
        body: What runs inside.
        enter: `enter(state, context)` makes the state inside.
        leave: `leave(state, inner, context)` makes the state after it from the one before and the one inside.

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
    """One node after the other.

    Args:
        nodes: In the order in which they run; none of them is a node that does nothing.
        appended: Whether the first is a program and the others only look at where it ended: they draw nothing, and it
            draws what it would draw alone.

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
        """Whether a node draws as if it stood alone."""
        return self.appended and position == 0


Node = Local | Exchange | Average | Server | Repeat | Scope | Sequence

Path = tuple[int, ...]  # where a node stands: positions in the sequences above it; a loop adds 0


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below a node."""
    if isinstance(node, Sequence):
        return node.nodes
    if isinstance(node, Repeat | Scope):
        return (node.body,)
    return ()


def contains(node: Node, test: Callable[[Node], bool]) -> bool:
    """Whether `test` holds for the node or anything below it."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if test(each):
            return True
        waiting += children(each)
    return False


def work(node: Node) -> int:
    """How many leaves one pass through the node executes at most."""
    inside = sum(map(work, children(node))) or 1
    return inside * node.at_most if isinstance(node, Repeat) else inside
