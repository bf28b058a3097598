"""The sending places of a program: the shapes of their messages, and the running sums of their links.

A channel has a number on the wire, a hash of its path and epoch. A new epoch begins when a `Scope` is entered or the
membership changes. Then sums start from zero under a new number, and messages under way for the old one are late.
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
# Share of the mass that the network would bring in a stage, if every neighbor held a mass of 1. Below it a value is
# mostly the party's own. Links that lose 70 % of all messages bring 8 to 12 %, and 90 % bring 2 to 3 %
# (docs/results/peers.md).
LITTLE = 0.05
# Least mass that a party may hold in a stage, because x = z/ω moves by rate·∇f/ω: one in four runs whose ω fell below
# went astray, and with shares kept until confirmed ω stays above 1e-2 (docs/results/peers.md).
LEAST = 3e-3
WEIGHT_ROUNDING = 1e-4  # relative tolerance for weights in float32 that two machines compute


def check_weight(header: wire.Header, given: np.ndarray) -> None:
    """Refuse a message whose weight differs from that of the network for its link at this step."""
    wanted = float(given[header.sender])
    if not abs(header.weight - wanted) <= WEIGHT_ROUNDING * abs(wanted) or wanted == 0:
        raise wire.Rejected(wire.RefusalReason.WRONG_WEIGHT, f"weight {header.weight:.6g} instead of {wanted:.6g}")


def _number(path: Path, epoch: Path = ()) -> int:
    return zlib.crc32(repr((path, epoch or 0)).encode())


@final
class Channel:
    """One sending place of a program.

    Args:
        path: Its path in the program.
        message: The shapes of its messages.
        tolerant: True if its messages travel as running sums, which survive losses.
        infinite: True allows ±inf (the neutral element of a maximum) in messages.
        epoch: Identifier of the current start of its sums.
        scope: The path of the innermost `Scope` around it, at whose end its sums end, too. None: outside of all.
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
        self.number = _number(path, epoch)  # its identifier on the wire
        example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        self.floats = sum(leaf.size for leaf in jax.tree.leaves(example))
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(example))
        length = self.floats + 1  # length of a total: the numbers of a message, and their mass
        self.template = wire.Template(np.zeros(length) if tolerant else example, infinite)
        self.outgoing, self.incoming = Outgoing(length), IncomingSums(length)
        self.pending = np.zeros(length)  # received since the last exchange here
        self.mass = 1.0  # mass held here; the sum over all parties and links is their number
        self.seen: dict[int, int] = {}  # newest counter that each target has confirmed as received
        self.acknowledged: dict[int, int] = {}  # newest counter that each target has confirmed as durable
        self.last: set[int] = set()  # senders that have put their last total on the link
        self.elsewhere: set[int] = set()  # members of `last` in another stage of the run, without this channel
        # In this stage: mass that the network would bring if every neighbor held 1, mass taken, least mass held.
        self.due, self.taken, self.least = 0.0, 0.0, 1.0

    @property
    def lasting(self) -> bool:
        """True if the average here is outside of all scopes, and so matters in every stage of the run."""
        return self.scope is None

    def check(self, header: wire.Header) -> None:
        """Refuse a message of the wrong kind: a single message on a channel of totals, or the reverse."""
        if self.tolerant == (header.kind == wire.Kind.MESSAGE):
            raise wire.Rejected(wire.RefusalReason.WRONG_KIND, f"{header.kind.name} is not a kind of this channel")

    def check_mass(self, sender: int, counter: int, total: np.ndarray, clients: int) -> None:
        """Refuse a new total that adds no mass, or with which this peer would hold more than all together can have.

        All together have as much mass as there are clients. What this peer holds follows from what it has received and
        given away, and mass comes back to those who give it. So where it exceeds that number, somebody has made mass,
        and the message of the neighbor with the largest balance is refused.
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
        """Return the mass received from a neighbor, less the mass put on the link to it."""
        return float(self.incoming.total(other)[-1] - self.outgoing.total(other)[-1])

    @property
    def isolated(self) -> str:
        """The reason why this stage says little about the others, in words; empty if it does not."""
        if self.due and self.taken < LITTLE * self.due:
            return f"this party received {self.taken / self.due:.2g} of the mass that the network would bring"
        return f"this party held only a mass of {self.least:.2g}" if self.least < LEAST else ""

    def unseen(self, targets: list[int]) -> list[int]:
        """Return the targets that have not yet confirmed the last share."""
        return [target for target in targets if self.outgoing.counters.get(target, 0) > self.seen.get(target, 0)]

    def unacknowledged(self, gone: frozenset[int] | set[int]) -> list[int]:
        """Return the targets, except those in `gone`, that have not yet made the last share durable."""
        counters = self.outgoing.counters
        return [t for t, counter in counters.items() if t not in gone and self.acknowledged.get(t, 0) < counter]

    def take_flat(self) -> np.ndarray:
        """Return and reset the vector received since the last call."""
        flat, self.pending = self.pending, np.zeros_like(self.pending)
        return flat

    def put(self, message: PyTree, weights: np.ndarray) -> None:
        """Put shares of a message on the links, with the same shares of the mass."""
        flat = np.append(flatten(message), self.mass)
        for target in np.flatnonzero(weights).tolist():
            self.outgoing.add(target, np.float64(weights[target]) * flat)

    def take(self, own: float = 1.0) -> PyTree:
        """Return the sum received since the last call, in the form of the message, and update the mass.

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
    """Return a message as a flat float64 vector, the form of running sums."""
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(message)], dtype=np.float64)


