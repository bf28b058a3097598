"""Noise mechanisms, and clipping that bounds the influence of one example."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_positive
from hyperpush.base.schedules import Power
from hyperpush.data.batches import Batch

Kind = TypeVar("Kind", bound="_Mechanism")


def _schedule(given: Any) -> Power:
    """Return a schedule; a number becomes a constant one."""
    return given if isinstance(given, Power) else Power(check_positive("scale of the noise", given))


class _Mechanism(eqx.Module):
    draw: ClassVar[Callable[..., Any]]

    scale: Power = eqx.field(converter=_schedule)

    def norm_of_unit(self, size: int) -> float:
        """Return the largest norm, as this mechanism measures it, of `size` numbers with ℓ2 norm 1."""
        return 1.0

    def times(self: Kind, factor: float) -> Kind:
        """Return the mechanism with `factor` times the noise."""
        return type(self)(self.scale.times(factor))

    def noise(self, key: PRNGKeyArray, tree: PyTree, t: Any) -> PyTree:
        """Draw independent noise for every number of `tree`, at round t."""
        leaves, structure = jax.tree.flatten(tree)
        keys, scale = jax.random.split(key, max(len(leaves), 1)), self.scale(t)
        drawn = [
            (scale * type(self).draw(k, leaf.shape, leaf.dtype)).astype(leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=False)
        ]
        return structure.unflatten(drawn)


class Laplace(_Mechanism):
    """Laplace noise of scale ν: a change of ℓ1 norm Δ costs ε = Δ/ν.

    Its density is exp(−|x|/ν)/2ν, with ν = scale(t) in round t. Source: Dwork, McSherry, Nissim and Smith,
    "Calibrating noise to sensitivity in private data analysis", TCC 2006. **Use it** for pure ε and few numbers.
    **Avoid it** for long vectors: their ℓ1 norm is up to √dim times the ℓ2 norm that clipping bounds.

    Args:
        scale: ν, above 0: a number, or `hp.schedule("power", scale, exponent)` by round. In `task.private` it is in
            units of the largest change by one example: a release then costs 1/ν. A new number does not compile anew.

    Raises:
        InvalidInput: The scale is not above 0.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.privacy.Laplace(hp.schedule("power", 2.0, 0.5)).scale(3))
        1.0
    """

    draw: ClassVar[Callable[..., Any]] = staticmethod(jax.random.laplace)

    def norm_of_unit(self, size: int) -> float:
        return math.sqrt(size)


class Gaussian(_Mechanism):
    """Normal noise of deviation σ: a change of ℓ2 norm Δ is as easy to detect as N(Δ/σ, 1) against N(0, 1).

    The deviation is σ = scale(t) in round t. Source: Dong, Roth and Su, "Gaussian differential privacy",
    arXiv:1905.02383. **Use it** for long vectors and many rounds. **Avoid it** where δ = 0 is required, which needs
    Laplace noise.

    Args:
        scale: σ, above 0: a number, or `hp.schedule("power", scale, exponent)` by round. In `task.private` it is in
            units of the largest change by one example. A new number does not compile anew.

    Raises:
        InvalidInput: The scale is not above 0.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> drawn = hp.privacy.Gaussian(3.0).noise(jax.random.key(0), jnp.zeros(10_000), t=0)
        >>> print(drawn.std().round(1))
        3.0
    """

    draw: ClassVar[Callable[..., Any]] = staticmethod(jax.random.normal)


Mechanism = Laplace | Gaussian


def project(tree: PyTree, radius: float | Float[Array, ""]) -> PyTree:
    """Return the nearest tree of ℓ2 norm at most `radius`, or zero if the norm is not finite.

    The projection does not expand: ‖project(a) − project(b)‖ ≤ ‖a − b‖ for finite a and b.

    Args:
        tree: Any pytree of arrays, taken as one vector.
        radius: Largest norm, above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> print(hp.privacy.project(jnp.array([3.0, 4.0]), 1.0))
        [0.6 0.8]
    """
    norm = optax.tree.norm(tree)
    factor = jnp.minimum(1, radius / jnp.where(norm > 0, norm, 1))
    # An example whose numbers overflow must not have more influence than any other.
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(norm), factor * leaf, 0).astype(leaf.dtype), tree)


def clipped_mean(
    function: Callable[[Any], PyTree],
    examples: PyTree,
    bound: float | Float[Array, ""],
    mask: Float[Array, " b"] | None = None,
) -> PyTree:
    """Return the mean over examples of `function(example)`, each scaled to an ℓ2 norm of at most `bound`.

    Replacing one of N examples changes the mean by at most 2·bound/N for any function (Abadi et al.,
    arXiv:1607.00133).

    Args:
        function: Function of one example, without the axis of examples.
        examples: Pytree of examples, on axis 0.
        bound: C, above 0.
        mask: 1 for each example that counts, 0 for padding; None counts all.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> print(hp.privacy.clipped_mean(lambda x: x, jnp.array([0.5, 100.0]), bound=1.0))
        0.75
    """
    if isinstance(bound, int | float):
        check_positive("bound", bound)
    return mean_of(jax.vmap(lambda example: project(function(example), bound))(examples), mask)


def mean_of(each: PyTree, mask: Float[Array, " b"] | None = None) -> PyTree:
    """Return the mean over axis 0 of rows with mask 1; other rows, even NaN, have no effect."""
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
    """Turn a function of batches into a function of one row; return it with the batch's rows and their mask.

    A mask of None means that all rows count.
    """
    padded = isinstance(batch, Batch)

    def one(row: PyTree) -> PyTree:
        single = jax.tree.map(lambda leaf: leaf[None], row)
        return function(Batch(single, jnp.ones(1)) if padded else single)

    return (one, batch.examples, batch.mask) if padded else (one, batch, None)
