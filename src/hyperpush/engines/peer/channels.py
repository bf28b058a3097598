"""Channels: one per sending node of a program, with the shapes of its messages and the running sums of its links.

In messages a channel is identified by a number, the hash of its path and epoch. A new epoch begins when a `Scope` is
entered or the membership changes. Then sums start from zero under a new number, and messages in transit with the old
number count as late. A stage is the time from the start of running sums to their end. Mass is push-sum's weight ω.
"""

import zlib
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.transport import wire
from hyperpush.networks.running_sums import IncomingSums, Outgoing
from hyperpush.programs import Exchange, Node, Path, Profile, Scope, at

ROUNDING = 1e-9  # relative tolerance for masses in float64 that are summed over a run
# Least fraction of the expected mass that a party should receive in a stage. Expected is the mass that arrives if no
# message is lost and every neighbor holds a mass of 1. Below this fraction, an average is mostly the party's own value.
# If links lose 70 % of all messages, 8 to 12 % of the mass arrive; if they lose 90 %, 2 to 3 % (docs/results/peers.md).
LITTLE = 0.05
# Least mass ω that a party should hold in a stage. With little mass, steps are large: the parameters x = z/ω move by
# (step size)·∇f/ω. One in four runs in which ω fell below this value went astray. Since shares are kept until they are
# confirmed, ω stays above 1e-2 (docs/results/peers.md).
LEAST = 3e-3
WEIGHT_ROUNDING = 1e-4  # relative tolerance for weights in float32 that two machines compute


def check_weight(header: wire.Header, given: np.ndarray) -> None:
    """Raise `Rejected` if the weight in a message differs from the network's weight of its link at this step."""
    wanted = float(given[header.sender])
    if not abs(header.weight - wanted) <= WEIGHT_ROUNDING * abs(wanted) or wanted == 0:
        raise wire.Rejected(wire.RefusalReason.WRONG_WEIGHT, f"weight {header.weight:.6g} instead of {wanted:.6g}")


def _number(path: Path, epoch: Path = ()) -> int:
    return zlib.crc32(repr((path, epoch or 0)).encode())


@final
class Channel:
    """One sending node of a program: the form of its messages, and the running sums of its links.

    Args:
        path: The path of the node in the program.
        message: The shapes of the node's messages.
        tolerant: True if the messages travel as running sums, which survive losses.
        infinite: True allows ±inf (the neutral element of a maximum) in messages.
        epoch: Identifier of the current start of the running sums.
        scope: The path of the innermost `Scope` around the node, at whose end the sums end, too. None: no scope.
    """

    def __init__(
        self,
        path: Path,
        message: PyTree,
        tolerant: bool = False,
        infinite: bool = False,
        epoch: Path = (),
        scope: Path | None = None,
    ):
        self.path, self.message, self.tolerant, self.epoch, self.scope = path, message, tolerant, epoch, scope
        self.number = _number(path, epoch)  # identifier in messages
        example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        self.floats = sum(leaf.size for leaf in jax.tree.leaves(example))
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(example))
        length = self.floats + 1  # length of a total: the numbers of a message, and their mass
        self.template = wire.Template(np.zeros(length) if tolerant else example, infinite)
        self.outgoing, self.incoming = Outgoing(length), IncomingSums(length)
        self.pending = np.zeros(length)  # sum received since the last exchange of this channel
        self.mass = 1.0  # mass held by this peer; over all parties and links it adds up to the number of parties
        self.seen: dict[int, int] = {}  # newest counter that each target has confirmed as received
        self.acknowledged: dict[int, int] = {}  # newest counter that each target has confirmed as durable
        self.last: set[int] = set()  # senders that have put their last total on the link
        self.elsewhere: set[int] = set()  # those in `last` that are in another stage of the run, without this channel
        # In this stage: expected mass (see `LITTLE`), mass received, and least mass held.
        self.due, self.taken, self.least = 0.0, 0.0, 1.0

    @property
    def lasting(self) -> bool:
        """True if the channel is outside of all scopes, and so is used in every stage of the run."""
        return self.scope is None

    def check(self, header: wire.Header) -> None:
        """Raise `Rejected` for a single message on a channel of totals, or a total on a channel of single messages."""
        if self.tolerant == (header.kind == wire.Kind.MESSAGE):
            raise wire.Rejected(wire.RefusalReason.WRONG_KIND, f"{header.kind.name} is not a kind of this channel")

    def check_mass(self, sender: int, counter: int, total: np.ndarray, clients: int) -> None:
        """Raise `Rejected` for a new total that adds no mass, or after which this peer would hold too much mass.

        The mass of all clients together equals their number. The mass of this peer follows from what it has received
        and sent. If it exceeds the number of clients, some neighbor has sent more mass than it had. Then the message of
        the neighbor with the largest balance is refused.
        """
        if counter <= self.incoming.counters.get(sender, 0):
            return
        mass, most = float(total[-1] - self.incoming.total(sender)[-1]), clients * (1 + ROUNDING)
        if not 0 < mass <= most:
            raise wire.Rejected(wire.RefusalReason.WRONG_MASS, f"a mass of {mass:.3g} is not in (0, {clients}]")
        balances = {each: self._balance(each) for each in {*self.incoming.totals, *self.outgoing.totals, sender}}
        balances[sender] += mass
        held = 1.0 + sum(balances.values())
        if held > most and balances[sender] >= max(balances.values()):
            words = f"with it this peer would hold a mass of {held:.3g}, and all together have {clients}"
            raise wire.Rejected(wire.RefusalReason.WRONG_MASS, words)

    def _balance(self, other: int) -> float:
        """Return the mass received from a neighbor minus the mass sent to it."""
        return float(self.incoming.total(other)[-1] - self.outgoing.total(other)[-1])

    @property
    def isolated(self) -> str:
        """Reason why this stage's average contains little of the other parties' values; empty if it contains enough."""
        if self.due and self.taken < LITTLE * self.due:
            return f"this party received {self.taken / self.due:.2g} of the mass that the network would bring"
        return f"this party held only a mass of {self.least:.2g}" if self.least < LEAST else ""

    def unseen(self, targets: list[int]) -> list[int]:
        """Return the targets that have not yet confirmed the receipt of the last share."""
        return [target for target in targets if self.outgoing.counters.get(target, 0) > self.seen.get(target, 0)]

    def unacknowledged(self, gone: frozenset[int] | set[int]) -> list[int]:
        """Return the targets, except those in `gone`, that have not yet made the last share durable."""
        counters = self.outgoing.counters
        return [t for t, counter in counters.items() if t not in gone and self.acknowledged.get(t, 0) < counter]

    def take_flat(self) -> np.ndarray:
        """Return the vector received since the last call, and reset it to zero."""
        flat, self.pending = self.pending, np.zeros_like(self.pending)
        return flat

    def put(self, message: PyTree, weights: np.ndarray) -> None:
        """Add each target's share of a message, and the same share of the mass, to the total of its link."""
        flat = np.append(flatten(message), self.mass)
        for target in np.flatnonzero(weights).tolist():
            self.outgoing.add(target, np.float64(weights[target]) * flat)

    def take(self, own: float = 1.0) -> PyTree:
        """Return the sum received since the last call, shaped like a message, and update the mass.

        `own` is the share that this peer keeps of its mass.
        """
        leaves, structure = jax.tree.flatten(self.message)
        flat = self.take_flat()
        self.mass = own * self.mass + float(flat[-1])
        self.taken, self.least = self.taken + float(flat[-1]), min(self.least, self.mass)
        parts = np.split(flat[:-1], np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return structure.unflatten([jnp.asarray(part) for part in shaped])


def flatten(message: PyTree) -> np.ndarray:
    """Return a message as a flat float64 vector, as in running sums."""
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(message)], dtype=np.float64)


