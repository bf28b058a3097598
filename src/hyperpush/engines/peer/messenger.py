"""The messages that a peer sends and receives: their headers and checks, running sums, and acknowledgments.

Each message holds its sender's view of the membership (`view`), its place in the program (`node`) and its round
(`step`). A receiver refuses and counts messages in which these do not match its own.

- A MESSAGE is used in its own round only. A late one is counted and dropped.
- A TOTAL is the running sum of a link. The receiver adds its difference to the newest total received before. So losses,
  repeats and reordering do not change the sum (Hadjicostis, Vaidya and Domínguez-García 2016). Totals of all rounds are
  used. If the receiver has not reached their place in the program, it keeps the newest total of each sender.
- SEEN acknowledges a total at once: the sender may put the next share on the link.
- DURABLE acknowledges a last total when the receiver has saved it: the sender may forget it.
"""

from collections import Counter
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.errors import Diverged, HyperpushError
from hyperpush.engines.peer.channels import Channel, Channels, check_weight
from hyperpush.engines.peer.members import Members, NewView, members_of
from hyperpush.engines.peer.state import PeerState
from hyperpush.engines.result import OUTSIDE
from hyperpush.engines.transport import LEAD, Transport, wire
from hyperpush.engines.transport.wire import Header, Kind, RefusalReason, Rejected
from hyperpush.programs import Path

# Per sender: the number of future rounds whose messages are kept, and of future places whose newest total is kept. An
# honest peer is at most LEAD rounds ahead, plus the round that it has just sent.
WINDOW, EARLY = 2 * LEAD, 4

NOTHING = np.zeros(0)
NO_CONTENT = wire.Template(NOTHING)

Arrived = tuple[Header, PyTree, Channel]
Payload = bytes | bytearray


