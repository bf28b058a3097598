"""Federated averaging within clusters of clients that a server finds in their params: FeSEM and FL+HC."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.checks import check_integer
from hyperpush.data.batches import count
from hyperpush.inner.base import InnerSolver, epoch, learning
from hyperpush.inner.base import Learner as _Learner
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import Optimizer, StepSize, build, check_optimizer
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence, Server


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


def nearest(points: Float[Array, "n d"], centers: Float[Array, "k d"], weight: Float[Array, " k"]) -> Int[Array, " n"]:
    """The number of the nearest center that is not empty."""
    far = jnp.sum((points[:, None] - centers) ** 2, axis=-1)
    return jnp.argmin(jnp.where(weight > 0, far, jnp.inf), axis=1)


class _Clustered(InnerSolver):
    """What both share: local epochs, then a server that answers everybody with the mean of its cluster."""

    steps: int = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    epochs: int = eqx.field(static=True, default=1)
    batch_size: int | None = eqx.field(static=True, default=None)
    optimizer: Optimizer | optax.GradientTransformation | None = None
    clusters: int = eqx.field(static=True, kw_only=True)

    def __check_init__(self):
        name = type(self).__name__
        check_integer(f"{name}.steps", self.steps, minimum=0)
        check_optimizer(name, self.step_size, self.optimizer)
        check_integer(f"{name}.clusters", self.clusters, minimum=1)
        check_integer(f"{name}.epochs", self.epochs, minimum=1)
        check_integer(f"{name}.batch_size", self.batch_size, minimum=1, optional=True)

    def _train(self, problem: Problem, transform: optax.GradientTransformation) -> Node:
        def train(state: _State, ctx: Context) -> _State:
            def one(number, learner):
                key = jax.random.fold_in(ctx.key, number)
                return epoch(problem, transform, learner, ctx.data.train, self.batch_size, key)

            return replace(state, learner=jax.lax.fori_loop(0, self.epochs, one, state.learner))

        return Local(train)

    def _meet(self, relabel: Callable[[Array, Array, Array], Array]) -> Node:
        """Everybody gets `relabel(points, sizes, labels)`'s cluster and its mean."""

        def send(state: _State, ctx: Context) -> PyTree:
            size = jnp.asarray(count(ctx.data.train), jnp.zeros(()).dtype)
            return size, state.cluster, ravel_pytree(state.learner.params)[0]

        def compute(messages: PyTree, key: PRNGKeyArray) -> PyTree:
            sizes, labels, points = messages
            after = relabel(points, sizes, labels)
            centers, _ = cluster_means(points, sizes, after, self.clusters)
            return centers[after], after.astype(labels.dtype)

        def receive(state: _State, answer: PyTree, ctx: Context) -> _State:
            restore = ravel_pytree(state.learner.params)[1]
            return _State(state.learner.moved(restore(answer[0]), state.learner.memory), answer[1])

        return Server(send, compute, receive)

    def _by(self, labels: Labels) -> Callable[[Array, Array, Array], Array]:
        """Clusters found in plain Python; once somebody has diverged, all are in cluster 0."""

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
            check_integer(f"{type(self).__name__}.clusters", self.clusters, minimum=1, maximum=ctx.clients)
            return _State(learner, jnp.zeros((), jnp.int32))

        return learning(Scope(body, enter, leave=lambda before, state, ctx: state.learner), transform)


@final
class FeSEM(_Clustered):
    """Federated stochastic expectation maximization: everybody moves to the nearest of several centers.

    Each round: local epochs, everybody to the nearest center, centers = means of their clients (Xie et al.,
    arXiv:2005.01026).

    **Use it** where clients fall into a known number of kinds. **Avoid it** if the server must not see params. A center
    that loses all its clients stays empty.

    Departures from the paper:

    1. The first centers are those of k-means after the first round.

    Args:
        steps: Rounds with the server. With 0 nothing moves.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
        clusters: Their number, from 1 (federated averaging) to the number of clients.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Xie et al., Multi-center federated learning, arXiv:2005.01026",
        note="params end as the cluster's own",
        example={"steps": 3, "step_size": 0.1, "clusters": 2},
    )

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)

        def move(points: Array, sizes: Array, labels: Array) -> Array:
            return nearest(points, *cluster_means(points, sizes, labels, self.clusters))

        train = self._train(problem, transform)
        first = Repeat(Sequence(train, self._meet(self._by(k_means))), min(self.steps, 1), name="first")
        then = Repeat(Sequence(train, self._meet(move)), max(self.steps - 1, 0), name="FeSEM")
        return self._within(Sequence(first, then), transform)


@final
class FLHC(_Clustered):
    """FL+HC: federated averaging, then averaging within clusters that are found once.

    `together` rounds of federated averaging, one of local epochs, then averaging within clusters for good. Clusters
    come from hierarchical clustering of the params after the own epochs (Briggs, Fan and Andras, arXiv:2004.11791).

    **Use it** where clients fall into a known number of kinds. **Avoid it** if the server must not see params.

    Departures from the paper:

    1. The tree is cut at a number of clusters. The paper cuts it at a distance.

    Args:
        steps: Rounds with the server. With 0 nothing moves.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
        clusters: Their number, from 1 (federated averaging) to the number of clients.
        together: Rounds of federated averaging before, 0 or more.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Briggs, Fan and Andras, Federated learning with hierarchical clustering of local updates, "
        "arXiv:2004.11791",
        note="params end as the cluster's own",
        example={"steps": 4, "step_size": 0.1, "clusters": 2, "together": 1},
    )

    together: int = eqx.field(static=True, default=5)

    def __check_init__(self):
        check_integer("FLHC.together", self.together, minimum=0)

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)
        train = self._train(problem, transform)
        before = min(self.together, self.steps)
        at = min(self.steps - before, 1)
        # All are in cluster 0 at first.
        together = Repeat(Sequence(train, self._meet(lambda points, sizes, old: old)), before, name="together")
        split = Repeat(Sequence(train, self._meet(self._by(hierarchical))), at, name="split")
        rest = self.steps - before - at
        apart = Repeat(Sequence(train, self._meet(lambda points, sizes, old: old)), rest, name="apart")
        return self._within(Sequence(together, split, apart), transform)
