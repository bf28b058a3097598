"""The model of a client in the BiG-Fed paper: linear layers with a shared middle layer φ."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def coefficients(params: Float[Array, "w f1"], hyper: Float[Array, "w w"]) -> Float[Array, " f"]:
    """Return θ¹φθ², the coefficients of the inputs.

    The last column of `params` is θ², and the other columns are θ¹ by input.
    """
    return params[:, :-1].T @ hyper @ params[:, -1]


def model(params: Float[Array, "w f1"], hyper: Float[Array, "w w"], batch: PyTree) -> Float[Array, " m"]:
    """Return the outputs of the model for a batch: inputs · coefficients."""
    return batch[0] @ coefficients(params, hyper)


def loss(outputs: Float[Array, " m"], batch: PyTree) -> Float[Array, " m"]:
    """Return half the squared error of each example."""
    return 0.5 * (outputs - batch[1]) ** 2


def mean_square(params: Float[Array, "w f1"], hyper: Float[Array, "w w"], batch: PyTree) -> Float[Array, ""]:
    """Return the mean squared error of the model on a batch."""
    return 2 * jnp.mean(loss(model(params, hyper, batch), batch))


def represent(params: Float[Array, "w f1"], hyper: Float[Array, "w w"]) -> Float[Array, " d"]:
    """Return the vector that a client shows of its model: φθ_i, flattened."""
    return (hyper @ params).reshape(-1)
