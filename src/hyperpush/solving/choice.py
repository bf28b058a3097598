"""Classify data, privacy, trust and engine, so that automatic solvers and estimators choose by the same rule."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from hyperpush.networks.expected import Losses, tree_pays
from hyperpush.task.task import client_shapes


class Situation(NamedTuple):
    """A kind of situation that decides the choice of a method, and its description in a status."""

    kind: Literal["private", "mini-batches", "no tree", "tree"]
    why: str
    votes: bool  # False if messages get lost, because then clients cannot vote on ending


def situation(
    private: bool, batch_size: int | None, trust: bool, engine: Any, network: Any = None, task: Any = None
) -> Situation:
    """Return the situation in which a method runs.

    Args:
        private: True if gradients get noise.
        batch_size: Examples per mini-batch; None means all examples.
        trust: True if members may see each other's sums.
        engine: The engine that runs the clients; None stands for one that loses no messages.
        network: The network on whose links a tree would wait; with None the links are not examined.
        task: The task, for the size of its params; with None the links are not examined.
    """
    no_tree, faults = ("", None) if engine is None else (engine.no_tree, engine.lossy)
    votes = faults is None
    if private:
        return Situation("private", "a private task", votes)
    if batch_size is not None:
        return Situation("mini-batches", "mini-batches", votes)
    if no_tree or not trust:
        return Situation("no tree", no_tree or "members that distrust each other", votes)
    if network is not None and task is not None:
        size = sum(leaf.size for leaf in jax.tree.leaves(client_shapes(task, task.params)))
        if not tree_pays(network, size, None if faults is None else Losses(faults.all_lost, faults.delay / 2)):
            return Situation("no tree", "links that are too seldom up to wait for", votes)
    return Situation("tree", "all examples, members that trust each other", votes)


def join_choices(choices: Sequence[str]) -> str:
    """Join the choices of several parts, each "name: reason" or empty; a reason that all share is stated once."""
    made = [each.partition(": ") for each in choices if each]
    if len({why for _, _, why in made}) == 1:
        return f"{' and '.join(name for name, _, _ in made)}: {made[0][2]}"
    return "; ".join("".join(each) for each in made)