@final
class Channels:
    """All channels of a program, by path and by their number in messages."""

    def __init__(self):
        self.numbered: dict[int, Channel] = {}
        self.current: dict[Path, Channel] = {}
        self.past: set[int] = set()  # numbers of channels that have been replaced since

    def add(self, channel: Channel) -> None:
        if channel.number in self.numbered:
            raise HyperpushError(f"two places of the program that send messages have the same number {channel.number}")
        self.numbered[channel.number] = self.current[channel.path] = channel

    def open(self, program: Node, found: Profile, tolerant: bool) -> None:
        """Add a channel for each sending node of a program."""
        for place in found.sendings:
            exchange = place.node if isinstance(place.node, Exchange) else None
            sums = tolerant and exchange is not None and exchange.conserved
            infinite = exchange is not None and exchange.reduce == "max"
            path = place.path
            scopes = [path[:depth] for depth in range(len(path)) if isinstance(at(program, path[:depth]), Scope)]
            self.add(Channel(path, place.message, sums, infinite, scope=scopes[-1] if scopes else None))

    def has_sums_around(self, path: Path) -> bool:
        """Return True if the state outside the `Scope` at a path depends on running sums."""
        outside = [each for each in self.tolerant() if each.path[: len(path)] != path]
        return any(each.scope is None or path[: len(each.scope)] == each.scope for each in outside)

    def number(self, path: Path) -> int:
        """Return the number in messages of the channel at a path, even if only other peers have that channel."""
        return self.current[path].number if path in self.current else _number(path)

    def tolerant(self, below: Path = ()) -> list[Channel]:
        """Return the channels with running sums at nodes below a path."""
        return [each for each in self.numbered.values() if each.tolerant and each.path[: len(below)] == below]

    @property
    def will_change(self) -> bool:
        """True if some running sums start anew at a `Scope`, under numbers that only peers there know."""
        return any(not each.lasting for each in self.tolerant())

    def restart(self, below: Path, epoch: Path) -> None:
        """Start the running sums below a path from zero; messages in transit for the old sums count as late.

        `epoch` identifies this start. It is the same at all peers with the same view, regardless of their history.
        """
        for old in self.tolerant(below):
            self.past.add(old.number)
            self.renew(old.path, epoch)

    def ending(self, scope: Path | None) -> list[Channel]:
        """Return the channels whose running sums end with `scope`; None: those that end with the program."""
        return [each for each in self.tolerant() if each.scope == scope]

    def renew(self, path: Path, epoch: Path) -> Channel:
        """Replace the running sums at a path by zero sums, and return the new channel."""
        old = self.current[path]
        del self.numbered[old.number]
        new = Channel(path, old.message, True, False, epoch, old.scope)
        self.past.discard(new.number)
        self.numbered[new.number] = self.current[path] = new
        return new
