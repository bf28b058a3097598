"""Methods that apply the inverse of the inner Hessian, and a client's own hypergradient by these methods."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.algorithms.base import TwoLevelDescent, descend
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import Count, OptionalCount, Positive
from hyperpush.data.batches import full_batch, minibatch
from hyperpush.hypergradients.local_implicit import own_hypergradient
from hyperpush.programs import Context
from hyperpush.task.problem import Problem

Point = tuple[PyTree, PyTree]  # (params, hyper)


class ConjugateGradients(Configured):
    """Apply the inverse of the inner Hessian H by conjugate gradients on all examples (Hestenes and Stiefel 1952).

    **Use it** on full data sets. **Avoid it** with mini-batches, which it refuses: the inverse of a batch's Hessian is
    biased.

    Args:
        steps: Largest number of steps, at least 1. As many steps as params give the exact result up to rounding. About
            √(condition number of H) steps give a good result.

    Raises:
        InvalidInput: `steps` is below 1.

    Example:
        >>> import hyperpush as hp
        >>> hp.algorithms.TTSA.example().inverse == hp.algorithms.ConjugateGradients(steps=20)
        True
    """

    steps: Count = eqx.field(static=True, default=20)


class Neumann(Configured):
    """Apply the inverse of the inner Hessian H by a truncated Neumann series.

        H⁻¹b ≈ η Σ_{m < terms} (I − ηH)^m b

    With `random`, one random term replaces the sum: terms·η Π_{m ≤ p} (I − ηH_m) b, with p uniform from 0 to terms − 1.
    This term has the same mean as the sum (Ghadimi and Wang, arXiv:1802.02246). Every factor draws its own batch, so
    mini-batches add no bias.

    **Use it** with mini-batches. **Avoid it** on all examples, where `ConjugateGradients` needs fewer products.
    Truncation leaves an error of about (1 − ηλ_min)^terms.

    Args:
        terms: Terms of the series, at least 1.
        step_size: η, above 0 and below 2/λ_max(H); 1/λ_max(H) is a safe choice.
        random: True takes one random term instead of all, which is cheaper and noisier.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> few = hp.algorithms.Neumann(terms=5, step_size=0.2)
        >>> hp.algorithms.TTSA(9, 0.1, 0.1, inverse=few, batch_size=2).batch_size
        2
    """

    terms: Count = eqx.field(static=True)
    step_size: Positive = eqx.field(converter=as_number)
    random: bool = eqx.field(static=True, default=True)

    def with_all_terms(self) -> "Neumann":
        """Return the same series with `random=False`."""
        return Neumann(self.terms, self.step_size, random=False)

    def total(self, last: PyTree, added: PyTree) -> PyTree:
        """Return the estimate of H⁻¹b from the last computed term and the sum of all terms."""
        if self.random:
            return optax.tree.scale(self.terms * self.step_size, last)
        return optax.tree.scale(self.step_size, added)

    def solve(self, product: Callable[[PyTree, PRNGKeyArray], PyTree], right: PyTree, key: PRNGKeyArray) -> PyTree:
        """Return H⁻¹b for b = `right`, where `product(vector, key)` is H·vector on a batch drawn with the key."""
        length, key = jax.random.split(key)
        last = jax.random.randint(length, (), 0, self.terms)

        def multiply(m, held):
            term, added = held
            after = descend(term, product(term, jax.random.fold_in(key, m)), self.step_size)
            if self.random:
                after = jax.tree.map(lambda new, old: jnp.where(m < last, new, old), after, term)
            return after, optax.tree.add(added, after)

        return self.total(*jax.lax.fori_loop(0, self.terms - 1, multiply, (right, right)))


Inverse = ConjugateGradients | Neumann


class ImplicitDescent(TwoLevelDescent):
    """The base class of algorithms that descend on both levels and apply the inverse of an inner Hessian."""

    inverse: Inverse = eqx.field(default=ConjugateGradients(), kw_only=True)
    batch_size: OptionalCount = eqx.field(static=True, default=None, kw_only=True)

    def __check_init__(self):
        if self.batch_size is not None and isinstance(self.inverse, ConjugateGradients):
            allowed = "None, or inverse=Neumann(terms, step_size): the inverse of a batch's Hessian is biased"
            raise InvalidInput(f"{type(self).__name__}.batch_size", self.batch_size, allowed)

    def inner_gradient(self, problem: Problem, params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
        """Return ∂_y g_i on a mini-batch."""
        return problem.inner_gradient(params, hyper, minibatch(ctx.data.train, self.batch_size, ctx.key))

    def own_hypergradient(self, problem: Problem, params: PyTree, hyper: PyTree, ctx: Context) -> PyTree:
        """Return h_i = ∂_xF_i − J_i H_i⁻¹ ∂_yF_i of one client; each derivative draws its own batch."""
        data, inverse = ctx.data, self.inverse
        if isinstance(inverse, ConjugateGradients):
            batches = full_batch(data.train), full_batch(data.outer)
            return own_hypergradient(problem, params, hyper, *batches, inverse.steps)
        outer, cross, inside = jax.random.split(ctx.key, 3)
        along_y, along_x = problem.outer_gradients(params, hyper, minibatch(data.outer, self.batch_size, outer))

        def product(vector: PyTree, key: PRNGKeyArray) -> PyTree:
            return problem.hessian_product(params, hyper, minibatch(data.train, self.batch_size, key), vector)

        q = inverse.solve(product, along_y, inside)
        back = problem.jacobian_product(params, hyper, minibatch(data.train, self.batch_size, cross), q)
        return optax.tree.sub(along_x, back)

    def own_gradients(self, problem: Problem, point: Point, ctx: Context) -> tuple[PyTree, PyTree]:
        """Return independent estimates of h_i and ∂_y g_i; the same key gives the same batches at another point."""
        above, below = (replace(ctx, key=key) for key in jax.random.split(ctx.key))
        return self.own_hypergradient(problem, *point, above), self.inner_gradient(problem, *point, below)


def correct(estimate: Callable[[PyTree], PyTree], kept: PyTree, new: PyTree, old: PyTree, forget: Any = 0.0) -> PyTree:
    """Return e(new) + (1 − forget)(kept − e(old)), with the estimates e of both points on the same batch.

    The correction adds only the noise of e(new) − e(old), which vanishes with the distance of the points. STORM
    (Cutkosky and Orabona, arXiv:1905.10018) has a small `forget` above 0. SPIDER (Fang, Li, Lin and Zhang,
    arXiv:1807.01695) has 0 and restarts periodically. `forget` is one number, or one per part of `kept`.
    """
    # vmap over both points computes values that do not depend on the point, such as the batch, once.
    both = jax.vmap(estimate)(jax.tree.map(lambda a, b: jnp.stack([a, b]), new, old))

    def correct_part(share: Any, kept: PyTree, both: PyTree) -> PyTree:
        return jax.tree.map(lambda k, e: (e[0] + (1 - share) * (k - e[1])).astype(k.dtype), kept, both)

    return jax.tree.map(correct_part, forget, kept, both)
