"""The interpreter of the compiled engines turns a tree of nodes into one XLA program over stacked clients.

It works on blocks of clients (`placement.py`): all clients on one device, or one block per device. States, messages and
data have the block's clients on axis 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree, UInt32

from hyperpush.base.arrays import filled
from hyperpush.engines.compiled import lossy
from hyperpush.engines.compiled.composition import compose_rounds, composes, count_alive
from hyperpush.engines.compiled.context import RunContext
from hyperpush.engines.compiled.map_clients import map_clients
from hyperpush.engines.compiled.placement import along, weight_rows
from hyperpush.engines.compiled.tally import Tally
from hyperpush.engines.result import Recorder
from hyperpush.engines.totals import Totals
from hyperpush.networks import Links, Weights
from hyperpush.networks.trees import ROOT, PlannedTree, Post, Trip, reliable_post
from hyperpush.programs import (
    Average,
    Context,
    Exchange,
    Local,
    Path,
    Repeat,
    Role,
    Scope,
    Sequence,
    State,
    leaf_key,
)
from hyperpush.programs.nodes import with_answer
from hyperpush.programs.profile import LEARNING


class Clock(eqx.Module):
    """Network time, and counts of exchanges and other events so far."""

    time: Tally  # every exchange takes one step of network time
    passes: dict[Path, Tally]  # iterations of each loop whose length the clients agree on, by path of the body
    exchanges: dict[Path, Tally]  # by path of the sending node; averages along a tree count messages of all clients
    late: Tally  # messages that were late and dropped
    split: Bool[Array, ""]  # True if clients disagreed about ending a loop
    stuck: Bool[Array, ""]  # True if an average along a tree did not reach all clients

    @staticmethod
    def start(bodies: Iterable[Path], places: Iterable[Path], step: int) -> "Clock":
        """Return a clock at the given step of network time, with all counts 0."""
        zero, no = Tally.start(), filled((), False, bool)
        passes, exchanges = dict.fromkeys(bodies, zero), dict.fromkeys(places, zero)
        return Clock(Tally.start(value=step), passes, exchanges, zero, no, no)

    @property
    def step(self) -> Int[Array, ""]:
        """Step of network time as the 32-bit integer that networks use; it repeats after 2³² steps."""
        return self.time.signed()

    def now(self) -> int:
        """Return the step of network time as a Python integer."""
        return int(self.time.numbers())

    def advance(self, path: Path, rounds: Any = 1, late: Any = 0) -> "Clock":
        """Return the clock after `rounds` exchanges of the node at `path`."""
        exchanges = {**self.exchanges, path: self.exchanges[path].plus(rounds)}
        return replace(self, time=self.time.plus(rounds), exchanges=exchanges, late=self.late.plus(late))

    def disagree(self, split: Bool[Array, ""]) -> "Clock":
        return replace(self, split=self.split | split)

    def row(self) -> UInt32[Array, " words"]:
        """Return the time, then the exchange counts in the order of their paths, as two words each.

        Each recorded row is stored with these numbers.
        """
        return jnp.stack(jax.tree.leaves((self.time, self.exchanges)))

    def add_passes(self, body: Path, times: Any) -> "Clock":
        return replace(self, passes={**self.passes, body: self.passes[body].plus(times)})

    def after_trip(self, path: Path, trip: Trip) -> "Clock":
        """Return the clock after an average along a tree, whose messages went up and down the tree in `trip`."""
        total = self.exchanges[path].plus_sum(trip.messages)
        after = replace(self, time=self.time.plus(trip.rounds), stuck=self.stuck | ~trip.complete)
        return replace(after, exchanges={**self.exchanges, path: total})


class Carry(eqx.Module):
    """All values that a loop passes from one iteration to the next."""

    states: State
    clock: Clock
    totals: dict[Path, Totals]  # running sums of the links; only on a faulty network
    sent: dict[Path, Tally]  # number of messages that each client sent, [b], by path of the sending node

    def count_messages(self, path: Path, messages: Any) -> "Carry":
        """Return the carry with `messages` added to each client's count of messages at `path`."""
        return replace(self, sent={**self.sent, path: self.sent[path].plus(messages)})


def with_states(carry: Carry, states: State) -> Carry:
    return replace(carry, states=states)


def restart_below(carry: Carry, states: State, path: Path) -> Carry:
    """Return the carry with a new state for the nodes below `path`.

    Messages in transit between these nodes are dropped, because they belong to the old state.
    """
    totals = {place: old.restart() if place[: len(path)] == path else old for place, old in carry.totals.items()}
    return replace(carry, states=states, totals=totals)


