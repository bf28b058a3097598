"""The places of a program that send: what their messages look like, and the running sums of their links."""

import zlib
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.averaging.running_sums import Incoming, Outgoing
from hyperpush.engines import wire
from hyperpush.errors import HyperpushError
from hyperpush.programs import Path


def _number(path: Path, epoch: Path, *more: str) -> int:
    return zlib.crc32(repr((path, epoch or 0, *more)).encode())


@final
class Place:
    """One of them; `tolerant` if its messages travel as running sums. `epoch` tells one beginning from another.

    `lasting` if what is averaged here is part of no stage, and so of use in all of them.
    """

    def __init__(
        self, path: Path, message: PyTree, tolerant: bool, infinite: bool, epoch: Path = (), lasting: bool = False
    ):
        self.path, self.message, self.tolerant, self.epoch, self.lasting = path, message, tolerant, epoch, lasting
        self.number = _number(path, epoch)  # its name on the wire
        self.acknowledges = _number(path, epoch, "ack")  # that of what says which total was taken in
        example = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        self.floats = sum(leaf.size for leaf in jax.tree.leaves(example))
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(example))
        self.template = wire.Template(np.zeros(self.floats) if tolerant else example, infinite)
        self.outgoing, self.incoming = Outgoing(self.floats), Incoming(self.floats)
        self.pending = np.zeros(self.floats)  # taken in since the last exchange here
        self.seen: dict[int, int] = {}  # the newest counter that each target has said to have seen
        self.acknowledged: dict[int, int] = {}  # and that it will not forget
        self.last: set[int] = set()  # senders that have put their last total on the link
        self.elsewhere: set[int] = set()  # those of them that are in another stage of the run, without this place

    def held_back(self, targets: list[int]) -> list[int]:
        """Those of the targets that have not said to have seen the last share."""
        return [target for target in targets if self.outgoing.counters.get(target, 0) > self.seen.get(target, 0)]

    def taken_flat(self) -> np.ndarray:
        """What has been taken in since the last time."""
        flat, self.pending = self.pending, np.zeros_like(self.pending)
        return flat

    def taken(self) -> PyTree:
        """What has been taken in since the last time, in the shapes and types of the message."""
        flat = self.taken_flat()
        leaves, structure = jax.tree.flatten(self.message)
        parts = np.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return structure.unflatten([jnp.asarray(part) for part in shaped])


def flattened(message: PyTree) -> np.ndarray:
    """A message as the flat vector that running sums are made of."""
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(message)], dtype=np.float64)


@final
class Places:
    """All places of a program, by path and by number on the wire."""

    def __init__(self):
        self.numbered: dict[int, Place] = {}
        self.current: dict[Path, Place] = {}
        self.past: dict[int, int] = {}  # numbers of places that have started anew, and of their acknowledgements

    def add(self, place: Place) -> None:
        if place.number in self.numbered:
            raise HyperpushError(f"two places of the program have the same number {place.number} on the wire")
        self.numbered[place.number] = self.current[place.path] = place

    def number(self, path: Path) -> int:
        """The name on the wire of the place at `path`."""
        place = self.current.get(path)
        return place.number if place is not None else _number(path, ())

    def tolerant(self, below: Path = ()) -> list[Place]:
        """Those with running sums, below a path."""
        return [place for place in self.numbered.values() if place.tolerant and place.path[: len(below)] == below]

    def restart(self, below: Path, epoch: Path) -> None:
        """A new state begins below a path: running sums start anew, and what is still under way for the old is late.

        `epoch` tells one beginning from another, also in a new view; the same at all peers whatever happened before.
        """
        for old in self.tolerant(below):
            del self.numbered[old.number]
            self.past[old.number] = old.acknowledges
            self.renew(old, epoch)

    def renew(self, old: Place, epoch: Path) -> Place:
        """Running sums from nothing in place of those of `old`."""
        new = Place(old.path, old.message, True, False, epoch, old.lasting)
        self.past.pop(new.number, None)
        self.numbered[new.number] = self.current[new.path] = new
        return new
