"""Every hypergradient estimator on one problem and several networks: error by rounds and by floats sent.

Logistic regression with L2 rates as hypers, at its exact inner solution. HGP is run on a whole grid of pushes and step
sizes, Automatic and TrackedHGP without settings. Estimators that go back through SGP are compared with their own
target, the derivative of SGP's expected step, all others with the closed form.
"""

from hyperpush.spec.config import Config
from hyperpush_papers.common.options import Count, Portion, Positive, Precision, Seed, Several, option, study

NETWORKS = ("random-directed", "k-out", "one-peer-exponential", "static-undirected", "directed-ring")


class Estimators(Config):
    """Options of the comparison of estimators."""

    sizes: tuple[tuple[Several, Several], ...] = option(
        ((3, 6), (50, 100)), "Numbers of clients and of parameters.", min_length=1
    )
    networks: tuple[str, ...] = option(NETWORKS, "Names of networks.", min_length=1)
    out_links: Count = option(3, "Links of each client on k-out graphs, where there are as many.")
    examples: Count = option(100, "Training examples per client, and as many for validation.")
    hyper: Positive = option(0.01, "Every client's L2 rate on each parameter.")
    pushes: tuple[Count, ...] = option((1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000), "HGP's pushes.")
    steps: tuple[Positive, ...] = option((0.5, 1.0, 1.5), "HGP's step sizes, in units of 1/λ_max of the mean Hessian.")
    order: Count = option(150, "Largest order of HGP and of the one-machine estimators.")
    tolerance: Positive = option(1e-8, "Tolerance of the curves of Automatic and TrackedHGP.")
    loss: Portion = option(0.3, "Share of messages that get lost in the last part; 0 leaves it out.")
    factors: tuple[Positive, ...] = option(
        (0.5, 1, 2, 4), "Pushes of TrackedHGP where messages get lost, times what it finds where none do.", min_length=1
    )
    lossy_steps: Count = option(100, "Its steps there.")
    recurrent: int = option(1000, "Rounds of the estimators that go back through SGP.", ge=0)
    recurrent_step: Positive = option(0.5, "Their step size, in units of 1/λ_max.")
    seed: Seed = option(0, "Decides the data, the networks and every draw.")
    precision: Precision = "float64"


EXPERIMENT = study(
    "estimators", "Every hypergradient estimator on several networks, by rounds and by floats sent.", Estimators
)
