"""Logistic regression whose L2 rates are the hypers, on generated data that differ between clients."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.task.task import Task

COMPONENTS = 3  # number of shared classifiers, which the generated clients mix


@jax.custom_jvp
def softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return log(1 + eˣ), with the sigmoid as its derivative.

    A round of SGP takes ¾ of its time with JAX's softplus.
    """
    return jax.nn.softplus(x)


@softplus.defjvp
def _(primals, tangents):
    return softplus(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


def cross_entropy(params: Float[Array, " d"], batch: tuple[Array, Array]) -> Float[Array, " m"]:
    """Return the binary cross-entropy of a linear classifier, one per example."""
    inputs, labels = batch
    # With many examples, the product takes a quarter of the time if examples are columns. The barrier lets XLA
    # transpose the inputs once, before a loop.
    tall = inputs.shape[0] > inputs.shape[1]
    scores = params @ jax.lax.optimization_barrier(inputs.T) if tall else inputs @ params
    return softplus(scores) - labels * scores


def losses(params, hyper, batch):
    """Return the cross-entropy of each example, which does not depend on the hypers."""
    return cross_entropy(params, batch)


def l2(params, hyper):
    """Return the penalty ½ Σ_k λ_k θ_k² of the params θ, whose rates λ_k are the hypers."""
    return 0.5 * jnp.sum(hyper * params**2)


def log_l2(params, hyper):
    """Return the penalty ½ Σ_k exp(λ_k) θ_k², whose rates are positive for every λ."""
    return l2(params, jnp.exp(hyper))


def logistic(
    clients: int, seed: int, *, examples: int = 100, features: int = 5, rate: float = 0.01, log_rates: bool = False
) -> Task:
    """Make a task of logistic regression with an L2 rate per parameter as hypers, on generated data.

    With the params θ, the rates λ and the cross-entropy ℓ, the inner and outer cost of client i are

        f_i(θ, λ) = mean_j ℓ(θ; a_j, y_j) + ½ Σ_k λ_k θ_k²,    F_i(θ) = mean of ℓ on validation examples

    Client i mixes three shared classifiers θ_c ~ U(−1, 1) with its own proportions π_i ~ Dirichlet(0.4). For each
    example c ~ π_i, a ~ U(−1, 1), y = [a·θ_c + N(0, 0.1²) > 0]. Then a constant 1 is appended to a. After Marfoq,
    Neglia, Bellet, Kameni, Vidal 2021 (appendix I.1.5).

    Args:
        clients: Number of clients, at least 1.
        seed: Seed of the data, 0 or more.
        examples: Number of training examples of each client, and of validation examples.
        features: Number of inputs of an example; the classifier has one parameter more, and starts at zero.
        rate: Start of all L2 rates, above 0.
        log_rates: True if the hypers are logarithms of the rates: every value of them is valid.

    Raises:
        InvalidInput: A number is out of range.

    Example:
        >>> import hyperpush as hp
        >>> hp.tasks.logistic(4, seed=0, examples=20)
        Task(4 clients, 6 params each; train 20, validation 20 examples; the outer level fits 'validation')
    """
    sizes = {"clients": clients, "examples": examples, "features": features}
    for name, given in sizes.items():
        check_integer(name, given, minimum=1)
    check_integer("seed", seed, minimum=0)
    check_positive("rate", rate)
    generator = np.random.default_rng(seed)
    classifiers = generator.uniform(-1, 1, (COMPONENTS, features))
    proportions = generator.dirichlet(np.full(COMPONENTS, 0.4), clients)
    inputs = generator.uniform(-1, 1, (clients, 2 * examples, features))
    component = np.stack([generator.choice(COMPONENTS, 2 * examples, p=own) for own in proportions])
    scores = np.einsum("nmf,nmf->nm", inputs, classifiers[component]) + generator.normal(0, 0.1, inputs.shape[:2])
    inputs, dtype = np.concatenate([inputs, np.ones((*inputs.shape[:2], 1))], axis=2), jnp.zeros(()).dtype
    train, validation = (
        (jnp.asarray(inputs[:, part], dtype), jnp.asarray(scores[:, part] > 0, dtype))
        for part in (slice(examples), slice(examples, None))
    )
    return Task(
        inner=losses,
        penalty=log_l2 if log_rates else l2,
        outer=losses,
        params=jnp.zeros(features + 1, dtype),
        hypers=jnp.full(features + 1, np.log(rate) if log_rates else rate, dtype),
        train=train,
        validation=validation,
    )
