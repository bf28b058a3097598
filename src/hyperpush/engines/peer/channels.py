"""The places of a program that send: what their messages look like, and the running sums of their links.

A channel has a number on the wire, a hash of its path and epoch. A new epoch begins when a `Scope` is entered, or when
the membership changes: then sums start from zero under a new number, and what is under way for the old one is late.
"""

import zlib
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.transport import wire
from hyperpush.networks.running_sums import Incoming, Outgoing
from hyperpush.programs import Exchange, Node, Path, Profile, Scope, at

ROUNDING = 1e-9  # of masses in float64 that are summed over a run
WEIGHT_ROUNDING = 1e-4  # of weights in float32 that two machines compute


def check_weight(header: wire.Header, given: np.ndarray) -> None:
    """Refuse a message with another weight than the network gives its link at this step."""
    wanted = float(given[header.sender])
    if not abs(header.weight - wanted) <= WEIGHT_ROUNDING * abs(wanted) or wanted == 0:
        raise wire.Rejected(wire.RefusalReason.WRONG_WEIGHT, f"weight {header.weight:.6g} instead of {wanted:.6g}")


def _number(path: Path, epoch: Path = ()) -> int:
    return zlib.crc32(repr((path, epoch or 0)).encode())


@final
class Channel:
    """One place of a program that sends.

    Args:
        path: Where it stands in the program.
        message: The shapes of what it sends.
        tolerant: Whether its messages travel as running sums, which survive losses.
        infinite: Whether ±inf may be sent, the neutral element of a maximum.
        epoch: What tells one beginning of its sums from another.
        scope: The path of the innermost `Scope` around it, whose state ends with it; None: it stands in none.
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
        self.number = _number(path, epoch)  # its name on the wire
        example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        self.floats = sum(leaf.size for leaf in jax.tree.leaves(example))
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(example))
        length = self.floats + 1  # of a total: the numbers of a message, and the mass that they go with
        self.template = wire.Template(np.zeros(length) if tolerant else example, infinite)
        self.outgoing, self.incoming = Outgoing(length), Incoming(length)
        self.pending = np.zeros(length)  # taken in since the last exchange here
        self.mass = 1.0  # held here: over all parties and links it adds up to their number
        self.seen: dict[int, int] = {}  # the newest counter that each target has said to have seen
        self.acknowledged: dict[int, int] = {}  # and that it will not forget
        self.last: set[int] = set()  # senders that have put their last total on the link
        self.elsewhere: set[int] = set()  # those of them that are in another stage of the run, without this channel

    @property
    def lasting(self) -> bool:
        """Whether what is averaged here is part of no stage, and so of use in all of them."""
        return self.scope is None

    def check(self, header: wire.Header) -> None:
        """Refuse a message of a kind that does not travel here."""
        if self.tolerant == (header.kind == wire.Kind.MESSAGE):
            raise wire.Rejected(wire.RefusalReason.WRONG_KIND, f"{header.kind.name} where others are sent")

    def check_mass(self, sender: int, counter: int, total: np.ndarray, clients: int) -> None:
        """Refuse a total that adds no mass, or more than there is: all peers together hold as much as their number."""
        if counter > self.incoming.counters.get(sender, 0):
            mass = float(total[-1] - self.incoming.total(sender)[-1])
            if not 0 < mass <= clients * (1 + ROUNDING):
                raise wire.Rejected(wire.RefusalReason.WRONG_MASS, f"a mass of {mass:.3g} is not in (0, {clients}]")

    def unseen(self, targets: list[int]) -> list[int]:
        """Those of the targets that have not said to have seen the last share."""
        return [target for target in targets if self.outgoing.counters.get(target, 0) > self.seen.get(target, 0)]

    def unacknowledged(self, gone: frozenset[int] | set[int]) -> list[int]:
        """Who may still forget what was put on its link, apart from those who are gone."""
        counters = self.outgoing.counters
        return [t for t, counter in counters.items() if t not in gone and self.acknowledged.get(t, 0) < counter]

    def take_flat(self) -> np.ndarray:
        """What has come in since the last time."""
        flat, self.pending = self.pending, np.zeros_like(self.pending)
        return flat

    def put(self, message: PyTree, weights: np.ndarray) -> None:
        """Put shares of a message on the links, with as much of the mass."""
        flat = np.append(flatten(message), self.mass)
        for target in np.flatnonzero(weights).tolist():
            self.outgoing.add(target, np.float64(weights[target]) * flat)

    def take(self, own: float = 1.0) -> PyTree:
        """What has come in since the last time, in the shapes and types of the message; `own` is the share kept."""
        leaves, structure = jax.tree.flatten(self.message)
        flat = self.take_flat()
        self.mass = own * self.mass + float(flat[-1])
        parts = np.split(flat[:-1], np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return structure.unflatten([jnp.asarray(part) for part in shaped])


def flatten(message: PyTree) -> np.ndarray:
    """A message as the flat vector that running sums are made of."""
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(message)], dtype=np.float64)


@final
class Channels:
    """All channels of a program, by path and by number on the wire."""

    def __init__(self):
        self.numbered: dict[int, Channel] = {}
        self.current: dict[Path, Channel] = {}
        self.past: set[int] = set()  # numbers of channels that have started anew

    def add(self, channel: Channel) -> None:
        if channel.number in self.numbered:
            raise HyperpushError(f"two places of the program have the same number {channel.number} on the wire")
        self.numbered[channel.number] = self.current[channel.path] = channel

    def open(self, program: Node, found: Profile, tolerant: bool) -> None:
        """A channel for every place of a program that sends."""
        for place in found.sendings:
            exchange = place.node if isinstance(place.node, Exchange) else None
            sums = tolerant and exchange is not None and exchange.conserved
            infinite = exchange is not None and exchange.reduce == "max"
            path = place.path
            scopes = [path[:depth] for depth in range(len(path)) if isinstance(at(program, path[:depth]), Scope)]
            self.add(Channel(path, place.message, sums, infinite, scope=scopes[-1] if scopes else None))

    def has_sums_around(self, path: Path) -> bool:
        """Whether the state around the `Scope` at a path has running sums of its own."""
        outside = [each for each in self.tolerant() if each.path[: len(path)] != path]
        return any(each.scope is None or path[: len(each.scope)] == each.scope for each in outside)

    def number(self, path: Path) -> int:
        """The name on the wire of the channel at a path, also of one that only others listen to."""
        return self.current[path].number if path in self.current else _number(path)

    def tolerant(self, below: Path = ()) -> list[Channel]:
        """Those with running sums, below a path."""
        return [each for each in self.numbered.values() if each.tolerant and each.path[: len(below)] == below]

    def restart(self, below: Path, epoch: Path) -> None:
        """A new state begins below a path: running sums start anew, and what is still under way for the old is late.

        `epoch` tells one beginning from another, also in a new view; the same at all peers whatever happened before.
        """
        for old in self.tolerant(below):
            self.past.add(old.number)
            self.renew(old.path, epoch)

    def renew(self, path: Path, epoch: Path) -> Channel:
        """Running sums from nothing in place of those at a path."""
        old = self.current[path]
        del self.numbered[old.number]
        new = Channel(path, old.message, True, False, epoch, old.scope)
        self.past.discard(new.number)
        self.numbered[new.number] = self.current[path] = new
        return new
