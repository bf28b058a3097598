"""Noise on what is sent, and clipping that makes the bound on what one example can change true."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import check_positive
from hyperpush.data.batches import Batch
from hyperpush.optimizers import Power

Norm = Literal["l1", "l2"]


def _schedule(given: Any) -> Power:
    """A schedule; a number stands for a constant one."""
    if isinstance(given, Power):
        return given
    return Power(check_positive("scale of the noise", given))


class _Mechanism(eqx.Module):
    norm: ClassVar[Norm]
    draw: ClassVar[Callable[..., Any]]

    scale: Power = eqx.field(converter=_schedule)

    def noise(self, key: PRNGKeyArray, tree: PyTree, t: Any) -> PyTree:
        """Independent noise for every number of `tree`, at round t."""
        leaves, structure = jax.tree.flatten(tree)
        keys = jax.random.split(key, max(len(leaves), 1))
        scale = self.scale(t)
        drawn = [
            (scale * type(self).draw(k, leaf.shape, leaf.dtype)).astype(leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=False)
        ]
        return structure.unflatten(drawn)


class Laplace(_Mechanism):
    """Noise of density exp(−|x|/ν)/2ν, ν = scale(t): a change of ℓ1 norm Δ costs ε = Δ/ν (Dwork et al. 2006).

    **Use it** for pure ε and few numbers. **Avoid it** for long vectors: their ℓ1 norm grows like √dim.

    Args:
        scale: ν, above 0: a number, or `hp.schedule("power", scale, exponent)` by round. Numbers are traced.
    """

    norm: ClassVar[Norm] = "l1"
    draw: ClassVar[Callable[..., Any]] = staticmethod(jax.random.laplace)


class Gaussian(_Mechanism):
    """Normal noise of deviation σ = scale(t): a change of ℓ2 norm Δ is as easy to see as N(Δ/σ, 1) against N(0, 1).

    **Use it** for long vectors and many rounds (Dong, Roth and Su, arXiv:1905.02383). **Avoid it** where δ = 0 is
    required: it has no pure ε.

    Args:
        scale: σ, above 0: a number, or `hp.schedule("power", scale, exponent)` by round. Numbers are traced.
    """

    norm: ClassVar[Norm] = "l2"
    draw: ClassVar[Callable[..., Any]] = staticmethod(jax.random.normal)


Mechanism = Laplace | Gaussian


def project(tree: PyTree, radius: float | Float[Array, ""]) -> PyTree:
    """The nearest tree of ℓ2 norm at most `radius`; zero for one whose norm is not finite.

    It does not expand: ‖project(a) − project(b)‖ ≤ ‖a − b‖ for finite a and b.
    """
    norm = optax.tree.norm(tree)
    factor = jnp.minimum(1, radius / jnp.where(norm > 0, norm, 1))
    # An example that overflows must not be able to send more than any other.
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(norm), factor * leaf, 0).astype(leaf.dtype), tree)


def clipped_mean(
    function: Callable[[Any], PyTree],
    examples: PyTree,
    bound: float | Float[Array, ""],
    mask: Float[Array, " b"] | None = None,
) -> PyTree:
    """The mean over examples of `function(example)`, each scaled to an ℓ2 norm of at most `bound`.

    Replacing one of N examples changes it by at most 2·bound/N, whatever the function. `examples` have their axis
    first; `function` gets one without it. Only those with mask 1 count.
    """
    if isinstance(bound, int | float):
        check_positive("bound", bound)
    return mean_of(jax.vmap(lambda example: project(function(example), bound))(examples), mask)


def mean_of(each: PyTree, mask: Float[Array, " b"] | None = None) -> PyTree:
    """The mean over axis 0, of those with mask 1; what the others hold, NaN included, does not matter."""
    if mask is None:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)
    count = jnp.maximum(jnp.sum(mask), 1)

    def mean(leaf: Array) -> Array:
        real = jnp.where(mask.reshape(-1, *(1,) * (leaf.ndim - 1)) > 0, leaf, 0)
        return (jnp.sum(real, axis=0) / count).astype(leaf.dtype)

    return jax.tree.map(mean, each)


def one_by_one(
    function: Callable[[Any], PyTree], batch: PyTree
) -> tuple[Callable[[Any], PyTree], PyTree, Float[Array, " b"] | None]:
    """A function of batches as one of single rows; this batch's rows, and a mask of those that are real (None: all)."""
    padded = isinstance(batch, Batch)

    def one(row: PyTree) -> PyTree:
        single = jax.tree.map(lambda leaf: leaf[None], row)
        return function(Batch(single, jnp.ones(1)) if padded else single)

    return (one, batch.examples, batch.mask) if padded else (one, batch, None)
