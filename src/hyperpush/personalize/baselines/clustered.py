"""Federated averaging in groups of clients, which split if their clients' updates disagree."""

from functools import partial
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from hyperpush.base.numbers import Number, as_number
from hyperpush.base.ranges import NonNegative
from hyperpush.inner.base import InnerState, Learner
from hyperpush.inner.fedavg import size
from hyperpush.methods.base import MethodInfo
from hyperpush.personalize.baselines.base import LocalEpochs
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence, Server
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    learner: Learner
    change: Float[Array, " d"]  # of the params in this round
    group: Int[Array, ""]


class ClusteredFL(LocalEpochs):
    """Clustered federated learning: `FedAvg` within groups of clients, which split if their updates disagree.

    All clients start in one group. Δ_i is the change of client i's params in a round. A group splits in two if
    ‖mean Δ‖ < `still` and max_i ‖Δ_i‖ > `moving`: the mean of its updates is small, but single updates are not. The
    split is by complete linkage of the cosines between the Δ_i (Sattler, Müller and Samek, arXiv:1910.01991).

    **Use it** if there are a few kinds of clients, of unknown number. **Avoid it** if the server must not see updates.

    Args:
        steps: Rounds with the server, 0 or more. 0 leaves the params unchanged.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        still: A group may split if the Euclidean norm of its mean change is below this number, 0 or more; 0 never
            splits a group. A new value compiles anew.
        moving: A group may split if the norm of one member's change exceeds this number, 0 or more. A new value
            compiles anew.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs = jax.random.normal(jax.random.key(0), (4, 20, 2))
        >>> train = (inputs, (inputs[..., 0] > 0).astype(int))
        >>> model = (lambda key: jnp.zeros((2, 2)), lambda params, inputs: inputs @ params)
        >>> baseline = hp.personalize.ClusteredFL(50, 0.5)
        >>> fitted = hp.personalize.fit(model, baseline, hp.networks.FullyConnected(4), train=train, key=0)
        >>> fitted.client(0).predict(jnp.array([[2.0, 0.0], [-2.0, 0.0]]))
        Array([1, 0], dtype=int32)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="the change of the params",
        paper="Sattler, Müller and Samek, Clustered federated learning, arXiv:1910.01991",
        note="params end as the group's own",
        example={"steps": 3, "step_size": 0.1},
    )

    # Static, since the server compares them in plain Python.
    still: NonNegative = eqx.field(static=True, converter=as_number, default=0.4)
    moving: NonNegative = eqx.field(static=True, converter=as_number, default=1.6)

    def program(self, problem: Problem) -> Node:
        def enter(trained: InnerState, ctx: Context):
            learner = Learner(trained.params, trained.hyper, self.transformation.init(trained.params))
            still = jnp.zeros_like(ravel_pytree(trained.params)[0])
            return _State(learner, still, jnp.zeros((), jnp.int32))

        def train(state: _State, ctx: Context):
            after = self.train(problem, state.learner, ctx, ctx.data.train)
            change = ravel_pytree(after.params)[0] - ravel_pytree(state.learner.params)[0]
            return _State(state.learner.at(state.learner.params, after.memory), change, state.group)

        def receive(state: _State, answer: PyTree, ctx: Context):
            change, group = answer
            flat, unravel = ravel_pytree(state.learner.params)
            moved = state.learner.at(unravel(flat + change), state.learner.memory)
            return _State(moved, jnp.zeros_like(change), group)

        serve = Server(
            send=lambda state, ctx: (size(ctx, weighted=True), state.change, state.group),
            compute=partial(_serve, self.still, self.moving),
            receive=receive,
            host=True,
        )
        return Scope(
            Repeat(Sequence(Local(train), serve), self.steps, name="ClusteredFL"),
            enter,
            leave=lambda trained, state, ctx: InnerState(state.learner.params, state.learner.hyper),
        )


def _serve(still: Number, moving: Number, messages: PyTree, key: PRNGKeyArray) -> tuple[Array, Array]:
    """Return the mean change of each client's group, and the group's number, after splitting groups."""
    sizes, changes, groups = (np.asarray(part) for part in messages)
    groups = part_groups(sizes, changes, groups, still, moving)
    means = np.empty_like(changes)
    for group in np.unique(groups):
        members = groups == group
        means[members] = np.average(changes[members], axis=0, weights=sizes[members])
    return jnp.asarray(means), jnp.asarray(groups)


def part_groups(
    sizes: np.ndarray, changes: np.ndarray, groups: np.ndarray, still: Number, moving: Number
) -> Int[np.ndarray, " n"]:
    """Return each client's group number, after splitting the groups that meet both conditions of `ClusteredFL`."""
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
