"""Logistic regression with an L2 rate per feature, smooth everywhere, so that constants for privacy exist.

    f(w, λ) = mean_j ℓ(w; a_j, y_j) + Σ_k r(λ_k) φ(w_k),    F(w) = mean of ℓ on validation examples
    r(λ) = T σ(λ − log T),    φ(w) = B² log cosh(w/B)

r(λ) is nearly exp(λ) while that is far below T = `TOP`; φ(w) is nearly ½w² while |w| is far below B = `BEND`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from hyperpush.privacy.sensitivity import Constants
from hyperpush.task.task import Task
from hyperpush.tasks.logistic import losses

Examples = tuple[ArrayLike, ArrayLike]  # inputs and labels
TOP = 0.2
BEND = 10.0
# Largest slopes of σ, of its derivative, and of tanh'; the last two occur at tanh² = 1/3.
SIGMOID, SIGMOID_BEND, SECH = 1 / 4, 1 / (6 * math.sqrt(3)), 4 / (3 * math.sqrt(3))


def rates(hyper: Float[Array, " d"]) -> Float[Array, " d"]:
    """Return the L2 rates r(λ)."""
    return TOP * jax.nn.sigmoid(hyper - math.log(TOP))


def penalty(params, hyper):
    """Return the penalty Σ_k r(λ_k) φ(w_k)."""
    scaled = jnp.abs(params) / BEND
    log_cosh = scaled + jnp.log1p(jnp.exp(-2 * scaled)) - math.log(2)
    return BEND**2 * jnp.sum(rates(hyper) * log_cosh)


def constants(clip: float, radius: float) -> Constants:
    """Return constants for inputs of ℓ2 norm at most 1; `clip` bounds gradients and `radius` bounds z."""
    return Constants(
        C_y=clip,
        C_b=clip,
        C_x=0.0,
        R=radius,
        C_H=SIGMOID + TOP,
        C_J=TOP * SIGMOID * BEND,
        L_H=SIGMOID_BEND + TOP * (SECH / BEND + SIGMOID),
        L_J=TOP * (SIGMOID + SIGMOID_BEND * BEND),
        L_b=SIGMOID,
        L_fx=0.0,
    )


def l2_rates(
    train: tuple[ArrayLike, ArrayLike],
    validation: tuple[ArrayLike, ArrayLike],
    rate: float = 1e-3,
    common: bool = False,
) -> Task:
    """Make a task from your data: logistic regression with an L2 rate per feature as hypers.

        f_i(w, λ) = mean_j ℓ(w; a_j, y_j) + Σ_k r(λ_k) φ(w_k),    F_i(w) = mean of ℓ on validation examples

    Rate r ≤ 0.2 and penalty φ are smooth everywhere (see the module), so that a private run has valid `constants`.

    Args:
        train: Inputs [clients, examples, features], of ℓ2 norm at most 1 for private runs; and labels 0 or 1.
        validation: Inputs and labels for the outer cost, in the same form.
        rate: Approximate start of all rates, above 0 and far below 0.2. The classifiers start at zero.
        common: True: all clients have one common rate per feature.

    Example:
        >>> import numpy as np
        >>> from hyperpush_papers.tune.rates import l2_rates
        >>> part = np.eye(3)[None].repeat(2, 0), np.array([[0, 1, 1]] * 2)
        >>> l2_rates(part, part)
        Task(2 clients, 3 params each; train 3, validation 3 examples; the outer level fits 'validation')
    """
    dtype = jnp.zeros(()).dtype
    own, held = (tuple(jnp.asarray(part, dtype) for part in each) for each in (train, validation))
    features = own[0].shape[-1]
    return Task(
        inner=losses,
        penalty=penalty,
        outer=losses,
        params=jnp.zeros(features, dtype),
        hypers=jnp.full(features, math.log(rate), dtype),
        train=own,
        validation=held,
        common=common,
    )


def sparse_examples(
    clients: int, examples: int, features: int, relevant: int, seed: int
) -> tuple[Float[np.ndarray, "clients m d"], Float[np.ndarray, "clients m"]]:
    """Draw normal inputs a and labels y ~ Bernoulli(σ(3 aᵀθ/√relevant)) that depend on the first `relevant` features.

    Each client scales its inputs by its own factors from ½ to 2.
    """
    generator = np.random.default_rng(seed)
    scales = 2.0 ** generator.uniform(-1, 1, (clients, 1, features))
    inputs = generator.normal(size=(clients, examples, features)) * scales
    signs = generator.choice([-1.0, 1.0], relevant)
    scores = 3 * inputs[..., :relevant] @ signs / math.sqrt(relevant)
    labels = generator.random((clients, examples)) < 1 / (1 + np.exp(-scores))
    return inputs, labels.astype(float)
