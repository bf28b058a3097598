"""The paper's model of a client: linear layers of which the middle one is everybody's."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def coefficients(params: Float[Array, "w f1"], hyper: Float[Array, "w w"]) -> Float[Array, " f"]:
    """θ¹φθ², what the layers do to each input: the last column of `params` is θ², the others θ¹ by input."""
    return params[:, :-1].T @ hyper @ params[:, -1]


def model(params: Float[Array, "w f1"], hyper: Float[Array, "w w"], batch: PyTree) -> Float[Array, " m"]:
    """inputs · coefficients."""
    return batch[0] @ coefficients(params, hyper)


def loss(outputs: Float[Array, " m"], batch: PyTree) -> Float[Array, " m"]:
    """Half the squared error of each example."""
    return 0.5 * (outputs - batch[1]) ** 2


def mean_square(params: Float[Array, "w f1"], hyper: Float[Array, "w w"], batch: PyTree) -> Float[Array, ""]:
    """The mean squared error."""
    return 2 * jnp.mean(loss(model(params, hyper, batch), batch))


def represent(params: Float[Array, "w f1"], hyper: Float[Array, "w w"]) -> Float[Array, " d"]:
    """φθ_i, flat."""
    return (hyper @ params).reshape(-1)
