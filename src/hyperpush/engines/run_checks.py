"""Checks of the arguments of a run, for all engines."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.engines.result import Recorder
from hyperpush.programs import Average, Exchange, Node, Profile, Repeat, Server, contains


def check_repairable(program: Node, faulty: bool, trees: bool = False) -> None:
    """Raise InvalidInput for programs that give wrong results, or never end, on links that lose messages.

    With `trees`, averages along a tree are allowed, because the engine sends their messages again.
    """

    if not faulty:
        return
    fragile: dict[str, Callable[[Node], bool]] = {
        "votes on ending a loop": lambda node: isinstance(node, Repeat) and node.votes,
        "servers": lambda node: isinstance(node, Server),
        "averages along a tree": lambda node: isinstance(node, Average) and node.by == "tree" and not trees,
        "averages that start anew (HGP's)": lambda node: isinstance(node, Average) and node.by != "tree",
    }
    for what, test in fragile.items():
        if contains(program, test):
            allowed = f"reliable links, which {what} require; SGP and TrackedHGP tolerate lost messages"
            raise InvalidInput("faults", "links that lose messages", allowed)


def check_recording(recorders: Mapping[str, Recorder], every: int, found: Profile) -> None:
    """Raise InvalidInput if `every` is below 1, or if a recorder names a loop that the program does not have."""
    check_integer("every", every, minimum=1)
    names = {loop.name for _, _, loop in found.loops}
    for name in recorders:
        if name not in names:
            raise unknown("record", name, names)


def check_clients(name: str, tree: PyTree, clients: int) -> None:
    """Raise InvalidInput unless all arrays have `clients` rows on axis 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != clients:
            raise InvalidInput(f"{name}{jax.tree_util.keystr(path)}", shape, f"{clients} clients on axis 0")


def check_conserved(program: Node) -> None:
    """Raise InvalidInput for programs whose messages must arrive in time, which asynchronous peers cannot run."""
    check_repairable(program, True)
    if contains(program, lambda node: isinstance(node, Exchange) and not node.conserved):
        raise InvalidInput(
            "mode", "asynchronous", "synchronous: this program has messages that cannot come late (not conserved)"
        )
