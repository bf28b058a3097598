"""Logistic regression with its L2 rates as hyper-parameters, on generated heterogeneous clients."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hyperpush.data.synthetic import mixture_of_logistic
from hyperpush.problem import Problem
from hyperpush.problems.instance import Instance


@jax.custom_jvp
def softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """log(1 + eˣ), with the sigmoid as its derivative: a quarter off the time of an SGP round against JAX's own."""
    return jax.nn.softplus(x)


@softplus.defjvp
def _(primals, tangents):
    return softplus(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


def cross_entropy(params: Float[Array, " d"], batch: tuple[Array, Array]) -> Float[Array, ""]:
    """Mean binary cross-entropy of a linear classifier."""
    inputs, labels = batch
    # Many examples side by side: a quarter of the time. The barrier lets XLA transpose them once, before a loop.
    tall = inputs.shape[0] > inputs.shape[1]
    scores = params @ jax.lax.optimization_barrier(inputs.T) if tall else inputs @ params
    return jnp.mean(softplus(scores) - labels * scores)


def inner(params, hyper, batch):
    """Cross-entropy + ½ Σ_k λ_k θ_k²."""
    return cross_entropy(params, batch) + 0.5 * jnp.sum(hyper * params**2)


def inner_log(params, hyper, batch):
    """The same with rates exp(λ_k), which stay positive wherever an outer optimiser takes λ."""
    return inner(params, jnp.exp(hyper), batch)


def outer(params, hyper, batch):
    """Cross-entropy on validation examples."""
    return cross_entropy(params, batch)


PROBLEM = Problem(inner, outer)
LOG_PROBLEM = Problem(inner_log, outer)


def logistic(
    clients: int, seed: int, *, examples: int = 100, features: int = 5, rate: float = 0.01, log_rates: bool = False
) -> Instance:
    """`examples` training and as many validation examples per client, inputs with a constant 1 appended.

    The classifier starts at zero; every client's L2 rates, one per parameter, at `rate`. The hyper-parameters are these
    rates, or with `log_rates` their logarithms.
    """
    generator = np.random.default_rng(seed)
    inputs, labels = mixture_of_logistic(clients, 2 * examples, generator, features=features)
    inputs = np.concatenate([inputs, np.ones((*inputs.shape[:2], 1))], axis=2)
    dtype = jnp.zeros(()).dtype
    arrays = jnp.asarray(inputs, dtype), jnp.asarray(labels, dtype)
    train = tuple(a[:, :examples] for a in arrays)
    validation = tuple(a[:, examples:] for a in arrays)
    shape = (clients, features + 1)
    hypers = jnp.full(shape, np.log(rate) if log_rates else rate, dtype)
    return Instance(LOG_PROBLEM if log_rates else PROBLEM, jnp.zeros(shape, dtype), hypers, train, validation)
