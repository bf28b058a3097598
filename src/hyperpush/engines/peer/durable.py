"""Durable state of a peer: it saves its state, its place in the program and its links' totals before it sends.

A restarted peer continues at the saved exchange, and sends the same totals again. Receivers ignore totals that they
have received before. So nothing is lost and nothing counts twice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.keys import as_bits, from_bits
from hyperpush.engines.peer.channels import Channels
from hyperpush.engines.peer.state import Frame, PeerState, RecordedRow, Stage, clock
from hyperpush.programs import Average, Exchange, Node, Profile, Repeat, Scope, Sequence, Server
from hyperpush.programs import at as node_at

# Fields of `PeerState` that are stored as JSON.
PLAIN = ("first", "step", "own", "leaving", "heir", "stage", "learned")
COUNTED = ("rounds", "floats", "bytes", "late", "stages", "isolated", "why_isolated")


@runtime_checkable
class PeerStore(Protocol):
    """Storage from which a peer can continue after it was killed."""

    def save(self, facts: Mapping[str, Any]) -> None:
        """Replace the stored facts durably. Facts consist of JSON values (dicts, lists, numbers) and arrays."""
        ...

    def load(self) -> dict[str, Any] | None:
        """Return the facts that were saved last; None if there are none."""
        ...


def pack(client_state: PyTree, state: PeerState, channels: Channels) -> dict[str, Any]:
    """Return the facts to save of a peer that is about to send: its client's state, its place and its totals."""
    sums = [
        {
            "path": channel.path,
            "epoch": channel.epoch,
            "pending": channel.pending,
            "mass": channel.mass,
            "stage": [channel.due, channel.taken, channel.least],
            "out": [channel.outgoing.counters, channel.outgoing.totals],
            "in": [channel.incoming.counters, channel.incoming.totals],
            "acknowledged": channel.acknowledged,
        }
        for channel in channels.tolerant()
    ]
    return {
        **{name: getattr(state, name) for name in PLAIN},
        "closed": sorted(state.closed),
        "left": sorted(state.left),
        "state": _arrays(client_state),
        "frames": [(frame.at, frame.times, _arrays(frame.outer), frame.rows) for frame in state.frames],
        "channels": sums,
        "rows": {n: [(_arrays(r.value), r.step, r.floats) for r in rows] for n, rows in state.records.items()},
        "passes": list(state.passes.items()),
        "counts": [getattr(state.counts, name) for name in COUNTED],
        "refused": [(sender, dict(reasons)) for sender, reasons in state.counts.refused.items()],
    }


def clock_at(facts: Mapping[str, Any]) -> int:
    """Return the clock (see `PeerState.clock`) at which facts were stored; 0 if there are none."""
    return clock(len(facts["closed"]), facts["step"]) if facts else 0


def _arrays(tree: PyTree) -> list[np.ndarray]:
    return [np.asarray(as_bits(leaf)) for leaf in jax.tree.leaves(tree)]


@final
@dataclass(frozen=True)
class SavedPeer:
    """The facts of a saved peer, loaded from a store, from which a restarted peer continues."""

    facts: Mapping[str, Any]

    def restore(self, state: PeerState) -> None:
        """Set `state` to the stored values, except for its frames, which the peer builds when it enters the nodes."""
        for name in PLAIN:
            setattr(state, name, self.facts[name])
        state.stage = Stage(state.stage)
        state.closed, state.left = frozenset(self.facts["closed"]), frozenset(self.facts["left"])
        state.passes = Counter({tuple(path): times for path, times in self.facts["passes"]})
        for name, count in zip(COUNTED, self.facts["counts"], strict=True):
            setattr(state.counts, name, count)
        state.counts.refused = {sender: Counter(reasons) for sender, reasons in self.facts["refused"]}

    def frames(self, program: Node, found: Profile) -> list[Frame]:
        """Return the nodes on the way to the saved exchange, outermost first."""
        path, frames = (), []
        if self.facts["stage"] and not self.facts["leaving"]:
            return frames
        for at, times, outer, rows in self.facts["frames"]:
            node = node_at(program, path)
            if not isinstance(node, Sequence | Repeat | Scope):
                raise HyperpushError("the checkpoint is of another program")
            inside = isinstance(node, Scope)
            frames.append(Frame(at, times, as_tree(outer, found.states[path]) if inside else None, rows))
            path = (*path, at if isinstance(node, Sequence) else 0)
        if not isinstance(node_at(program, path), Exchange | Average | Server):
            raise HyperpushError("the checkpoint is of another program")
        return frames

    def restore_totals(self, channels: Channels) -> None:
        """Set the running sums to the stored values."""

        def by_client(stored: Mapping[str, Any]) -> dict[int, Any]:
            return {int(other): value for other, value in stored.items()}

        for saved in self.facts["channels"]:
            channel = channels.renew(tuple(saved["path"]), tuple(saved["epoch"]))
            channel.pending, channel.acknowledged = saved["pending"], by_client(saved["acknowledged"])
            channel.mass = saved["mass"]
            channel.due, channel.taken, channel.least = saved["stage"]
            for way, sums in (("out", channel.outgoing), ("in", channel.incoming)):
                sums.counters, sums.totals = map(by_client, saved[way])

    def rows(self, name: str, like: PyTree) -> list[RecordedRow]:
        """Return the stored rows of a loop; `like` has the shapes of one row."""
        return [
            RecordedRow(as_tree(value, like), step, floats) for value, step, floats in self.facts["rows"].get(name, ())
        ]


def as_tree(stored: list[np.ndarray], like: PyTree) -> PyTree:
    """Return stored arrays as a tree with the structure and shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    expected = [as_bits(leaf) for leaf in leaves]
    if [(each.shape, each.dtype) for each in stored] != [(each.shape, each.dtype) for each in expected]:
        raise HyperpushError("the checkpoint does not fit this program: it holds other arrays")
    return structure.unflatten(
        [from_bits(jnp.asarray(each), leaf.dtype) for each, leaf in zip(stored, leaves, strict=True)]
    )
