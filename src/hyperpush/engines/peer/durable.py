"""What a peer stores before it sends, and how it comes back to that place of its program."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.engines.peer.leaves import is_key
from hyperpush.engines.peer.places import Places
from hyperpush.engines.peer.walked import Frame, Moment, Stage, Walked
from hyperpush.engines.result import Recorder
from hyperpush.errors import HyperpushError
from hyperpush.programs import Exchange, Local, Node, Repeat, Scope, Sequence, children

Arrays = Mapping[str, np.ndarray]
Shapes = Callable[[Callable[..., Any], PyTree], PyTree]  # those of f(state, context)


@runtime_checkable
class Store(Protocol):
    """Where a peer keeps what it needs to go on after it was killed."""

    def save(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Make both durable, together, in place of what was saved before."""
        ...

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """What was saved last."""
        ...


def packed(state: PyTree, walked: Walked, places: Places) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The state, the totals and the place of a peer that is about to send."""
    arrays: dict[str, np.ndarray] = {}

    def put(name: str, tree: PyTree) -> None:
        for place, leaf in enumerate(jax.tree.leaves(tree)):
            arrays[f"{name}/{place}"] = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)

    put("state", state)
    for depth, frame in enumerate(walked.frames):
        put(f"frame{depth}", frame.outer)
    for name, rows in walked.history.items():
        for number, row in enumerate(rows):
            put(f"history/{name}/{number}", row)
    sums = []
    for number, place in enumerate(places.tolerant()):
        arrays[f"place{number}/pending"] = place.pending
        for way, each in (("out", place.outgoing), ("in", place.incoming)):
            for other, total in each.totals.items():
                arrays[f"place{number}/{way}/{other}"] = total
        counters = {"out": place.outgoing.counters, "in": place.incoming.counters, "kept": place.acknowledged}
        sums.append({"path": place.path, "epoch": place.epoch, **counters})
    counts = walked.counts
    return arrays, {
        "first": walked.first,
        "step": walked.step,
        "closed": sorted(walked.closed),
        "left": sorted(walked.left),
        "own": walked.own,
        "leaving": walked.leaving,
        "heir": walked.heir,
        "stage": walked.stage,
        "frames": [(frame.at, frame.times, frame.outer is not None, frame.rows) for frame in walked.frames],
        "places": sums,
        "history": {name: len(rows) for name, rows in walked.history.items()},
        "passes": list(walked.passes.items()),
        "moments": walked.moments,
        "counts": [counts.rounds, counts.floats, counts.bytes, counts.late],
    }


@final
@dataclass(frozen=True)
class Saved:
    """What a store held."""

    arrays: Arrays
    facts: Mapping[str, Any]

    def set_back(self, walked: Walked) -> None:
        """Be where it was stored, apart from the nodes, which the walk goes into again."""
        facts, counts = self.facts, walked.counts
        walked.step, walked.first, walked.closed = facts["step"], facts["first"], frozenset(facts["closed"])
        walked.left, walked.own = frozenset(facts["left"]), facts["own"]
        walked.leaving, walked.heir, walked.stage = facts["leaving"], facts["heir"], Stage(facts["stage"])
        walked.passes = Counter({tuple(path): times for path, times in facts["passes"]})
        counts.rounds, counts.floats, counts.bytes, counts.late = facts["counts"]

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
        if not isinstance(node, Exchange):
            raise HyperpushError("the checkpoint is of another program")
        return found

    def totals(self, places: Places) -> None:
        """The running sums as they were."""
        for number, saved in enumerate(self.facts["places"]):
            old = places.current[tuple(saved["path"])]
            del places.numbered[old.number]
            place = places.renew(old, tuple(saved["epoch"]))
            place.pending = self.arrays[f"place{number}/pending"]
            for way, sums in (("out", place.outgoing), ("in", place.incoming)):
                sums.counters = {int(other): counter for other, counter in saved[way].items()}
                sums.totals = {other: self.arrays[f"place{number}/{way}/{other}"] for other in sums.counters}
            place.acknowledged = {int(other): counter for other, counter in saved["kept"].items()}

    def moments(self) -> dict[str, list[Moment]]:
        """When it was recorded."""
        return {
            name: [Moment(step, floats, [(tuple(path), n) for path, n in passes]) for step, floats, passes in rows]
            for name, rows in self.facts["moments"].items()
        }

    def history(self, record: Mapping[str, Recorder], program: Node, start: PyTree, shapes: Shapes) -> dict[str, list]:
        """What was recorded until then."""
        found = {}
        for name, rows in self.facts["history"].items():
            if rows and name in record:
                like = shapes(record[name].f, _looped(name, program, start, shapes))
                found[name] = [self.tree(f"history/{name}/{number}", like) for number in range(rows)]
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


def shaped_after(node: Node, state: PyTree, shapes: Shapes) -> PyTree:
    """The shapes of the state after a node; what is repeated, and messages, keep those of before."""
    if isinstance(node, Local):
        return shapes(node.f, state)
    if isinstance(node, Sequence):
        for child in node.nodes:
            state = shaped_after(child, state, shapes)
    if isinstance(node, Scope):
        inner = shaped_after(node.body, shapes(node.enter, state), shapes)
        return shapes(lambda both, ctx: node.leave(both[0], both[1], ctx), (state, inner))
    return state


def _looped(name: str, program: Node, start: PyTree, shapes: Shapes) -> PyTree:
    """The shapes of what the loop `name` runs on."""
    stack: list[tuple[Node, PyTree]] = [(program, start)]
    while stack:
        node, state = stack.pop()
        if isinstance(node, Repeat) and node.name == name:
            return state
        inner = shapes(node.enter, state) if isinstance(node, Scope) else state
        stack += [(child, inner) for child in children(node)]
    raise HyperpushError(f"the checkpoint holds records of {name!r}, which is not in this program")
