"""Federated averaging within clusters of clients that a server finds in their params: FeSEM and FL+HC."""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import count
from hyperpush.inner.step import Learner as _Learner
from hyperpush.inner.step import Rate, check_steps, epoch, learning, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence, Server, Within


class _State(eqx.Module):
    learner: _Learner
    cluster: Int[Array, ""]  # the number of the own cluster: the server's memory


Labels = Callable[[Float[np.ndarray, "n d"], int], np.ndarray]


def k_means(points: Float[np.ndarray, "n d"], clusters: int) -> Int[np.ndarray, " n"]:
    """Clusters by k-means, the best of ten starts."""
    from sklearn.cluster import KMeans

    return KMeans(clusters, n_init=10, random_state=0).fit_predict(points)  # pyright: ignore[reportArgumentType]


def hierarchical(points: Float[np.ndarray, "n d"], clusters: int) -> Int[np.ndarray, " n"]:
    """Clusters by joining the nearest two (Ward's distance) until so many are left."""
    from sklearn.cluster import AgglomerativeClustering

    return AgglomerativeClustering(clusters).fit_predict(points)


def cluster_means(
    points: Float[Array, "n d"], sizes: Float[Array, " n"], labels: Int[Array, " n"], clusters: int
) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
    """The weighted mean of each cluster and its weight; zeros where it is empty."""
    share = jax.nn.one_hot(labels, clusters, axis=0, dtype=points.dtype) * sizes
    weight = jnp.sum(share, axis=1)
    return (share @ points) / jnp.where(weight > 0, weight, 1)[:, None], weight


def nearest(points: Float[Array, "n d"], centres: Float[Array, "k d"], weight: Float[Array, " k"]) -> Int[Array, " n"]:
    """The number of the nearest centre that is not empty."""
    far = jnp.sum((points[:, None] - centres) ** 2, axis=-1)
    return jnp.argmin(jnp.where(weight > 0, far, jnp.inf), axis=1)


class _Clustered(eqx.Module):
    """What both share: local epochs, then a server that answers everybody with the mean of its cluster."""

    rounds: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    clusters: int = eqx.field(static=True)
    epochs: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        name = type(self).__name__
        check_steps(f"{name}.rounds", self.rounds, self.batch)
        optimizer(self.rate)
        whole(f"{name}.clusters", self.clusters, least=1)
        whole(f"{name}.epochs", self.epochs, least=1)

    def _train(self, problem: Problem, transform: optax.GradientTransformation) -> Node:
        def train(state: _State, ctx: Context) -> _State:
            def one(number, learner):
                key = jax.random.fold_in(ctx.key, number)
                return epoch(problem, transform, learner, ctx.data.inner, self.batch, key)

            return replace(state, learner=jax.lax.fori_loop(0, self.epochs, one, state.learner))

        return Local(train)

    def _meet(self, relabel: Callable[[Array, Array, Array], Array]) -> Node:
        """Everybody gets `relabel(points, sizes, labels)`'s cluster and its mean."""

        def send(state: _State, ctx: Context) -> PyTree:
            size = jnp.asarray(count(ctx.data.inner), jnp.zeros(()).dtype)
            return size, state.cluster, ravel_pytree(state.learner.params)[0]

        def compute(messages: PyTree, key: PRNGKeyArray) -> PyTree:
            sizes, labels, points = messages
            after = relabel(points, sizes, labels)
            centres, _ = cluster_means(points, sizes, after, self.clusters)
            return centres[after], after.astype(labels.dtype)

        def receive(state: _State, answer: PyTree, ctx: Context) -> _State:
            restore = ravel_pytree(state.learner.params)[1]
            return _State(state.learner.moved(restore(answer[0]), state.learner.memory), answer[1])

        return Server(send, compute, receive)

    def _by(self, labels: Labels) -> Callable[[Array, Array, Array], Array]:
        """Clusters found in plain Python; once somebody has left the finite numbers, all are in cluster 0."""

        def find(points: Array) -> np.ndarray:
            if not np.all(np.isfinite(points)):
                return np.zeros(len(points), np.int32)
            return np.asarray(labels(np.asarray(points, np.float64), self.clusters), np.int32)

        def relabel(points: Array, sizes: Array, old: Array) -> Array:
            shape = jax.ShapeDtypeStruct((points.shape[0],), jnp.int32)
            return jax.pure_callback(find, shape, points, vmap_method="sequential")

        return relabel

    def _within(self, body: Node, transform: optax.GradientTransformation) -> Node:
        def enter(learner: _Learner, ctx: Context) -> _State:
            whole(f"{type(self).__name__}.clusters", self.clusters, least=1, most=ctx.clients)
            return _State(learner, jnp.zeros((), jnp.int32))

        return learning(Within(body, enter, leave=lambda before, state, ctx: state.learner), transform)


@final
class FeSEM(_Clustered):
    """Each round: local epochs, everybody to the nearest centre, centres = means of their clients.

    Xie, Long, Shen, Zhou, Wang, Jiang 2020. The first centres are those of k-means after the first round. A centre that
    loses all its clients stays empty.
    """

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def move(points: Array, sizes: Array, labels: Array) -> Array:
            return nearest(points, *cluster_means(points, sizes, labels, self.clusters))

        train = self._train(problem, transform)
        first = Repeat(Sequence(train, self._meet(self._by(k_means))), min(self.rounds, 1), name="first")
        then = Repeat(Sequence(train, self._meet(move)), max(self.rounds - 1, 0), name="FeSEM")
        return self._within(Sequence(first, then), transform)


@final
class FLHC(_Clustered):
    """FL+HC: `together` rounds of federated averaging, one of local epochs, then averaging within clusters for good.

    Clusters are found once, by hierarchical clustering of the params after the own epochs. Briggs, Fan, Andras 2020,
    who cut the tree at a distance; here at a number of clusters.
    """

    together: int = eqx.field(static=True, default=5)

    def __check_init__(self):
        whole("FLHC.together", self.together, least=0)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)
        train = self._train(problem, transform)
        before = min(self.together, self.rounds)
        at = min(self.rounds - before, 1)
        # All are in cluster 0 at first.
        together = Repeat(Sequence(train, self._meet(lambda points, sizes, old: old)), before, name="together")
        split = Repeat(Sequence(train, self._meet(self._by(hierarchical))), at, name="split")
        rest = self.rounds - before - at
        apart = Repeat(Sequence(train, self._meet(lambda points, sizes, old: old)), rest, name="apart")
        return self._within(Sequence(together, split, apart), transform)