@final
class Channels:
    """All channels of a program, by path and by number on the wire."""

    def __init__(self):
        self.numbered: dict[int, Channel] = {}
        self.current: dict[Path, Channel] = {}
        self.past: set[int] = set()  # former numbers of channels that have started anew

    def add(self, channel: Channel) -> None:
        if channel.number in self.numbered:
            raise HyperpushError(f"two places of the program that send messages have the same number {channel.number}")
        self.numbered[channel.number] = self.current[channel.path] = channel

    def open(self, program: Node, found: Profile, tolerant: bool) -> None:
        """Add a channel for each sending place of a program."""
        for place in found.sendings:
            exchange = place.node if isinstance(place.node, Exchange) else None
            sums = tolerant and exchange is not None and exchange.conserved
            infinite = exchange is not None and exchange.reduce == "max"
            path = place.path
            scopes = [path[:depth] for depth in range(len(path)) if isinstance(at(program, path[:depth]), Scope)]
            self.add(Channel(path, place.message, sums, infinite, scope=scopes[-1] if scopes else None))

    def has_sums_around(self, path: Path) -> bool:
        """True if the state around the `Scope` at a path has running sums itself."""
        outside = [each for each in self.tolerant() if each.path[: len(path)] != path]
        return any(each.scope is None or path[: len(each.scope)] == each.scope for each in outside)

    def number(self, path: Path) -> int:
        """Return the number on the wire of the channel at a path, even if only other peers listen to it."""
        return self.current[path].number if path in self.current else _number(path)

    def tolerant(self, below: Path = ()) -> list[Channel]:
        """Return the channels with running sums below a path."""
        return [each for each in self.numbered.values() if each.tolerant and each.path[: len(below)] == below]

    def restart(self, below: Path, epoch: Path) -> None:
        """Start running sums below a path anew, for a new state; messages still under way for the old sums are late.

        `epoch` identifies this start, also in a new view. It is the same at all peers, regardless of their history.
        """
        for old in self.tolerant(below):
            self.past.add(old.number)
            self.renew(old.path, epoch)

    def ending(self, scope: Path | None) -> list[Channel]:
        """Return the channels with running sums whose innermost scope is the given one, which ends."""
        return [each for each in self.tolerant() if each.scope == scope]

    def renew(self, path: Path, epoch: Path) -> Channel:
        """Replace the running sums at a path by zero sums, and return the new channel."""
        old = self.current[path]
        del self.numbered[old.number]
        new = Channel(path, old.message, True, False, epoch, old.scope)
        self.past.discard(new.number)
        self.numbered[new.number] = self.current[path] = new
        return new
