"""What a peer stores before it sends, and how it comes back to that place of its program."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.engines.peer.channels import Channels
from hyperpush.engines.peer.functions import is_key
from hyperpush.engines.peer.state import Frame, PeerState, Row, Stage
from hyperpush.engines.result import Recorder
from hyperpush.errors import HyperpushError
from hyperpush.programs import Average, Exchange, Local, Node, Repeat, Scope, Sequence, children

Arrays = Mapping[str, np.ndarray]
Shapes = Callable[[Callable[..., Any], PyTree], PyTree]  # those of f(state, context)
PLAIN = (
    "first",
    "step",
    "own",
    "leaving",
    "heir",
    "stage",
    "learned",
)  # fields of a `PeerState` that JSON holds as they are
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
        "rows": {n: [(r.step, r.floats, list(r.passes.items())) for r in rows] for n, rows in state.records.items()},
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
        state.passes = Counter(_passes(self.facts["passes"]))
        for name, count in zip(COUNTED, self.facts["counts"], strict=True):
            setattr(state.counts, name, count)

    def frames(self, program: Node, state: PyTree, shapes: Shapes) -> list[Frame]:
        """The nodes on the way to the exchange that was stored, outermost first."""
        node, outer, found = program, state, []
        if self.facts["stage"] and not self.facts["leaving"]:
            return found
        for depth, (at, times, within, rows) in enumerate(self.facts["frames"]):
            if isinstance(node, Scope) != within or not isinstance(node, Sequence | Repeat | Scope):
                raise HyperpushError("the checkpoint is of another program")
            if isinstance(node, Scope):
                outer = self.tree(f"frame{depth}", outer)
                found.append(Frame(at, times, outer, rows))
                outer = shapes(node.enter, outer)
            else:
                found.append(Frame(at, times))
            node = children(node)[at if isinstance(node, Sequence) else 0]
        if not isinstance(node, Exchange | Average):
            raise HyperpushError("the checkpoint is of another program")
        return found

    def restore_totals(self, channels: Channels) -> None:
        """The running sums as they were."""
        for number, saved in enumerate(self.facts["channels"]):
            channel = channels.renew(tuple(saved["path"]), tuple(saved["epoch"]))
            channel.pending = self.arrays[f"channel{number}/pending"]
            for way, sums in (("out", channel.outgoing), ("in", channel.incoming)):
                sums.counters = {int(other): counter for other, counter in saved[way].items()}
                sums.totals = {other: self.arrays[f"channel{number}/{way}/{other}"] for other in sums.counters}
            channel.acknowledged = {int(other): counter for other, counter in saved["kept"].items()}

    def rows(
        self, record: Mapping[str, Recorder], program: Node, start: PyTree, shapes: Shapes
    ) -> dict[str, list[Row]]:
        """What was recorded until then."""
        found = {}
        for name, rows in self.facts["rows"].items():
            if rows and name in record:
                like = shapes(record[name].f, _shapes_in_loop(name, program, start, shapes))
                found[name] = [
                    Row(self.tree(f"history/{name}/{number}", like), step, floats, _passes(passes))
                    for number, (step, floats, passes) in enumerate(rows)
                ]
        return found

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


def _passes(stored: list[Any]) -> dict[tuple[int, ...], int]:
    return {tuple(path): times for path, times in stored}


def shapes_after(node: Node, state: PyTree, shapes: Shapes) -> PyTree:
    """The shapes of the state after a node; what is repeated, and messages, keep those of before."""
    if isinstance(node, Local):
        return shapes(node.f, state)
    if isinstance(node, Sequence):
        for child in node.nodes:
            state = shapes_after(child, state, shapes)
    if isinstance(node, Scope):
        inner = shapes_after(node.body, shapes(node.enter, state), shapes)
        return shapes(lambda both, ctx: node.leave(both[0], both[1], ctx), (state, inner))
    return state


def _shapes_in_loop(name: str, program: Node, start: PyTree, shapes: Shapes) -> PyTree:
    """The shapes of what the loop `name` runs on."""
    stack: list[tuple[Node, PyTree]] = [(program, start)]
    while stack:
        node, state = stack.pop()
        if isinstance(node, Repeat) and node.name == name:
            return state
        inner = shapes(node.enter, state) if isinstance(node, Scope) else state
        stack += [(child, inner) for child in children(node)]
    raise HyperpushError(f"the checkpoint holds records of {name!r}, which is not in this program")
