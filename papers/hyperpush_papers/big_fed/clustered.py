"""Federated averaging within clusters that a server finds in params: the shared part of FeSEM and FL+HC."""

import abc
from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer
from hyperpush.base.ranges import Count, OptionalCount
from hyperpush.inner.base import GradientSolver, Learner, solver_program
from hyperpush.inner.fedavg import local_epochs, size
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence, Server
from hyperpush.task.problem import Problem

Relabel = Callable[[Array, Array, Array], Array]  # (points, sizes, labels) -> labels


class ClusterState(eqx.Module):
    """State of one client, and the number of the cluster that the server assigned to it."""

    learner: Learner
    cluster: Int[Array, ""]  # number of the client's cluster


def cluster_means(
    points: Float[Array, "n d"], sizes: Float[Array, " n"], labels: Int[Array, " n"], clusters: int
) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
    """Return the weighted mean of each cluster and its weight; zeros for empty clusters."""
    share = jax.nn.one_hot(labels, clusters, axis=0, dtype=points.dtype) * sizes
    weight = jnp.sum(share, axis=1)
    return (share @ points) / jnp.where(weight > 0, weight, 1)[:, None], weight


class ClusteredAveraging(GradientSolver):
    """Phases of rounds: local epochs, then a server that answers each client with the mean of its cluster."""

    epochs: Count = eqx.field(static=True, default=1)
    batch_size: OptionalCount = eqx.field(static=True, default=None)
    clusters: Count = eqx.field(static=True, kw_only=True)

    @abc.abstractmethod
    def find_clusters(self, points: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
        """Return the number of each client's cluster from all clients' params; runs in Python on the host."""

    def relabel_on_host(self, points: Array, sizes: Array, labels: Array) -> Array:
        """Return the clusters of `find_clusters`; after a client has diverged, all clients are in cluster 0."""

        def find(points: Array) -> Int[np.ndarray, " n"]:
            if not np.all(np.isfinite(points)):
                return np.zeros(len(points), np.int32)
            return self.find_clusters(np.asarray(points, np.float64)).astype(np.int32)

        shape = jax.ShapeDtypeStruct((points.shape[0],), jnp.int32)
        return jax.pure_callback(find, shape, points, vmap_method="sequential")

    def run_phases(self, problem: Problem, *phases: tuple[int, str, Relabel]) -> Node:
        """Return a program of phases in order; each has a number of rounds, a name, and a rule for new clusters."""
        transform = self.transformation

        def enter(learner: Learner, ctx: Context) -> ClusterState:
            check_integer(f"{type(self).__name__}.clusters", self.clusters, minimum=1, maximum=ctx.clients)
            return ClusterState(learner, jnp.zeros((), jnp.int32))

        def train(state: ClusterState, ctx: Context) -> ClusterState:
            train, epochs, batch = ctx.data.train, self.epochs, self.batch_size
            return replace(state, learner=local_epochs(problem, transform, state.learner, ctx, train, epochs, batch))

        def send(state: ClusterState, ctx: Context) -> PyTree:
            return size(ctx, weighted=True), state.cluster, ravel_pytree(state.learner.params)[0]

        def receive(state: ClusterState, answer: PyTree, ctx: Context) -> ClusterState:
            restore = ravel_pytree(state.learner.params)[1]
            return ClusterState(state.learner.at(restore(answer[0]), state.learner.memory), answer[1])

        def meet(relabel: Relabel) -> Node:
            def compute(messages: PyTree, key: PRNGKeyArray) -> PyTree:
                sizes, labels, points = messages
                after = relabel(points, sizes, labels)
                centers, _ = cluster_means(points, sizes, after, self.clusters)
                return centers[after], after.astype(labels.dtype)

            return Server(send, compute, receive)

        loops = [Repeat(Sequence(Local(train), meet(relabel)), rounds, name=name) for rounds, name, relabel in phases]
        return solver_program(Scope(Sequence(*loops), enter, leave=lambda before, state, ctx: state.learner), transform)
