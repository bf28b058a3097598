"""A run, laid out before its first round: what it needs, what it does, and the checks of what it was given."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.checks import check_integer
from hyperpush.engines import keys, lossy
from hyperpush.engines.faults import Faults
from hyperpush.engines.interpret import Carry, Clock, Interpreter
from hyperpush.engines.placement import Placement
from hyperpush.engines.result import Recorder
from hyperpush.errors import InvalidInput, unknown
from hyperpush.networks import Network
from hyperpush.programs import Average, Node, Profile, Recipe, Repeat, Server, contains, profile


@dataclass(frozen=True)
class Plan:
    """A run, laid out: what every chunk of it needs to know."""

    placement: Placement
    network: Network
    data: PyTree
    key: PRNGKeyArray
    faults: Faults | None
    agreement: int
    batch: int | None
    recipe: Recipe  # with arrays in place of floats

    def interpreter(self) -> Interpreter:
        return Interpreter(
            self.network,
            self.placement,
            self.data,
            keys.network_key(self.key),
            keys.faults_key(self.key),
            self.faults,
            self.agreement,
            self.batch,
        )


def lay_out(
    recipe: Recipe, network: Network, states: PyTree, data: PyTree, faults: Faults | None, step: int
) -> tuple[Node, Profile, Carry, int]:
    """The program, what it does, the first carry, and the rounds that an agreement takes."""
    check_clients("states", states, network.clients)
    check_clients("data", data, network.clients)
    program = recipe.program()
    check_repairable(program, faults is not None)

    found = profile(recipe, one_client(states), one_client(data), network.clients)
    totals = {}
    if faults is not None:
        totals = {
            s.path: lossy.Totals.start(s.message, network.clients, faults.delay)
            for s in found.sendings
            if getattr(s.node, "conserved", False)
        }
    clock = Clock.start((body for body, _, loop in found.loops if loop.agreed), step)
    agrees = any(loop.until is not None for _, _, loop in found.loops)
    sent = {s.path: jnp.asarray(np.zeros(network.clients, np.int32)) for s in found.sendings}
    return program, found, Carry(states, clock, totals, sent), network.flood_rounds() if agrees else 1


def one_client(tree: PyTree) -> PyTree:
    """The shapes that one of several stacked clients has."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def check_repairable(program: Node, faulty: bool) -> None:
    """Refuse programs that would be silently wrong, or never end, where messages get lost."""

    def fragile(node: Node) -> bool:
        if isinstance(node, Repeat):
            return node.until is not None
        return isinstance(node, Server | Average)

    if faulty and contains(program, fragile):
        raise InvalidInput(
            "faults",
            "links that lose messages",
            "reliable links: averages that start anew (HGP's), servers and votes on ending a loop cannot do without",
        )


def check_recording(recorders: Mapping[str, Recorder], every: int, program: Node) -> None:
    """Refuse to record a loop that is not there."""
    check_integer("every", every, minimum=1)
    names: set[str] = set()
    contains(program, lambda node: isinstance(node, Repeat) and bool(names.add(node.name)))
    for name in recorders:
        if name not in names:
            raise unknown("record", name, names)


def check_clients(name: str, tree: PyTree, clients: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != clients:
            raise InvalidInput(f"{name}{jax.tree_util.keystr(path)}", shape, f"{clients} clients on axis 0")
