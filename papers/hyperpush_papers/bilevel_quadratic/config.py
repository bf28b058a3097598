"""Every bilevel algorithm on one problem with closed forms: where each ends, by iteration and by floats sent.

Clients have different quadratic costs and one common hyper. A distance is that of the farthest client, divided by the
distance at the start.
"""

from hyperpush.base.config import Config
from hyperpush_papers.common.options import Count, Positive, Precision, Seed, Several, option, study


class BilevelQuadratic(Config):
    """Options of the comparison of bilevel algorithms."""

    clients: Several = 5
    network: str = option("ring", "Name of the network; it has to be undirected.")
    methods: tuple[str, ...] = option((), "Which to run, by their first word; all if left out.")
    iterations: Count = option(1000, "Iterations of methods that end at a point at constant steps.")
    steps: tuple[Positive, ...] = option((0.1, 0.03, 0.01), "Constant steps of methods whose error grows with them.")
    passes: Positive = option(40, "Their iterations, times the step.")
    falling: Count = option(100_000, "Iterations of the same methods with falling steps.")
    outer_steps: Count = option(40, "Outer steps of the methods that solve the inner problem first.")
    seed: Seed = option(0, "Decides the problem and every draw.")
    precision: Precision = "float64"


EXPERIMENT = study(
    "bilevel-quadratic",
    "Every bilevel algorithm on unlike quadratics: where each ends, by iteration and by floats.",
    BilevelQuadratic,
)
