"""FeSEM: each client moves to the nearest of several centers."""

from typing import ClassVar, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.cluster.vq import kmeans, vq

from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Node
from hyperpush.task.problem import Problem
from hyperpush_papers.big_fed.clustered import ClusteredAveraging, cluster_means

STARTS = 20  # starts of k-means; with fewer, all may end in the same bad optimum


@final
class FeSEM(ClusteredAveraging):
    """Federated stochastic expectation maximization: each client moves to the nearest of several centers.

    In each round clients train for local epochs and move to the nearest center. Then each center becomes the mean of
    its clients' params (Xie et al., arXiv:2005.01026).

    **Use it** where clients fall into a known number of kinds. **Avoid it** if the server must not see params. A center
    that loses all its clients stays empty.

    Departures from the paper:

    1. The first centers are those of k-means after the first round.

    Args:
        steps: Rounds with the server. With 0 nothing moves.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Passes over a client's examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
        clusters: Number of clusters, from 1 (federated averaging) to the number of clients.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Two kinds of clients end at the mean of their kind.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> from hyperpush_papers.big_fed.fesem import FeSEM
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [8.0], [9.0]]), outer_on="train",
        ... )
        >>> solver = FeSEM(steps=20, step_size=0.5, clusters=2)
        >>> print(hp.train(task, solver, hp.networks.FullyConnected(4), key=0).params.round(1))
        [1.5 1.5 8.5 8.5]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Xie et al., Multi-center federated learning, arXiv:2005.01026",
        note="params end as the cluster's own",
        example={"steps": 3, "step_size": 0.1, "clusters": 2},
    )

    def find_clusters(self, points: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
        """Return each client's cluster by k-means on params, the best result of several starts."""
        centers, _ = kmeans(points, self.clusters, iter=STARTS, rng=0)
        return vq(points, centers)[0]

    def program(self, problem: Problem) -> Node:
        def move_to_nearest(points: Array, sizes: Array, labels: Array) -> Array:
            centers, weight = cluster_means(points, sizes, labels, self.clusters)
            far = jnp.sum((points[:, None] - centers) ** 2, axis=-1)
            return jnp.argmin(jnp.where(weight > 0, far, jnp.inf), axis=1)

        first = min(self.steps, 1), "first", self.relabel_on_host
        return self.run_phases(problem, first, (max(self.steps - 1, 0), "FeSEM", move_to_nearest))
