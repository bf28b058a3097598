"""FL+HC: federated averaging, then averaging within clusters that are found once."""

from typing import ClassVar, final

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.cluster.hierarchy import cut_tree, linkage

from hyperpush.base.ranges import Whole
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Node
from hyperpush.task.problem import Problem
from hyperpush_papers.big_fed.clustered import ClusteredAveraging


@final
class FLHC(ClusteredAveraging):
    """FL+HC: federated averaging, then averaging within clusters that are found once.

    First come `together` rounds of federated averaging and one round of local epochs. Then hierarchical clustering of
    the clients' params finds the clusters. All further rounds average within clusters (Briggs, Fan and Andras,
    arXiv:2004.11791).

    **Use it** where clients fall into a known number of kinds. **Avoid it** if the server must not see params.

    Departures from the paper:

    1. The tree is cut at a number of clusters. The paper cuts it at a distance.

    Args:
        steps: Rounds with the server. With 0 nothing moves.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Passes over a client's examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
        clusters: Number of clusters, from 1 (federated averaging) to the number of clients.
        together: Rounds of federated averaging before the clusters are found, 0 or more.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Two kinds of clients end at the mean of their kind.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> from hyperpush_papers.big_fed.flhc import FLHC
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [8.0], [9.0]]), outer_on="train",
        ... )
        >>> solver = FLHC(steps=20, step_size=0.5, clusters=2, together=3)
        >>> print(hp.train(task, solver, hp.networks.FullyConnected(4), key=0).params.round(1))
        [1.5 1.5 8.5 8.5]
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

    together: Whole = eqx.field(static=True, default=5)

    def find_clusters(self, points: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " n"]:
        """Return each client's cluster: join the two nearest clusters (Ward's distance) until `clusters` are left."""
        return cut_tree(linkage(points, "ward"), n_clusters=self.clusters)[:, 0]

    def program(self, problem: Problem) -> Node:
        def keep(points: Array, sizes: Array, labels: Array) -> Array:
            return labels  # federated averaging: all clients are in cluster 0

        before = min(self.together, self.steps)
        split = min(self.steps - before, 1)
        return self.run_phases(
            problem,
            (before, "together", keep),
            (split, "split", self.relabel_on_host),
            (self.steps - before - split, "apart", keep),
        )