@final
class Messenger:
    """Sender and receiver of one client's messages. Incoming bytes are untrusted: invalid ones are dropped."""

    def __init__(self, client: int, transport: Transport, tolerant: bool, state: PeerState, clients: int):
        self.client, self.transport, self.tolerant, self.state = client, transport, tolerant, state
        self.clients = clients
        self.members: Members | None = members_of(transport)
        self.channels = Channels()
        self.heard: dict[int, int] = {}  # newest clock in messages of each sender, at any place of the program
        self._owed: set[tuple[int, int]] = set()  # (channel, sender) of last totals not yet acknowledged as durable
        self._early: dict[tuple[int, int], Payload] = {}  # totals for later places, by (sender, channel)
        self._ahead: list[Arrived] = []  # arrived messages of later rounds

    @property
    def leaving(self) -> frozenset[int]:
        """Members that are leaving or have left."""
        return self.members.leaving if self.members is not None else frozenset()

    def check_view(self) -> None:
        """Raise `NewView` if a member has been removed."""
        if self.members is not None and self.members.closed - self.state.closed:
            raise NewView

    @property
    def behind(self) -> bool:
        """True if all known senders are more than LEAD + 1 rounds ahead, so none is waiting for this peer."""
        return min(self.heard.values(), default=0) > self.state.clock + LEAD + 1

    def check_finite(self, tree: PyTree) -> None:
        """Raise `Diverged` unless all numbers in a tree are finite."""
        for leaf in jax.tree.leaves(tree):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.all(np.isfinite(np.asarray(leaf))):
                loops = [*self.state.loops, *(each for each in self.state.loops if each[0][:1].isupper())]
                name, i = loops[-1] if loops else (OUTSIDE, 0)  # name a method rather than a loop inside of it
                raise Diverged(name, i + 1, "A smaller step size may help.")

    # -------------------------------------------------------------------- out

    def send(self, path: Path, message: PyTree, targets: np.ndarray, weights: np.ndarray) -> None:
        """Send the same message to all targets, each with its weight."""
        channel = self.channels.current[path]
        if not channel.template.allow_infinite:
            self.check_finite(message)
        for target in targets.tolist():
            self._send(target, Kind.MESSAGE, channel.number, message, weight=float(weights[target]))

    def send_one(self, path: Path, target: int, message: PyTree) -> None:
        """Send a message to one target."""
        self._send(target, Kind.MESSAGE, self.channels.number(path), message)

    def send_total(self, channel: Channel, target: int, kind: Kind = Kind.TOTAL) -> None:
        """Send the total of a link, unless the target was removed."""
        if target not in self.state.closed:
            counter = channel.outgoing.counters.get(target, 0)
            self._send(target, kind, channel.number, channel.outgoing.total(target), counter)

    @property
    def owes(self) -> bool:
        """True if this peer has received last totals that it has not yet acknowledged as durable."""
        return bool(self._owed)

    def acknowledge_owed(self) -> None:
        """Acknowledge received last totals as durable."""
        for number, sender in self._owed:
            if number in self.channels.numbered and sender not in self.state.closed:
                self._acknowledge(self.channels.numbered[number], sender, Kind.DURABLE)
        self._owed.clear()

    def _acknowledge(self, channel: Channel, sender: int, kind: Kind) -> None:
        self._send(sender, kind, channel.number, NOTHING, channel.incoming.counters.get(sender, 0))

    def say_farewell(self) -> None:
        """Send the last totals to leaving members. Callers repeat this until these members have left.

        A peer that is leaving itself sends them only to leaving peers with lower numbers, and to none after it has
        transferred its mass. So no two neighbors transfer at once (mutual exclusion of Ricart and Agrawala 1981, by
        number).
        """
        if self.members is None or not self.leaving or self.state.heir is not None:
            return
        going = [each for each in self.leaving if not self.state.leaving or each < self.client]
        for target in self.members.present(sorted(set(going) - self.state.closed)):
            for channel in self.channels.tolerant():
                self.send_total(channel, target, Kind.LAST_TOTAL)

    def _send(self, target: int, kind: Kind, number: int, tree: PyTree, counter: int = 0, weight: float = 1.0) -> None:
        header = Header(self.state.view, number, self.state.clock, self.client, counter, weight, kind)
        # An acknowledgment does not belong to a round, and must not be taken for a round's message.
        step = 0 if kind.acknowledges else self.state.clock
        self.transport.send(target, step, wire.encode(header, tree))

    # --------------------------------------------------------------------- in

    def take_arrived(self, step: int, expected: list[int]) -> list[Arrived]:
        """Return the arrived messages that pass all checks; add running sums to their channels."""
        found = [each for each in self._ahead if each[0].step <= step]
        self._ahead = [each for each in self._ahead if each[0].step > step]
        due = [key for key, payload in self._early.items() if self._is_due(key[1], payload)]
        waited = [(key[0], self._early.pop(key)) for key in due]
        for sender, payload in (*waited, *self.transport.collect(step, expected)):
            try:
                taken = self._take(sender, payload)
            except Rejected as rejected:
                self._note_rejected(sender, rejected)
                continue
            if taken is not None:
                found.append(taken)
        return found

    def _is_due(self, number: int, payload: Payload) -> bool:
        """Return True if this peer has reached the place of an early total, or its round: then no place has it."""
        return number in self.channels.numbered or wire.peek(payload).step <= self.state.clock

    def _note_rejected(self, sender: int, rejected: Rejected) -> None:
        """Count a refused message by reason, and also by sender if its content is invalid."""
        counts, reason = self.state.counts, rejected.reason
        counts.rejections[reason.value] += 1
        if reason.of_content:
            counts.refused.setdefault(sender, Counter())[reason.value] += 1
        if self.members is not None:
            self.members.refuse(sender, reason, self.state.step)

    def _take(self, sender: int, payload: bytes | bytearray) -> Arrived | None:
        """Check a message, and add a running sum to its channel. Return None if no exchange needs the message."""
        claimed = wire.peek(payload)
        channel = self.channels.numbered.get(claimed.node)
        if claimed.kind.acknowledges:
            return self._take_acknowledgment(sender, payload)
        if claimed.node in self.channels.past:
            return self._take_late(sender, payload)
        if channel is None:
            return self._take_unknown(sender, payload)
        header, tree = wire.decode(payload, channel.template, expect_sender=sender)
        self._check_membership(header)
        channel.check(header)
        if channel.tolerant:
            self._credit(channel, header, tree)
        self._hear(header)
        return header, tree, channel

    def _take_acknowledgment(self, sender: int, payload: bytes | bytearray) -> None:
        header, _ = wire.decode(payload, NO_CONTENT, expect_sender=sender)
        channel = self.channels.numbered.get(header.node)
        if channel is None or not channel.tolerant:
            if header.node not in self.channels.past:
                raise Rejected(RefusalReason.WRONG_NODE, f"no totals of {header.node} in this program")
        elif header.view == self.state.view:
            channel.seen[sender] = max(channel.seen.get(sender, 0), header.counter)
            if header.kind == Kind.DURABLE:
                channel.acknowledged[sender] = max(channel.acknowledged.get(sender, 0), header.counter)

    def _take_late(self, sender: int, payload: bytes | bytearray) -> None:
        """Receive a message of a channel that has been replaced since."""
        header = self._hear(wire.read_sealed(payload, sender))
        self.state.counts.late += 1
        if sender in self.leaving:  # the sender will not reach this place of the program
            self._note_elsewhere(header)
        if header.kind.last:  # acknowledged at once, because the new channel does not depend on it
            self._send(sender, Kind.DURABLE, header.node, NOTHING, header.counter)

    def _take_unknown(self, sender: int, payload: bytes | bytearray) -> None:
        """Receive a message of an unknown channel.

        A total for a place that this peer has not reached yet is kept. Otherwise only a leaving peer uses the message,
        if it is the last total of a member in another stage.
        """
        claimed = wire.peek(payload)
        if self.channels.will_change and claimed.kind == Kind.TOTAL and claimed.step > self.state.clock:
            self._keep_early(self._hear(wire.read_sealed(payload, sender)), payload)
            return
        if not (self.state.leaving and claimed.kind.last):
            raise Rejected(RefusalReason.WRONG_NODE, "its place is not in this program")
        header = self._hear(wire.read_sealed(payload, sender))
        self._check_membership(header)
        # This sender has continued without this peer, or leaves from another place. Others will still reach this place.
        if header.step > self.state.clock or sender in self.leaving:
            self._note_elsewhere(header)

    def _keep_early(self, header: Header, payload: Payload) -> None:
        """Keep the newest total for a place not reached yet, for at most `EARLY` places per sender."""
        self._check_membership(header)
        self._early.pop((header.sender, header.node), None)
        own = [key for key in self._early if key[0] == header.sender]
        if len(own) >= EARLY:
            del self._early[own[0]]
            self.state.counts.rejections[RefusalReason.OVERFLOW.value] += 1
        self._early[header.sender, header.node] = payload

    def _check_membership(self, header: Header) -> None:
        if header.view != self.state.view:
            raise Rejected(RefusalReason.WRONG_VIEW, f"{header.view} instead of {self.state.view}")

    def _credit(self, channel: Channel, header: Header, total: np.ndarray) -> None:
        """Add the difference between a total and the sender's previous one to what the channel has received."""
        sender = header.sender
        channel.check_mass(sender, header.counter, total, self.clients)
        increment = channel.incoming.take(sender, header.counter, total)
        if increment is not None:
            channel.pending = channel.pending + increment
        if self.members is not None:
            self._acknowledge(channel, sender, Kind.SEEN)
        if header.kind == Kind.LAST_TOTAL:
            channel.last.add(sender)
        if header.kind.last:
            self._owed.add((channel.number, sender))

    def _hear(self, header: Header) -> Header:
        self.heard[header.sender] = max(self.heard.get(header.sender, 0), header.step)
        return header

    def _note_elsewhere(self, header: Header) -> None:
        """Note, if this peer is leaving, that the sender is in another stage and sends nothing more in this one."""
        newest = header.view == self.state.view and header.step == self.heard[header.sender]
        if self.state.leaving and header.kind == Kind.LAST_TOTAL and newest:
            for channel in self.channels.tolerant():
                if not channel.lasting:
                    channel.last.add(header.sender)
                    channel.elsewhere.add(header.sender)

    def collect(self, path: Path, expected: np.ndarray, given: np.ndarray | None = None) -> list[tuple[Header, PyTree]]:
        """Return the messages for this exchange; add running sums of other exchanges to their channels.

        `given` holds the required weights of messages, by sender; None for running sums, which lack weights.
        """
        found, missing = [], np.flatnonzero(expected).tolist()
        while True:
            for header, tree, channel in self.take_arrived(self.state.clock, missing):
                if channel.path == path and header.step == self.state.clock:
                    found += self._check_weight(header, tree, given)
                elif self.tolerant and self.state.clock < header.step <= self.state.clock + WINDOW:
                    self._ahead.append((header, NOTHING if channel.tolerant else tree, channel))
                elif not channel.tolerant:
                    self.state.counts.late += 1
            if self.members is None:
                return found
            self.check_view()
            # Synchronously, a refused message does not count as received: wait for the right one.
            missing = sorted(set(missing) - {header.sender for header, _ in found})
            if self.tolerant or not missing:
                return found

    def _check_weight(self, header: Header, tree: PyTree, given: np.ndarray | None) -> list[tuple[Header, PyTree]]:
        """Return the message in a list; an empty list if its weight is refused."""
        try:
            if given is not None:
                check_weight(header, given)
        except Rejected as rejected:
            self._note_rejected(header.sender, rejected)
            return []
        return [(header, tree)]

    def receive(self, path: Path, expected: np.ndarray, given: np.ndarray) -> list[tuple[int, PyTree, float]]:
        """Return (sender, message, weight) of this exchange, once per sender, in the order of senders.

        `given` holds the weights that the network assigns to messages, by sender.
        """
        first: dict[int, tuple[int, PyTree, float]] = {}
        for header, tree in self.collect(path, expected, given):
            first.setdefault(header.sender, (header.sender, tree, header.weight))
        return [first[sender] for sender in sorted(first)]

    def receive_all(self, path: Path, expected: np.ndarray) -> dict[int, PyTree]:
        """Return the messages of this exchange by sender; raise an error if one is missing."""
        arrived = {sender: tree for sender, tree, _ in self.receive(path, expected, expected.astype(float))}
        if missing := sorted(set(np.flatnonzero(expected).tolist()) - set(arrived)):
            needs = "; servers and trees need every message"
            if self.members is not None:
                raise self.members.failure("no message from", missing, needs)
            raise HyperpushError(f"peer {self.client}: no message from {missing}{needs}")
        return arrived
