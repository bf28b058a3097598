"""What a peer stores before it sends, and how it comes back to that place of its program."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.engines.peer.channels import Channels
from hyperpush.engines.peer.functions import is_key
from hyperpush.engines.peer.state import Frame, PeerState, Row, Stage
from hyperpush.errors import HyperpushError
from hyperpush.programs import Exchange, Node, Profile, Repeat, Scope, Sequence
from hyperpush.programs import at as node_at

Arrays = Mapping[str, np.ndarray]
PLAIN = ("first", "step", "own", "leaving", "heir", "stage")  # fields of a `PeerState` that JSON holds as they are
COUNTED = ("rounds", "floats", "bytes", "late")


@runtime_checkable
class Store(Protocol):
    """Where a peer keeps what it needs to continue after it was killed."""

    def save(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Make both durable, together, in place of what was saved before."""
        ...

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """What was saved last."""
        ...


def pack(client_state: PyTree, state: PeerState, channels: Channels) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The client's state, the totals and the place of a peer that is about to send."""
    arrays: dict[str, np.ndarray] = {}

    def put(name: str, tree: PyTree) -> None:
        for place, leaf in enumerate(jax.tree.leaves(tree)):
            arrays[f"{name}/{place}"] = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)

    put("state", client_state)
    for depth, frame in enumerate(state.frames):
        put(f"frame{depth}", frame.outer)
    for name, rows in state.records.items():
        for number, row in enumerate(rows):
            put(f"history/{name}/{number}", row.value)
    sums = []
    for number, channel in enumerate(channels.tolerant()):
        arrays[f"channel{number}/pending"] = channel.pending
        for way, each in (("out", channel.outgoing), ("in", channel.incoming)):
            for other, total in each.totals.items():
                arrays[f"channel{number}/{way}/{other}"] = total
        counters = {"out": channel.outgoing.counters, "in": channel.incoming.counters, "kept": channel.acknowledged}
        sums.append({"path": channel.path, "epoch": channel.epoch, **counters})
    return arrays, {
        **{name: getattr(state, name) for name in PLAIN},
        "closed": sorted(state.closed),
        "left": sorted(state.left),
        "frames": [(frame.at, frame.times, frame.outer is not None, frame.rows) for frame in state.frames],
        "channels": sums,
        "rows": {n: [(r.step, r.floats) for r in rows] for n, rows in state.records.items()},
        "passes": list(state.passes.items()),
        "counts": [getattr(state.counts, name) for name in COUNTED],
    }


@final
@dataclass(frozen=True)
class Saved:
    """What a store held."""

    arrays: Arrays
    facts: Mapping[str, Any]

    def restore(self, state: PeerState) -> None:
        """Be where it was stored, apart from the nodes, which the peer enters again."""
        for name in PLAIN:
            setattr(state, name, self.facts[name])
        state.stage = Stage(state.stage)
        state.closed, state.left = frozenset(self.facts["closed"]), frozenset(self.facts["left"])
        state.passes = Counter({tuple(path): times for path, times in self.facts["passes"]})
        for name, count in zip(COUNTED, self.facts["counts"], strict=True):
            setattr(state.counts, name, count)

    def frames(self, program: Node, found: Profile) -> list[Frame]:
        """The nodes on the way to the exchange that was stored, outermost first."""
        path, frames = (), []
        if self.facts["stage"] and not self.facts["leaving"]:
            return frames
        for depth, (at, times, within, rows) in enumerate(self.facts["frames"]):
            node = node_at(program, path)
            if isinstance(node, Scope) != within or not isinstance(node, Sequence | Repeat | Scope):
                raise HyperpushError("the checkpoint is of another program")
            outer = self.tree(f"frame{depth}", found.states[path]) if within else None
            frames.append(Frame(at, times, outer, rows))
            path = (*path, at if isinstance(node, Sequence) else 0)
        if not isinstance(node_at(program, path), Exchange):
            raise HyperpushError("the checkpoint is of another program")
        return frames

    def restore_totals(self, channels: Channels) -> None:
        """The running sums as they were."""
        for number, saved in enumerate(self.facts["channels"]):
            channel = channels.renew(tuple(saved["path"]), tuple(saved["epoch"]))
            channel.pending = self.arrays[f"channel{number}/pending"]
            for way, sums in (("out", channel.outgoing), ("in", channel.incoming)):
                sums.counters = {int(other): counter for other, counter in saved[way].items()}
                sums.totals = {other: self.arrays[f"channel{number}/{way}/{other}"] for other in sums.counters}
            channel.acknowledged = {int(other): counter for other, counter in saved["kept"].items()}

    def rows(self, name: str, like: PyTree) -> list[Row]:
        """What was recorded of a loop until then; `like` has the shapes of one record."""
        return [
            Row(self.tree(f"history/{name}/{number}", like), step, floats)
            for number, (step, floats) in enumerate(self.facts["rows"].get(name, ()))
        ]

    def tree(self, name: str, like: PyTree) -> PyTree:
        """Stored arrays as a tree like `like`."""
        leaves, structure = jax.tree.flatten(like)

        def read(place: int, leaf: Any) -> Any:
            array = self.arrays.get(f"{name}/{place}")
            shape = jax.eval_shape(jax.random.key_data, leaf).shape if is_key(leaf) else leaf.shape
            if array is None or array.shape != shape or (not is_key(leaf) and array.dtype != leaf.dtype):
                raise HyperpushError(f"the checkpoint does not fit this program: {name}/{place}")
            return jax.random.wrap_key_data(jnp.asarray(array)) if is_key(leaf) else jnp.asarray(array)

        return structure.unflatten([read(place, leaf) for place, leaf in enumerate(leaves)])
