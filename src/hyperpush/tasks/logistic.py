"""Logistic regression whose L2 rates are the hypers, on generated clients that differ."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hyperpush.task import Task
from hyperpush.tasks.synthetic import mixture_of_logistic


@jax.custom_jvp
def softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """log(1 + eˣ), with the sigmoid as its derivative: a quarter off the time of an SGP round against JAX's own."""
    return jax.nn.softplus(x)


@softplus.defjvp
def _(primals, tangents):
    return softplus(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


def cross_entropy(params: Float[Array, " d"], batch: tuple[Array, Array]) -> Float[Array, " m"]:
    """The binary cross-entropy of a linear classifier, one per example."""
    inputs, labels = batch
    # Many examples side by side: a quarter of the time. The barrier lets XLA transpose them once, before a loop.
    tall = inputs.shape[0] > inputs.shape[1]
    scores = params @ jax.lax.optimization_barrier(inputs.T) if tall else inputs @ params
    return softplus(scores) - labels * scores


def losses(params, hyper, batch):
    """Cross-entropy, whatever the hypers are."""
    return cross_entropy(params, batch)


def l2(params, hyper):
    """½ Σ_k λ_k θ_k²."""
    return 0.5 * jnp.sum(hyper * params**2)


def log_l2(params, hyper):
    """The same with rates exp(λ_k), which stay positive wherever an outer optimizer takes λ."""
    return l2(params, jnp.exp(hyper))


def logistic(
    clients: int, seed: int, *, examples: int = 100, features: int = 5, rate: float = 0.01, log_rates: bool = False
) -> Task:
    """`examples` training and as many validation examples per client, inputs with a constant 1 appended.

    The classifier starts at zero; every client's L2 rates, one per parameter, at `rate`. The hypers are these rates, or
    with `log_rates` their logarithms.
    """
    generator = np.random.default_rng(seed)
    inputs, labels = mixture_of_logistic(clients, 2 * examples, generator, features=features)
    inputs = np.concatenate([inputs, np.ones((*inputs.shape[:2], 1))], axis=2)
    dtype = jnp.zeros(()).dtype
    arrays = jnp.asarray(inputs, dtype), jnp.asarray(labels, dtype)
    train = tuple(a[:, :examples] for a in arrays)
    validation = tuple(a[:, examples:] for a in arrays)
    return Task(
        inner=losses,
        penalty=log_l2 if log_rates else l2,
        outer=losses,
        params=jnp.zeros(features + 1, dtype),
        hypers=jnp.full(features + 1, np.log(rate) if log_rates else rate, dtype),
        train=train,
        validation=validation,
    )