class Visit(NamedTuple):
    """A node during a run, with its random key, its path, and the iteration (`round`) of the loop around it."""

    node: Any
    key: PRNGKeyArray
    round: Any = 0
    path: Path = ()

    def child(self, place: int) -> "Visit":
        """Return the visit of the node at position `place` of this visit's node, which is a sequence."""
        key = self.key if self.node.keeps_key(place) else jax.random.fold_in(self.key, place)
        return Visit(self.node.nodes[place], key, self.round, (*self.path, place))

    def inside(self) -> "Visit":
        """Return the visit of the body of this visit's node, which is a scope."""
        return Visit(self.node.body, self.key, self.round, (*self.path, 0))

    def iteration(self, i: Any) -> "Visit":
        """Return the visit of the body of this visit's node, which is a loop, in iteration `i`."""
        return Visit(self.node.body, jax.random.fold_in(self.key, i), i, (*self.path, 0))


class Recording(NamedTuple):
    """A recorder of a loop, called after every `every`-th iteration, with a buffer for `rows` rows."""

    recorder: Recorder
    every: int
    rows: int


class Interpreter(RunContext):
    """Interpreter that runs the nodes of a program for one block of clients."""

    def apply(self, f: Callable[..., Any], role: Role, visit: Visit, *stacked: PyTree) -> Any:
        """Call `f(*slices, context)` with the slices of each client of the block, and return the stacked results."""

        def one(state, others):
            client, data, more = others
            round, key = jnp.asarray(visit.round, jnp.int32), leaf_key(visit.key, role, client)
            return f(state, *more, Context(client, self.network.clients, round, key, data, common))

        common = leaf_key(visit.key, role, self.network.clients)  # index n is unused: a key for all clients
        states, *more = stacked
        others = (self.placement.ids(), self.data, more)
        if self.batch is None:
            return jax.vmap(one)(states, others)
        return map_clients(one, states, others, self.batch)

    def run(self, visit: Visit, carry: Carry) -> Carry:
        """Run one pass through a node."""
        node = visit.node
        if isinstance(node, Local):
            return with_states(carry, self.apply(node.f, Role.LOCAL, visit, carry.states))
        if isinstance(node, Sequence):
            for place in range(len(node.nodes)):
                carry = self.run(visit.child(place), carry)
            return carry
        if isinstance(node, Scope):
            inner = self.apply(node.enter, Role.ENTER, visit, carry.states)
            after = self.run(visit.inside(), restart_below(carry, inner, visit.path))
            return with_states(after, self.apply(node.leave, Role.LEAVE, visit, carry.states, after.states))
        if isinstance(node, Repeat):
            return self.loop(visit, carry, 0, node.at_most)[0]
        if isinstance(node, Exchange):
            return self.exchange(visit, carry)
        return self.average(visit, carry) if isinstance(node, Average) else self.serve(visit, carry)

    # ------------------------------------------------------------------ loops

    def loop(
        self, visit: Visit, carry: Carry, start: Any, stop: Any, recording: Recording | None = None
    ) -> tuple[Carry, PyTree, Int[Array, ""], Bool[Array, ""]]:
        """Run iterations start…stop−1 of a loop.

        Return the carry, the records, the number of the next iteration, and True if all clients agreed to end. Records
        are a pair: rows of values, and the clock of each row. The row before the first iteration comes first if it is
        recorded.
        """
        node, begins = visit.node, jnp.asarray(start == 0)
        if node.times is not None:
            times = self.apply(node.times, Role.TIMES, visit, carry.states)
            largest = self.placement.max(times)
            carry = replace(carry, clock=carry.clock.disagree(self.placement.any(times != largest)))
            stop = jnp.minimum(stop, largest)

        def row_of(recorder: Recorder, at: Visit, carry: Carry) -> PyTree:
            return self.apply(recorder.f, Role.RECORD, at, carry.states), carry.clock.row()

        records = None
        if recording is not None:
            entry = visit._replace(round=0)
            shapes = jax.eval_shape(lambda: row_of(recording.recorder, entry, carry))
            records = jax.tree.map(lambda s: jnp.zeros((recording.rows, *s.shape), s.dtype), shapes)
            if recording.recorder.entry:
                records = write_row(records, begins, 0, lambda: row_of(recording.recorder, entry, carry))

        def step(loop_state):
            i, carry, records, _ = loop_state
            inside = visit.iteration(i)
            carry, done = self.run(inside, carry), jnp.zeros((), bool)
            if node.until is not None:
                votes = self.apply(node.until, Role.UNTIL, inside, carry.states)
                if node.common:
                    done = ~self.placement.any(~votes)
                    carry = replace(carry, clock=carry.clock.disagree(self.placement.any(votes != done)))
                else:
                    carry, done = self.agree(carry, votes, visit.path)
            if recording is not None:
                recorder, every, _ = recording
                row = (i - start) // every + (begins.astype(jnp.int32) if recorder.entry else 0)
                records = write_row(records, recorder.due(i + 1, every), row, lambda: row_of(recorder, inside, carry))
            return i + 1, carry, records, done

        first = (jnp.asarray(start, jnp.int32), carry, records, jnp.zeros((), bool))
        i, carry, records, done = jax.lax.while_loop(lambda s: (s[0] < stop) & ~s[3], step, first)
        if node.agreed:
            carry = replace(carry, clock=carry.clock.add_passes((*visit.path, 0), i - start))
        return carry, records, i, done

    def agree(self, carry: Carry, votes: Bool[Array, " b"], path: Path) -> tuple[Carry, Bool[Array, ""]]:
        """Return the carry, and True if all clients vote yes. They find out by max-consensus over the network."""

        def flood(_, held):
            objection, clock, sent = held
            links = self.links(clock.step, "ones")
            arrived, late = self.in_time(links, clock.step)
            heard = self.placement.combine(arrived, objection, "max")
            return jnp.maximum(objection, heard), clock.advance(path, late=late), sent + messages(links)

        objection = (~votes).astype(jnp.float32)
        held = (objection, carry.clock, jnp.zeros(votes.shape, jnp.int32))
        objection, clock, sent = jax.lax.fori_loop(0, self.agreement, flood, held)
        anyone = self.placement.max(objection)
        clock = clock.disagree(self.placement.any(objection != anyone))
        return replace(carry, clock=clock).count_messages(path, sent), anyone == 0

    # --------------------------------------------------------------- messages

    def links(self, step: Int[Array, ""], weights: Weights) -> Links:
        return self.network.links(self.network_key, step, self.placement.ids(), weights, self.placement.has_padding)

    def fates(self, step: Int[Array, ""]) -> lossy.Fates:
        assert self.faults is not None
        return lossy.fates(self.faults, self.faults_key, step, self.placement.ids(), self.network.clients)

    def in_time(self, links: Links, step: Int[Array, ""]) -> tuple[Links, Int[Array, ""]]:
        """Return the links over which a message arrives in time, and the number of late messages."""
        if self.faults is None:
            return links, jnp.zeros((), jnp.int32)
        return lossy.in_time(links, self.fates(step), self.network.clients)

    def exchange(self, visit: Visit, carry: Carry) -> Carry:
        node, path, clock = visit.node, visit.path, carry.clock
        message = self.apply(node.send, Role.SEND, visit, carry.states)
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
                weights = self.apply(node.weights, Role.WEIGHTS, visit, carry.states)
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
        states = self.apply(node.take, Role.RECEIVE, visit, carry.states, total, own, heard, sent)
        after = replace(carry, states=states, clock=clock.advance(path, late=late), totals=totals)
        return after.count_messages(path, messages(links))

    def average(self, visit: Visit, carry: Carry) -> Carry:
        node, clock, by = visit.node, carry.clock, visit.node.by
        # The roles, which determine the random keys, are those of `Average.stepwise` (the average as exchanges).
        value, mass = self.apply(node.get, Role.ENTER, visit, carry.states)
        held = (value, mass) if node.by == "push" else value
        floats = sum(leaf.size for leaf in jax.tree.leaves(held)) // mass.shape[0]
        if by in ("tree", "exact"):
            # The mean is computed directly. For a tree, its rounds and messages are counted, but not simulated.
            mean = self.placement.mean(held)  # computed once, not for every client
            if node.answer is not None:
                mean = self.answer(visit, carry.states, mean)

            def put(state: State, mass: Array, ctx: Context) -> State:
                return node.put(state, mean, mass, ctx)

            states = self.apply(put, Role.LEAVE, visit, carry.states, mass)
            after = with_states(carry, states if node.ends is None else self.ask_root(visit, states))
            if by == "tree":
                return self.travel(visit.path, after)
            return replace(after, clock=clock.advance(visit.path)).count_messages(visit.path, 1)
        if composes(self.network, floats):
            operator, sent = compose_rounds(self.network, self.network_key, clock.step, node.rounds, by)
            mixed, sent = self.placement.transfer(operator, held), self.placement.mine(sent)
        else:

            def once(s, so_far):
                held, sent = so_far
                links = self.links(clock.step + s, by)
                others = self.placement.combine(links, held, "sum")
                held = jax.tree.map(lambda mine, rest: along(links.own, mine) * mine + rest, held, others)
                return held, sent + messages(links)

            mixed, sent = jax.lax.fori_loop(0, node.rounds, once, (held, jnp.zeros(mass.shape, jnp.int32)))
        clock = clock.advance(visit.path, node.rounds)
        if node.by == "push":
            mixed, mass = mixed
            mixed = jax.tree.map(lambda w: w / along(mass, w), mixed)
        states = self.apply(node.put, Role.LEAVE, visit, carry.states, mixed, mass)
        return replace(carry, states=states, clock=clock).count_messages(visit.path, sent)

    def ask_root(self, visit: Visit, states: State) -> State:
        """Return the states, in which each client has stored the root's answer to `ends`."""
        answers = self.apply(visit.node.ends, Role.UNTIL, visit, states)
        own = jnp.where(along(self.placement.ids() == ROOT, answers), answers, 0).astype(jnp.float32)
        told = jnp.round(self.network.clients * self.placement.mean(own)).astype(answers.dtype)
        return with_answer(states, jnp.broadcast_to(told, answers.shape))

    def answer(self, visit: Visit, states: State, mean: PyTree) -> PyTree:
        """Return the answer to an exact mean, the same for all clients, computed from the block's first client."""
        state, data = jax.tree.map(lambda leaf: leaf[0], (states, self.data))
        key = leaf_key(visit.key, Role.LEAVE, self.network.clients)  # index n is unused: a key for all clients
        round, client = jnp.asarray(visit.round, jnp.int32), self.placement.ids()[0]
        return visit.node.answer(state, mean, Context(client, self.network.clients, round, key, data, key))

    def travel(self, path: Path, carry: Carry) -> Carry:
        """Count the rounds and messages of an average along the tree; the first one also learns the links."""
        assert self.tree is not None  # prepared for every program that has such averages
        if isinstance(self.tree, PlannedTree):
            return self.count_trip(path, carry, self.tree.trip(carry.clock.step))
        tree, post, lossy = self.tree, self.post(), self.faults is not None
        if tree.learns:
            before = (carry.clock, carry.sent[LEARNING])

            def learn(before):
                own = replace(carry, clock=before[0], sent={**carry.sent, LEARNING: before[1]})
                own = self.count_trip(LEARNING, own, tree.learn(own.clock.step, post, lossy))
                return own.clock, own.sent[LEARNING]

            known = before[0].exchanges[LEARNING].positive()
            clock, sent = jax.lax.cond(known, lambda before: before, learn, before)
            carry = replace(carry, clock=clock, sent={**carry.sent, LEARNING: sent})
        again = sum(carry.clock.exchanges[place].positive() for place in self.tree_places) > 0
        return self.count_trip(path, carry, tree.trip(carry.clock.step, post, lossy, again))

    def count_trip(self, path: Path, carry: Carry, trip: Trip) -> Carry:
        return replace(carry, clock=carry.clock.after_trip(path, trip)).count_messages(
            path, self.placement.mine(trip.links)
        )

    def post(self) -> Post:
        """Return the function that says which links are up, and when messages on them arrive."""
        if self.faults is None:
            return reliable_post(self.network, self.network_key)
        return lossy.post(self.network, self.network_key, self.faults, self.faults_key)

    def serve(self, visit: Visit, carry: Carry) -> Carry:
        node = visit.node
        message = self.apply(node.send, Role.SEND, visit, carry.states)
        answers = node.compute(self.placement.gather(message), leaf_key(visit.key, Role.COMPUTE, 0))
        states = self.apply(node.receive, Role.RECEIVE, visit, carry.states, self.placement.mine(answers))
        return replace(carry, states=states, clock=carry.clock.advance(visit.path)).count_messages(visit.path, 1)


def write_row(records: PyTree, due: Bool[Array, ""], row: Any, make: Callable[[], PyTree]) -> PyTree:
    """Write the result of `make` into row `row` of the records if `due` is True, and return the records."""

    def write(records: PyTree) -> PyTree:
        return jax.tree.map(lambda rows, v: rows.at[row].set(v), records, make())

    return jax.lax.cond(due, write, lambda records: records, records)


def messages(links: Links) -> Int[Array, " b"]:
    """Return the number of links over which each client of the block sends."""
    return count_alive(links.alive)
