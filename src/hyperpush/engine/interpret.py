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

from hyperpush.engine import lossy
from hyperpush.engine.faults import Faults
from hyperpush.engine.placement import Placement, along, weight_rows
from hyperpush.engine.rows import rowwise
from hyperpush.networks import Links, Network, Weights, matrix
from hyperpush.program import (
    Average,
    Context,
    Exchange,
    Local,
    Node,
    Path,
    Repeat,
    Role,
    Sequence,
    Server,
    State,
    Within,
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

    def passed(self, body: Path, times: Int[Array, ""]) -> "Clock":
        return replace(self, passes={**self.passes, body: self.passes[body] + times})


class Carry(eqx.Module):
    """Everything a loop carries from one round to the next."""

    states: State
    clock: Clock
    totals: dict[Path, lossy.Totals]  # running sums of the links, only on a faulty network


def with_states(carry: Carry, states: State) -> Carry:
    return Carry(states, carry.clock, carry.totals)


def restarted(carry: Carry, states: State, path: Path) -> Carry:
    """A new state for what is below `path`: what is still under way there belongs to the old one and is dropped."""
    totals = {place: old.restarted() if place[: len(path)] == path else old for place, old in carry.totals.items()}
    return Carry(states, carry.clock, totals)


class Apply(eqx.Module):
    """A bare per-client function, run as a node by the host; with `parts` > 1 the states are a tuple, given in turn."""

    f: Callable[..., Any] = eqx.field(static=True)
    role: Role = eqx.field(static=True)
    parts: int = eqx.field(static=True, default=1)


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
            parts = (carry.states,) if node.parts == 1 else carry.states
            return with_states(carry, self.apply(node.f, node.role, key, round, *parts))
        if isinstance(node, Local):
            return with_states(carry, self.apply(node.f, Role.LOCAL, key, round, carry.states))
        if isinstance(node, Sequence):
            for position, child in enumerate(node.nodes):
                carry = self.run(child, carry, jax.random.fold_in(key, position), round, (*path, position))
            return carry
        if isinstance(node, Within):
            inner = self.apply(node.enter, Role.ENTER, key, round, carry.states)
            after = self.run(node.body, restarted(carry, inner, path), key, round, (*path, 0))
            return with_states(after, self.apply(node.leave, Role.LEAVE, key, round, carry.states, after.states))
        if isinstance(node, Repeat):
            return self.loop(node, carry, key, round, path, 0, node.at_most)[0]
        if isinstance(node, Exchange):
            return self.exchange(node, carry, key, round, path)
        if isinstance(node, Average):
            return self.average(node, carry, key, round)
        return self.serve(node, carry, key, round)

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
        record: Callable[[State, Context], PyTree] | None = None,
        records: PyTree = None,
        every: int = 1,
    ) -> tuple[Carry, PyTree, Int[Array, ""], Bool[Array, ""]]:
        """Iterations start…stop−1 of a loop; also the records made, the next iteration, and whether all agreed to end.

        `record` writes into the buffer `records` (axis 0) after every `every`-th iteration, from row 0 on.
        """
        if node.times is not None:
            times = self.apply(node.times, Role.TIMES, key, round, carry.states)
            largest = self.placement.max(times)
            carry = replace(carry, clock=carry.clock.disagree(self.placement.any(times != largest)))
            stop = jnp.minimum(stop, largest)

        def step(loop_state):
            i, carry, records, _ = loop_state
            inner_key = jax.random.fold_in(key, i)
            carry = self.run(node.body, carry, inner_key, i, (*path, 0))
            done = jnp.zeros((), bool)
            if node.until is not None:
                votes = self.apply(node.until, Role.UNTIL, inner_key, i, carry.states)
                carry, done = self.agree(carry, votes)
            if record is not None:

                def write(records, record=record):
                    values = self.apply(record, Role.RECORD, inner_key, i, carry.states)
                    row = (i - start) // every
                    return jax.tree.map(lambda rows, v: rows.at[row].set(v), records, values)

                records = jax.lax.cond((i + 1) % every == 0, write, lambda r: r, records)
            return i + 1, carry, records, done

        first = (jnp.asarray(start, jnp.int32), carry, records, jnp.zeros((), bool))
        i, carry, records, done = jax.lax.while_loop(lambda s: (s[0] < stop) & ~s[3], step, first)
        if node.agreed:
            carry = replace(carry, clock=carry.clock.passed((*path, 0), i - start))
        return carry, records, i, done

    def agree(self, carry: Carry, votes: Bool[Array, " b"]) -> tuple[Carry, Bool[Array, ""]]:
        """Whether everyone votes yes, found by max-consensus over the network."""

        def flood(_, held):
            objection, clock = held
            links, late = self.in_time(self.links(clock.step, "ones"), clock.step)
            heard = self.placement.combine(links, objection, "max")
            return jnp.maximum(objection, heard), clock.advance(late=late)

        objection = (~votes).astype(jnp.float32)
        objection, clock = jax.lax.fori_loop(0, self.agreement, flood, (objection, carry.clock))
        anyone = self.placement.max(objection)
        return replace(carry, clock=clock.disagree(self.placement.any(objection != anyone))), anyone == 0

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
        return Carry(states, clock.advance(late=late), totals)

    def average(self, node: Average, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""]) -> Carry:
        clock, by = carry.clock, node.by
        # In the roles that the same average has when it is spelled out in single exchanges.
        value, mass = self.apply(node.get, Role.ENTER, key, round, carry.states)
        held = (value, mass) if node.by == "push" else value
        floats = sum(leaf.size for leaf in jax.tree.leaves(held)) // mass.shape[0]
        if by == "exact":
            mixed = self.placement.mean(held)
            clock = clock.advance()
        else:
            if composes(self.network, floats):
                mixed = self.placement.transfer(self.operator(clock.step, node.rounds, by), held)
            else:

                def once(s, held):
                    links = self.links(clock.step + s, by)
                    others = self.placement.combine(links, held, "sum")
                    return jax.tree.map(lambda mine, rest: along(links.own, mine) * mine + rest, held, others)

                mixed = jax.lax.fori_loop(0, node.rounds, once, held)
            clock = clock.advance(node.rounds)
        if node.by == "push":
            mixed, mass = mixed
            mixed = jax.tree.map(lambda w: w / along(mass, w), mixed)
        states = self.apply(node.put, Role.LEAVE, key, round, carry.states, mixed, mass)
        return Carry(states, clock, carry.totals)

    def operator(self, step: Int[Array, ""], rounds: int, weights: Weights) -> Array:
        """The n×n operator of `rounds` steps from `step` on."""
        n = self.network.clients
        if rounds == 0:
            return jnp.eye(n)
        if not self.network.varying:
            return power(matrix(self.network, self.network_key, step, weights), rounds)
        if rounds * n * n > 1_000_000:
            return jax.lax.fori_loop(
                1,
                rounds,
                lambda s, product: exact_matmul(matrix(self.network, self.network_key, step + s, weights), product),
                matrix(self.network, self.network_key, step, weights),
            )
        # All steps at once, multiplied in pairs: log2(S) batched products instead of S small ones in a row.
        steps = step + jnp.arange(rounds)
        products = jax.vmap(lambda s: matrix(self.network, self.network_key, s, weights))(steps)
        while products.shape[0] > 1:
            last = products[products.shape[0] // 2 * 2 :]
            products = jnp.concatenate([exact_matmul(products[1::2], products[: products.shape[0] // 2 * 2 : 2]), last])
        return products[0]

    def serve(self, node: Server, carry: Carry, key: PRNGKeyArray, round: Int[Array, ""]) -> Carry:
        message = self.apply(node.send, Role.SEND, key, round, carry.states)
        answers = node.compute(self.placement.gather(message), leaf_key(key, Role.COMPUTE, 0))
        states = self.apply(node.receive, Role.RECEIVE, key, round, carry.states, self.placement.mine(answers))
        return Carry(states, carry.clock.advance(), carry.totals)


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
