"""The paper's model of a client: linear layers of which the middle one is everybody's."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.graph.problem import GraphProblem


def coefficients(params: Float[Array, "w f1"], hyper: Float[Array, "w w"]) -> Float[Array, " f"]:
    """θ¹φθ², what the layers do to each input: the last column of `params` is θ², the others θ¹ by input."""
    return params[:, :-1].T @ hyper @ params[:, -1]


def residuals(params: Float[Array, "w f1"], hyper: Float[Array, "w w"], batch: PyTree) -> Float[Array, " m"]:
    """(inputs · coefficients − targets)/√m, so that half their square is half the mean squared error."""
    inputs, targets = batch
    return (inputs @ coefficients(params, hyper) - targets) / jnp.sqrt(targets.shape[0])


def mean_square(params: Float[Array, "w f1"], hyper: Float[Array, "w w"], batch: PyTree) -> Float[Array, ""]:
    """The mean squared error."""
    return jnp.sum(residuals(params, hyper, batch) ** 2)


def represent(params: Float[Array, "w f1"], hyper: Float[Array, "w w"]) -> Float[Array, " d"]:
    """φθ_i, flat."""
    return (hyper @ params).reshape(-1)


PROBLEM = GraphProblem.least_squares(residuals, represent)
