"""The interpreter of the compiled engines: a program's tree becomes one XLA program over stacked clients.

It sees clients in blocks (`placement.py`): all of them on one device, or one block per device. States, messages and
data have the block's clients on axis 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from hyperpush.engines import lossy
from hyperpush.engines.faults import Faults
from hyperpush.engines.placement import Placement, alive_rows, along, weight_rows
from hyperpush.engines.result import Recorder
from hyperpush.engines.rows import rowwise
from hyperpush.networks import Links, Network, Weights
from hyperpush.networks.mixing import mixing_matrix
from hyperpush.programs import (
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
    State,
    leaf_key,
)


class Clock(eqx.Module):
    """Network time and what has happened."""

    step: Int[Array, ""]  # every exchange takes one step of network time
    passes: dict[Path, Int[Array, ""]]  # how often the bodies of loops of an agreed length have run
    late: Int[Array, ""]  # messages that came too late and were dropped
    split: Bool[Array, ""]  # clients disagreed about ending a loop

    @staticmethod
    def start(bodies: Iterable[Path], step: int) -> "Clock":
        zero = jnp.zeros((), jnp.int32)
        return Clock(jnp.asarray(step, jnp.int32), dict.fromkeys(bodies, zero), zero, jnp.zeros((), bool))

    def advance(self, rounds: Any = 1, late: Any = 0) -> "Clock":
        return replace(self, step=self.step + rounds, late=self.late + late)

    def disagree(self, split: Bool[Array, ""]) -> "Clock":
        return replace(self, split=self.split | split)

    def row(self) -> Int[Array, " columns"]:
        """The step, then the passes by the order of their paths: what is noted beside a record."""
        return jnp.stack(jax.tree.leaves((self.step, self.passes)))

    def passed(self, body: Path, times: Any) -> "Clock":
        return replace(self, passes={**self.passes, body: self.passes[body] + times})


class Carry(eqx.Module):
    """Everything a loop carries from one round to the next."""

    states: State
    clock: Clock
    totals: dict[Path, lossy.Totals]  # running sums of the links, only on a faulty network
    sent: dict[Path, Any]  # messages that each client has put on a link, by the place that sends: integers [b]

    def sending(self, path: Path, messages: Any) -> "Carry":
        """After so many more messages of each client."""
        return replace(self, sent={**self.sent, path: self.sent[path] + messages})


def with_states(carry: Carry, states: State) -> Carry:
    return replace(carry, states=states)


def restarted(carry: Carry, states: State, path: Path) -> Carry:
    """A new state for what is below `path`: what is still under way there belongs to the old one and is dropped."""
    totals = {place: old.restarted() if place[: len(path)] == path else old for place, old in carry.totals.items()}
    return replace(carry, states=states, totals=totals)


class Apply(eqx.Module):
    """A bare per-client function, run as a node by the host; of several parts the states are a tuple, given in turn."""

    f: Callable[..., Any] = eqx.field(static=True)
    role: Role = eqx.field(static=True)

    @property
    def several(self) -> bool:
        """Whether it takes what came of another node besides the state."""
        return self.role in (Role.LEAVE, Role.RECEIVE)


class Interpreter(eqx.Module):
    """Runs nodes for one block of clients."""

    network: Network
    placement: Placement
    data: PyTree
    network_key: PRNGKeyArray
    faults_key: PRNGKeyArray
    faults: Faults | None = None
    agreement: int = eqx.field(static=True, default=1)  # rounds of max-consensus that reach everyone
    batch: int | None = eqx.field(static=True, default=None)  # clients per vectorised batch; None: all at once

    def apply(
        self, f: Callable[..., Any], role: Role, key: PRNGKeyArray, round: Int[Array, ""], *stacked: PyTree
    ) -> Any:
        """`f(*one client's slices, context)` for every client of the block."""

        def one(state, others):
            client, data, more = others
            context = Context(client, self.network.clients, round, leaf_key(key, role, client), data)
            return f(state, *more, context)

        states, *more = stacked
        others = (self.placement.ids(), self.data, more)
        if self.batch is None:
            return jax.vmap(one)(states, others)
        return rowwise(one, states, others, self.batch)

    def run(self, node: Node | Apply, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""], path: Path = ()) -> Carry:
        """One pass through `node`."""
        if isinstance(node, Apply):
            parts = carry.states if node.several else (carry.states,)
            return with_states(carry, self.apply(node.f, node.role, key, round, *parts))
        if isinstance(node, Local):
            return with_states(carry, self.apply(node.f, Role.LOCAL, key, round, carry.states))
        if isinstance(node, Sequence):
            for position, child in enumerate(node.nodes):
                carry = self.run(child, carry, jax.random.fold_in(key, position), round, (*path, position))
            return carry
        if isinstance(node, Scope):
            inner = self.apply(node.enter, Role.ENTER, key, round, carry.states)
            after = self.run(node.body, restarted(carry, inner, path), key, round, (*path, 0))
            return with_states(after, self.apply(node.leave, Role.LEAVE, key, round, carry.states, after.states))
        if isinstance(node, Repeat):
            return self.loop(node, carry, key, round, path, 0, node.at_most)[0]
        if isinstance(node, Exchange):
            return self.exchange(node, carry, key, round, path)
        if isinstance(node, Average):
            return self.average(node, carry, key, round, path)
        return self.serve(node, carry, key, round, path)

    # ------------------------------------------------------------------ loops

    def loop(
        self,
        node: Repeat,
        carry: Carry,
        key: PRNGKeyArray,
        round: Int[Array, ""],
        path: Path,
        start: Any,
        stop: Any,
        recorder: Recorder | None = None,
        records: PyTree = None,
        every: int = 1,
    ) -> tuple[Carry, PyTree, Int[Array, ""], Bool[Array, ""]]:
        """Iterations start…stop−1 of a loop; also the records made, the next iteration, and whether all agreed to end.

        What is recorded after every `every`-th iteration is written into the buffers `records` (see `buffers`), from
        row 0 on, which is that of the entry where there is one.
        """
        if node.times is not None:
            times = self.apply(node.times, Role.TIMES, key, round, carry.states)
            largest = self.placement.max(times)
            carry = replace(carry, clock=carry.clock.disagree(self.placement.any(times != largest)))
            stop = jnp.minimum(stop, largest)

        def write(records, row, carry: Carry, key, i, passed):
            assert recorder is not None
            values = self.apply(recorder.f, Role.RECORD, key, i, carry.states)
            clock = carry.clock.passed((*path, 0), passed) if node.agreed else carry.clock
            return jax.tree.map(lambda rows, v: rows.at[row].set(v), records, (values, clock.row()))

        entry = recorder is not None and recorder.entry
        begins = jnp.asarray(start == 0)
        if entry:
            zero = jnp.zeros((), jnp.int32)
            records = jax.lax.cond(begins, lambda r: write(r, 0, carry, key, zero, 0), lambda r: r, records)

        def step(loop_state):
            i, carry, records, _ = loop_state
            inner_key = jax.random.fold_in(key, i)
            carry = self.run(node.body, carry, inner_key, i, (*path, 0))
            done = jnp.zeros((), bool)
            if node.until is not None:
                votes = self.apply(node.until, Role.UNTIL, inner_key, i, carry.states)
                carry, done = self.agree(carry, votes, path)
            if recorder is not None:
                row = (i - start) // every + (begins.astype(jnp.int32) if entry else 0)
                made = (row, carry, inner_key, i, i + 1 - start)
                records = jax.lax.cond((i + 1) % every == 0, lambda r: write(r, *made), lambda r: r, records)
            return i + 1, carry, records, done

        first = (jnp.asarray(start, jnp.int32), carry, records, jnp.zeros((), bool))
        i, carry, records, done = jax.lax.while_loop(lambda s: (s[0] < stop) & ~s[3], step, first)
        if node.agreed:
            carry = replace(carry, clock=carry.clock.passed((*path, 0), i - start))
        return carry, records, i, done

    def buffers(self, recorder: Recorder, carry: Carry, rows: int) -> PyTree:
        """Empty buffers for `rows` records, and for what the clock says at each."""
        key, zero = jax.random.key(0), jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(
            lambda: (self.apply(recorder.f, Role.RECORD, key, zero, carry.states), carry.clock.row())
        )
        return jax.tree.map(lambda s: jnp.zeros((rows, *s.shape), s.dtype), shapes)

    def agree(self, carry: Carry, votes: Bool[Array, " b"], path: Path) -> tuple[Carry, Bool[Array, ""]]:
        """Whether everyone votes yes, found by max-consensus over the network."""

        def flood(_, held):
            objection, clock, sent = held
            links = self.links(clock.step, "ones")
            arrived, late = self.in_time(links, clock.step)
            heard = self.placement.combine(arrived, objection, "max")
            return jnp.maximum(objection, heard), clock.advance(late=late), sent + messages(links)

        objection = (~votes).astype(jnp.float32)
        held = (objection, carry.clock, jnp.zeros(votes.shape, jnp.int32))
        objection, clock, sent = jax.lax.fori_loop(0, self.agreement, flood, held)
        anyone = self.placement.max(objection)
        clock = clock.disagree(self.placement.any(objection != anyone))
        return replace(carry, clock=clock).sending(path, sent), anyone == 0

    # --------------------------------------------------------------- messages

    def links(self, step: Int[Array, ""], weights: Weights) -> Links:
        return self.network.links(self.network_key, step, self.placement.ids(), weights, self.placement.has_padding)

    def fates(self, step: Int[Array, ""]) -> lossy.Fates:
        assert self.faults is not None
        return lossy.fates(self.faults, self.faults_key, step, self.placement.ids(), self.network.clients)

    def in_time(self, links: Links, step: Int[Array, ""]) -> tuple[Links, Int[Array, ""]]:
        """The links over which a message arrives in time, and how many messages come late."""
        if self.faults is None:
            return links, jnp.zeros((), jnp.int32)
        return lossy.in_time(links, self.fates(step), self.network.clients)

    def exchange(self, node: Exchange, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""], path: Path) -> Carry:
        clock = carry.clock
        message = self.apply(node.send, Role.SEND, key, round, carry.states)
        links = self.links(clock.step, node.link_weights)
        own, totals = links.own, carry.totals
        if self.faults is not None and node.conserved:
            total, edges = lossy.push(totals[path], links, self.fates(clock.step), message, clock.step)
            totals, late = {**totals, path: edges}, 0
            arrived, _ = self.in_time(links, clock.step)
        else:
            arrived, late = self.in_time(links, clock.step)
            if node.reduce == "stack":
                total = self.placement.stack(arrived, message)
            elif callable(node.weights):
                weights = self.apply(node.weights, Role.WEIGHTS, key, round, carry.states)
                total = self.placement.combine_received(arrived, weights, message, node.reduce)
                own = jnp.take_along_axis(weights, self.placement.ids()[:, None], axis=1, mode="clip")[:, 0]
            elif node.weights == "reverse":
                weights = weight_rows(links, self.network.clients)
                total = self.placement.combine_received(arrived, weights, message, node.reduce)
            else:
                total = self.placement.combine(arrived, message, node.reduce)
        heard = sent = None
        if node.observe:
            heard = self.placement.heard(arrived)
            sent = weight_rows(links, self.network.clients)
        states = self.apply(node.take, Role.RECEIVE, key, round, carry.states, total, own, heard, sent)
        after = replace(carry, states=states, clock=clock.advance(late=late), totals=totals)
        return after.sending(path, messages(links))

    def average(self, node: Average, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""], path: Path) -> Carry:
        clock, by = carry.clock, node.by
        # In the roles that the same average has when it is spelled out in single exchanges.
        value, mass = self.apply(node.get, Role.ENTER, key, round, carry.states)
        held = (value, mass) if node.by == "push" else value
        floats = sum(leaf.size for leaf in jax.tree.leaves(held)) // mass.shape[0]
        if by == "exact":
            mixed, sent = self.placement.mean(held), 1
            clock = clock.advance()
        else:
            if composes(self.network, floats):
                operator, sent = self.operator(clock.step, node.rounds, by)
                mixed, sent = self.placement.transfer(operator, held), self.placement.mine(sent)
            else:

                def once(s, so_far):
                    held, sent = so_far
                    links = self.links(clock.step + s, by)
                    others = self.placement.combine(links, held, "sum")
                    held = jax.tree.map(lambda mine, rest: along(links.own, mine) * mine + rest, held, others)
                    return held, sent + messages(links)

                mixed, sent = jax.lax.fori_loop(0, node.rounds, once, (held, jnp.zeros(mass.shape, jnp.int32)))
            clock = clock.advance(node.rounds)
        if node.by == "push":
            mixed, mass = mixed
            mixed = jax.tree.map(lambda w: w / along(mass, w), mixed)
        states = self.apply(node.put, Role.LEAVE, key, round, carry.states, mixed, mass)
        return replace(carry, states=states, clock=clock).sending(path, sent)

    def operator(self, step: Int[Array, ""], rounds: int, weights: Weights) -> tuple[Array, Int[Array, " n"]]:
        """The n×n operator of `rounds` steps from `step` on, and the messages that each client sends in them."""
        n = self.network.clients

        def at(step: Int[Array, ""]) -> tuple[Array, Bool[Array, "n n"]]:
            links = self.network.links(self.network_key, step, jnp.arange(n), weights, padded=False)
            return mixing_matrix(links, n), alive_rows(links, n)

        if rounds == 0:
            return jnp.eye(n), jnp.zeros(n, jnp.int32)
        if not self.network.varying:
            mixing, alive = at(step)
            return power(mixing, rounds), rounds * counted(alive)
        if rounds * n * n > 1_000_000:

            def once(s, so_far):
                mixing, alive = at(step + s)
                return exact_matmul(mixing, so_far[0]), so_far[1] + counted(alive)

            mixing, alive = at(step)
            return jax.lax.fori_loop(1, rounds, once, (mixing, counted(alive)))
        # All steps at once, multiplied in pairs: log2(S) batched products instead of S small ones in a row.
        products, alive = jax.vmap(at)(step + jnp.arange(rounds))
        sent = jnp.sum(alive, axis=(0, 2), dtype=jnp.int32)
        while products.shape[0] > 1:
            last = products[products.shape[0] // 2 * 2 :]
            products = jnp.concatenate([exact_matmul(products[1::2], products[: products.shape[0] // 2 * 2 : 2]), last])
        return products[0], sent

    def serve(self, node: Server, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""], path: Path) -> Carry:
        message = self.apply(node.send, Role.SEND, key, round, carry.states)
        answers = node.compute(self.placement.gather(message), leaf_key(key, Role.COMPUTE, 0))
        states = self.apply(node.receive, Role.RECEIVE, key, round, carry.states, self.placement.mine(answers))
        return replace(carry, states=states, clock=carry.clock.advance()).sending(path, 1)


def messages(links: Links) -> Int[Array, " b"]:
    """How many links each client of the block sends over."""
    return counted(links.alive)


def counted(alive: Bool[Array, "b links"]) -> Int[Array, " b"]:
    return jnp.sum(alive, axis=1, dtype=jnp.int32)


def composes(network: Network, floats: int) -> bool:
    """Whether the rounds of an average of so many numbers are composed into one operator.

    S products of n×n matrices are cheaper than S products with the values only while n is below their width (or so
    small that nothing but the number of operations counts).
    """
    n = network.clients
    links = jax.eval_shape(lambda: network.links(jax.random.key(0), 0, jnp.arange(n), "ones"))
    return links.targets is None and (n <= 8 or 2 * n <= floats)


def power(a: Array, exponent: int) -> Array:
    """aᵏ by repeated squaring."""
    if exponent == 1:
        return a
    half = power(a, exponent // 2)
    square = exact_matmul(half, half)
    return exact_matmul(square, a) if exponent % 2 else square


def exact_matmul(a: Array, b: Array) -> Array:
    if a.shape[-1] <= 8:  # tiny products as one fused elementwise loop instead of library calls
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
