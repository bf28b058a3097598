"""Options of the studies that compare every bilevel algorithm on one task."""

from typing import Annotated

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.studies.options import Count, Positive, Precision, Several


class Privacy(Config):
    """Local differential privacy of a run. All of it is fixed beforehand: what is chosen by looking is a release."""

    epsilon: Positive = Field(default=1.0, description="What no client's ε may exceed, for all that it sends.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=1e-5, description="δ, with Gaussian noise; 0 for pure ε, with Laplace noise."
    )
    clip: Positive = Field(default=0.5, description="Largest ℓ2 norm of one example's gradient.")
    radius: Positive = Field(default=0.5, description="Largest ℓ2 norm of LDP-DSBO's z.")
    iterations: Count = Field(default=300, description="Iterations of LDP-DSBO.")
    loop_outer: Positive = Field(
        default=0.1, description="Outer step of LDP-DSBO, as it is: differences that it keeps grow with steps × slopes."
    )
    loop_inner: Positive = Field(default=0.25, description="Inner step of LDP-DSBO, as it is.")
    outer_steps: Count = Field(default=2, description="Outer steps of PDBO.")
    solver_steps: Count = Field(default=15, description="Steps of SGP before each of them, and once more at the end.")
    order: Count = Field(default=3, description="Order of HGP, and steps of TrackedHGP.")
    outer: Positive = Field(default=1.0, description="Outer step of PDBO, in units of the task.")
    inner: Positive = Field(default=1.0, description="Inner step of PDBO, in units of the task.")


class Comparison(Config):
    """Options of a comparison; an experiment adds its own."""

    clients: Several = Field(default=10, description="How many share the data.")
    network: str = Field(default="ring", description="Name of the network; it has to be undirected.")
    methods: tuple[str, ...] = Field(default=(), description="Which to run, by name; all if left out.")
    iterations: Annotated[int, Field(ge=5)] = Field(default=150, description="Iterations of single-loop methods.")
    local_steps: Count = Field(
        default=5, description="Steps of FedBiO and FedBiOAcc per iteration, of which they take as many times fewer."
    )
    products: Count = Field(default=5, description="Conjugate gradients where a method solves with a Hessian.")
    outer_steps: Count = Field(default=20, description="Outer steps of the methods that solve the inner problem first.")
    solver_steps: Count = Field(default=20, description="Steps of SGP before each of them, from where it stood.")
    order: Count = Field(default=10, description="Order of HGP, and steps of TrackedHGP.")
    pushes: Count = Field(default=4, description="Pushes of HGP, of TrackedHGP and of the hypers in a step.")
    outer: tuple[Positive, ...] = Field(
        default=(1.0, 4.0, 16.0), min_length=1, description="Outer steps to try, in units of the task."
    )
    inner: tuple[Positive, ...] = Field(
        default=(0.5, 1.5), min_length=1, description="Inner steps to try, in units of the task."
    )
    points: Count = Field(default=15, description="Points of a curve.")
    most: Count = Field(
        default=50_000, description="Methods that would form larger matrices than this many numbers are left out."
    )
    privacy: Privacy | None = Field(default=None, description="Run privately besides, what can be.")
    seed: int = Field(default=0, ge=0, description="Decides data, starting point and every draw.")
    precision: Precision = "float32"
