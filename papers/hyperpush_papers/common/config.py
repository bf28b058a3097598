"""Options of the studies that compare every bilevel algorithm on one task."""

from typing import Annotated

from hyperpush.base.config import Config
from hyperpush.base.limits import whole
from hyperpush_papers.common.options import Count, Portion, Positive, Positives, Precision, Seed, Several, option


class Privacy(Config):
    """Settings of private runs, fixed in advance: choosing them by looking at results would be a release of data."""

    epsilon: Positive = option(1.0, "Largest ε of any client, for all that it sends.")
    delta: Portion = option(1e-5, "δ of Gaussian noise; 0: pure ε, by Laplace noise.")
    clip: Positive = option(0.5, "Largest ℓ2 norm of one example's gradient.")
    radius: Positive = option(0.5, "Largest ℓ2 norm of LDP-DSBO's z.")
    iterations: Count = option(300, "Iterations of LDP-DSBO.")
    loop_outer: Positive = option(0.1, "Outer step of LDP-DSBO, in no units: its sensitivity grows with its steps.")
    loop_inner: Positive = option(0.25, "Inner step of LDP-DSBO, in no units.")
    outer_steps: Count = option(2, "Outer steps of PDBO.")
    solver_steps: Count = option(15, "Steps of SGP before each of them, and once more at the end.")
    order: Count = option(3, "Order of HGP, and steps of TrackedHGP.")
    outer: Positive = option(1.0, "Outer step of PDBO, in units of the task.")
    inner: Positive = option(1.0, "Inner step of PDBO, in units of the task.")


class Comparison(Config):
    """Options that all comparisons share; each study adds its own."""

    clients: Several = option(10, "How many share the data.")
    network: str = option("ring", "Name of the network; it has to be undirected.")
    methods: tuple[str, ...] = option((), "Which to run, by name; all if left out.")
    iterations: Annotated[int, whole(5)] = option(150, "Iterations of single-loop methods.")
    local_steps: Count = option(5, "Local steps of FedBiO and FedBiOAcc, whose rounds are as many times fewer.")
    products: Count = option(5, "Conjugate gradients where a method solves with a Hessian.")
    outer_steps: Count = option(20, "Outer steps of the methods that solve the inner problem first.")
    solver_steps: Count = option(20, "Steps of SGP before each of them, from where it stood.")
    order: Count = option(10, "Order of HGP, and steps of TrackedHGP.")
    pushes: Count = option(4, "Pushes of HGP, of TrackedHGP and of the hypers in a step.")
    outer: Positives = option((1.0, 4.0, 16.0), "Outer steps to try, in units of the task.")
    inner: Positives = option((0.5, 1.5), "Inner steps to try, in units of the task.")
    points: Count = option(15, "Points of a curve, at least.")
    most: Count = option(50_000, "Methods that would form larger matrices than this many numbers are left out.")
    privacy: Privacy | None = option(None, "Private runs of the methods that have a private form, besides.")
    seed: Seed = option(0, "Decides data, starting point and every draw.")
    precision: Precision = "float32"
