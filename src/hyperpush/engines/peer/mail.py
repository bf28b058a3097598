"""What a peer sends and takes in: headers, checks, running sums and their acknowledgements."""

from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.engines import wire
from hyperpush.engines.peer.members import Members, NewView
from hyperpush.engines.peer.places import Place, Places
from hyperpush.engines.peer.walked import Walked
from hyperpush.engines.result import OUTSIDE
from hyperpush.engines.transport import Transport
from hyperpush.errors import Diverged, HyperpushError
from hyperpush.programs import Path

LAST_TOTAL = 0.5  # the weight that marks the last total on a link, and what says that it will not be forgotten
HANDED_OVER = 0.25  # that of the last totals of who has handed over all it held, and must not be given anything
_ACKNOWLEDGEMENT = np.zeros(0)
_ACKNOWLEDGE = wire.Template(_ACKNOWLEDGEMENT)


@final
class Mail:
    """The mail of one client. What comes in is bytes from outside: what does not fit is counted and dropped."""

    def __init__(self, client: int, transport: Transport, tolerant: bool, walked: Walked):
        self.client, self.transport, self.tolerant, self.walked = client, transport, tolerant, walked
        self.places = Places()
        self.heard: dict[int, int] = {}  # how far others have come, wherever that is
        self._owed: set[tuple[int, int]] = set()  # (place, sender) of last totals that are not durable yet

    @property
    def leaving(self) -> frozenset[int]:
        """Who leaves or has left."""
        return self.transport.leaving if isinstance(self.transport, Members) else frozenset()

    def check_view(self) -> None:
        """Raise `NewView` if somebody has been closed out."""
        if isinstance(self.transport, Members) and self.transport.closed - self.walked.closed:
            raise NewView

    def check_finite(self, tree: PyTree) -> None:
        """Raise `Diverged` if not all of it is."""
        for leaf in jax.tree.leaves(tree):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.all(np.isfinite(np.asarray(leaf))):
                name, i = self.walked.loops[-1] if self.walked.loops else (OUTSIDE, 0)
                raise Diverged(name, i + 1, "a smaller step size may help")

    # -------------------------------------------------------------------- out

    def send(self, path: Path, message: PyTree, targets: np.ndarray, weights: np.ndarray) -> None:
        """The same message to all targets, with the weight of each."""
        if not self.places.current[path].template.allow_infinite:
            self.check_finite(message)
        for target in targets.tolist():
            self.post(path, target, message, float(weights[target]))

    def post(self, path: Path, target: int, tree: PyTree, weight: float = 1.0) -> None:
        """A message to one."""
        self._hand_over(target, self.places.number(path), tree, 0, weight)

    def post_total(self, place: Place, target: int, weight: float = 1.0) -> None:
        """The total of all that was ever put on a link."""
        if target not in self.walked.closed:
            counter = place.outgoing.counters.get(target, 0)
            self._hand_over(target, place.number, place.outgoing.total(target), counter, weight)

    def acknowledge(self, place: Place, sender: int, weight: float = LAST_TOTAL) -> None:
        """Say which total was taken in, and will not be forgotten; with weight 1, that it was seen."""
        self._acknowledged(sender, place.acknowledges, place.incoming.counters.get(sender, 0), weight)

    @property
    def owes(self) -> bool:
        """Whether somebody waits to hear that its last total is durable."""
        return bool(self._owed)

    def acknowledge_owed(self) -> None:
        """What was taken in is durable: say so to those who wait for it."""
        for number, sender in self._owed:
            if number in self.places.numbered and sender not in self.walked.closed:
                self.acknowledge(self.places.numbered[number], sender)
        self._owed.clear()

    def _acknowledged(self, sender: int, number: int, counter: int, weight: float) -> None:
        # Step 0: it belongs to no round, and must not be taken for the message of one.
        self._hand_over(sender, number, _ACKNOWLEDGEMENT, counter, weight, 0)

    def say_farewell(self) -> None:
        """To who leaves: the last totals (of weight LAST_TOTAL), again and again until it is gone.

        One who leaves itself lets those with a lower number go first; once it has handed over, nobody: so no two
        neighbours ever hand over at once (the mutual exclusion of Ricart and Agrawala 1981, ordered by number).
        """
        if not isinstance(self.transport, Members) or not self.leaving or self.walked.heir is not None:
            return
        going = [each for each in self.leaving if not self.walked.leaving or each < self.client]
        for target in self.transport.present(sorted(set(going) - self.walked.closed)):
            for place in self.places.tolerant():
                self.post_total(place, target, LAST_TOTAL)

    def _hand_over(
        self, target: int, node: int, tree: PyTree, counter: int, weight: float, step: int | None = None
    ) -> None:
        header = wire.Header(self.walked.view, node, self.walked.clock, self.client, counter, weight)
        self.transport.send(target, self.walked.clock if step is None else step, wire.encode(header, tree))

    # --------------------------------------------------------------------- in

    def arrived(self, step: int, expected: list[int]) -> list[tuple[wire.Header, PyTree, Place]]:
        """What has arrived and fits; running sums are credited to the place that they belong to."""
        found, counts = [], self.walked.counts
        acknowledging = {place.acknowledges: place for place in self.places.tolerant()}
        for sender, payload in self.transport.collect(step, expected):
            try:
                claimed = wire.peek(payload)
                node, last = claimed.node, claimed.weight in (LAST_TOTAL, HANDED_OVER)
                if node in self.places.past:
                    header = self._hear(wire.sealed(payload, sender))
                    counts.late += 1
                    if sender in self.leaving:  # it will not come here any more
                        self._note_elsewhere(header)
                    if last:  # nothing that is still held came of it
                        self._acknowledged(sender, self.places.past[node], claimed.counter, LAST_TOTAL)
                    continue
                place = self.places.numbered.get(node)
                if place is None and node in acknowledging:
                    header, _ = wire.decode(payload, _ACKNOWLEDGE, expect_sender=sender)
                    if header.view == self.walked.view:
                        for known in [acknowledging[node].seen, acknowledging[node].acknowledged][: 1 + last]:
                            known[sender] = max(known.get(sender, 0), header.counter)
                    continue
                if node in self.places.past.values():  # of a total whose place has started anew since
                    continue
                if place is None and last and self.walked.leaving:
                    header = self._hear(wire.sealed(payload, sender))
                    if header.view != self.walked.view:
                        raise wire.Rejected(wire.Reason.WRONG_VIEW, f"{header.view} instead of {self.walked.view}")
                    # It has gone on without us, or leaves where it is; else it will come, or be gone.
                    if header.step > self.walked.clock or sender in self.leaving:
                        self._note_elsewhere(header)
                    continue
                if place is None:
                    raise wire.Rejected(wire.Reason.WRONG_NODE, f"no place {node} in this program")
                header, tree = wire.decode(payload, place.template, expect_sender=sender)
                if header.view != self.walked.view:
                    raise wire.Rejected(wire.Reason.WRONG_VIEW, f"{header.view} instead of {self.walked.view}")
                if not place.tolerant and not 0 < header.weight <= 1:
                    raise wire.Rejected(wire.Reason.WRONG_WEIGHT, f"{header.weight} is not in (0, 1]")
            except wire.Rejected as rejected:
                counts.rejections.add(rejected.reason)
                continue
            if place.tolerant:
                increment = place.incoming.take(sender, header.counter, tree)
                if increment is not None:
                    place.pending = place.pending + increment
                if isinstance(self.transport, Members):
                    self.acknowledge(place, sender, 1.0)
                if header.weight == LAST_TOTAL:
                    place.last.add(sender)
                if last:
                    self._owed.add((place.number, sender))
            self._hear(header)
            found.append((header, tree, place))
        return found

    def _hear(self, header: wire.Header) -> wire.Header:
        self.heard[header.sender] = max(self.heard.get(header.sender, 0), header.step)
        return header

    def _note_elsewhere(self, header: wire.Header) -> None:
        """To a leaver: the sender gave its newest last total in another stage, and puts nothing more on a link here."""
        newest = header.view == self.walked.view and header.step == self.heard[header.sender]
        if self.walked.leaving and header.weight == LAST_TOTAL and newest:
            for place in self.places.tolerant():
                if not place.lasting:
                    place.last.add(header.sender)
                    place.elsewhere.add(header.sender)

    def collect(self, path: Path, expected: np.ndarray) -> list[tuple[wire.Header, PyTree]]:
        """What has arrived for this exchange; running sums that were late for another are credited there."""
        found, missing = [], np.flatnonzero(expected).tolist()
        while True:
            for header, tree, place in self.arrived(self.walked.clock, missing):
                if place.path == path and header.step == self.walked.clock:
                    found.append((header, tree))
                elif not place.tolerant:
                    self.walked.counts.late += 1
            if not isinstance(self.transport, Members):
                return found
            self.check_view()
            # In step with each other, what did not fit does not stand for the message.
            missing = sorted(set(missing) - {header.sender for header, _ in found})
            if self.tolerant or not missing:
                return found

    def receive(self, path: Path, expected: np.ndarray) -> list[tuple[int, PyTree, float]]:
        """(sender, message, weight) of this exchange, each sender once, in the order of senders."""
        first: dict[int, tuple[int, PyTree, float]] = {}
        for header, tree in self.collect(path, expected):
            first.setdefault(header.sender, (header.sender, tree, header.weight))
        return [first[sender] for sender in sorted(first)]

    def all(self, path: Path, expected: np.ndarray) -> list[tuple[int, PyTree, float]]:
        """As `receive`; that somebody is missing is an error."""
        arrived = self.receive(path, expected)
        missing = set(np.flatnonzero(expected).tolist()) - {sender for sender, _, _ in arrived}
        if missing:
            raise HyperpushError(f"peer {self.client}: no message from {sorted(missing)}; a server needs every message")
        return arrived
