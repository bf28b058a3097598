"""Groups of clients that part when their updates disagree."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.checks import not_negative, whole
from hyperpush.inner.fedavg import local_epochs, size
from hyperpush.inner.step import Learner, Rate, Trained, check_steps, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence, Server, Within


class _State(eqx.Module):
    learner: Learner
    change: Float[Array, " d"]  # of the params in this round
    group: Int[Array, ""]


class ClusteredFL(eqx.Module):
    """`FedAvg` within groups, at first one of all; a group parts in two when it stands still but its members do not.

    With Δ_i the change of client i's params in a round, a group parts if ‖mean Δ‖ < `still` and max_i ‖Δ_i‖ > `moving`
    (Euclidean norms), by complete linkage of the cosines between the Δ_i. Sattler, Müller, Samek 2020.
    """

    rounds: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    still: float = eqx.field(static=True, converter=float, default=0.4)
    moving: float = eqx.field(static=True, converter=float, default=1.6)
    epochs: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_steps("ClusteredFL.rounds", self.rounds, self.batch)
        optimizer(self.rate)
        whole("ClusteredFL.epochs", self.epochs, least=1)
        not_negative("ClusteredFL.still", self.still)
        not_negative("ClusteredFL.moving", self.moving)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def enter(trained: Trained, ctx: Context):
            learner = Learner(trained.params, trained.hyper, transform.init(trained.params))
            still = jnp.zeros_like(ravel_pytree(trained.params)[0])
            return _State(learner, still, jnp.zeros((), jnp.int32))

        def train(state: _State, ctx: Context):
            after = local_epochs(problem, transform, state.learner, ctx, ctx.data.inner, self.epochs, self.batch)
            change = ravel_pytree(after.params)[0] - ravel_pytree(state.learner.params)[0]
            return _State(state.learner.moved(state.learner.params, after.memory), change, state.group)

        def receive(state: _State, answer: PyTree, ctx: Context):
            change, group = answer
            flat, unravel = ravel_pytree(state.learner.params)
            moved = state.learner.moved(unravel(flat + change), state.learner.memory)
            return _State(moved, jnp.zeros_like(change), group)

        serve = Server(
            send=lambda state, ctx: (size(ctx, weighted=True), state.change, state.group),
            compute=self._serve,
            receive=receive,
            host=True,
        )
        return Within(
            Repeat(Sequence(Local(train), serve), self.rounds, name="ClusteredFL"),
            enter,
            leave=lambda trained, state, ctx: Trained(state.learner.params, state.learner.hyper),
        )

    def _serve(self, messages: Any, key: Any) -> tuple[Array, Array]:
        """Each group's mean change, after those that have to have parted."""
        sizes, changes, groups = (np.asarray(part) for part in messages)
        groups = parted(sizes, changes, groups, self.still, self.moving)
        means = np.empty_like(changes)
        for group in np.unique(groups):
            members = groups == group
            means[members] = np.average(changes[members], axis=0, weights=sizes[members])
        return jnp.asarray(means), jnp.asarray(groups)


def parted(
    sizes: np.ndarray, changes: np.ndarray, groups: np.ndarray, still: float, moving: float
) -> Int[np.ndarray, " n"]:
    """The number of everyone's group, after each that stands still while a member moves has parted in two."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    groups = groups.copy()
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        own = changes[members].astype(np.float64)
        mean = np.average(own, axis=0, weights=sizes[members])
        if len(members) < 2 or np.linalg.norm(mean) >= still or np.linalg.norm(own, axis=1).max() <= moving:
            continue
        length = np.maximum(np.linalg.norm(own, axis=1, keepdims=True), np.finfo(float).tiny)
        halves = fcluster(linkage(pdist(own / length, "sqeuclidean"), "complete"), 2, "maxclust")  # 2 − 2·cosine
        groups[members[halves == 2]] = groups.max() + 1
    return groups
