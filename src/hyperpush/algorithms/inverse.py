"""Ways to apply the inverse of the inner Hessian, and the hypergradient of one's own that they give."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.checks import check_boolean, check_integer, check_positive
from hyperpush.data.batches import Data, draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.local_implicit import own_hypergradient
from hyperpush.method import Number, as_number
from hyperpush.problem import Problem


class ConjugateGradients(eqx.Module):
    """H⁻¹b by at most `steps` of conjugate gradients, on all examples.

    Args:
        steps: At least 1. As many as params are exact but for rounding; √(condition number of H) suffice for a good
            answer.
    """

    steps: int = eqx.field(static=True, default=20)

    def __check_init__(self):
        check_integer("ConjugateGradients.steps", self.steps, minimum=1)


class Neumann(eqx.Module):
    """H⁻¹b ≈ η Σ_{m < terms} (I − ηH)^m b.

    With `random` one term stands for all of them: terms·η Π_{m ≤ p} (I − ηH_m) b, p uniform from 0 to terms − 1. Its
    mean is the same (Ghadimi and Wang, arXiv:1802.02246). Every factor takes a batch of its own, so that mini-batches
    add no bias.

    Args:
        terms: Terms of the series, at least 1.
        step_size: η, above 0 and below 2/λ_max(H).
        random: Take one random term instead of all.
    """

    terms: int = eqx.field(static=True)
    step_size: Number = eqx.field(converter=as_number)
    random: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        check_integer("Neumann.terms", self.terms, minimum=1)
        check_positive("Neumann.step_size", self.step_size)
        check_boolean("Neumann.random", self.random)

    def total(self, last: PyTree, everything: PyTree) -> PyTree:
        """The estimate of H^{-1}b from the last term reached and the sum of all of them."""
        if self.random:
            return jax.tree.map(lambda term: self.terms * self.step_size * term, last)
        return jax.tree.map(lambda term: self.step_size * term, everything)

    def solve(self, product: Callable[[PyTree, PRNGKeyArray], PyTree], right: PyTree, key: PRNGKeyArray) -> PyTree:
        """H^{-1}b for b = `right`, where `product(vector, key)` is H·vector on a batch drawn with the key."""
        length, key = jax.random.split(key)
        last = jax.random.randint(length, (), 0, self.terms)

        def multiply(m, held):
            term, added = held
            after = jax.tree.map(lambda t, h: t - self.step_size * h, term, product(term, jax.random.fold_in(key, m)))
            if self.random:
                after = jax.tree.map(lambda new, old: jnp.where(m < last, new, old), after, term)
            return after, jax.tree.map(jnp.add, added, after)

        return self.total(*jax.lax.fori_loop(0, self.terms - 1, multiply, (right, right)))


Inverse = ConjugateGradients | Neumann
_Any = TypeVar("_Any")


def check_estimates(name: str, inverse: Any, batch_size: Any) -> None:
    """Refuse a batch size that makes no sense, or one that the inverse cannot use."""
    if not isinstance(inverse, Inverse):
        raise InvalidInput(f"{name}.inverse", inverse, "ConjugateGradients(…) or Neumann(…)")
    if batch_size is not None:
        check_integer(f"{name}.batch_size", batch_size, minimum=1)
        if isinstance(inverse, ConjugateGradients):
            allowed = "None, or inverse=Neumann(terms, step_size): the inverse of a batch's Hessian is biased"
            raise InvalidInput(f"{name}.batch_size", batch_size, allowed)


def expected(inverse: Inverse) -> Inverse:
    """The inverse without chance: all terms of the series instead of one."""
    return Neumann(inverse.terms, inverse.step_size, random=False) if isinstance(inverse, Neumann) else inverse


def own_estimate(
    problem: Problem,
    inverse: Inverse,
    params: PyTree,
    hyper: PyTree,
    data: Data,
    batch_size: int | None,
    key: PRNGKeyArray,
) -> PyTree:
    """h_i = ∂_λF_i − B_i H_i^{-1} ∂_xF_i of one client at any point; each derivative takes a batch of its own."""
    if isinstance(inverse, ConjugateGradients):
        batches = everything(data.train), everything(data.outer)
        return own_hypergradient(problem, params, hyper, *batches, inverse.steps)
    outer, cross, inside = jax.random.split(key, 3)
    along_x, along_hyper = problem.outer_gradients(params, hyper, draw(data.outer, batch_size, outer))

    def product(vector: PyTree, key: PRNGKeyArray) -> PyTree:
        return problem.hessian_product(params, hyper, draw(data.train, batch_size, key), vector)

    q = inverse.solve(product, along_x, inside)
    back = problem.jacobian_product(params, hyper, draw(data.train, batch_size, cross), q)
    return jax.tree.map(jnp.subtract, along_hyper, back)


def own_slopes(
    problem: Problem,
    inverse: Inverse,
    params: PyTree,
    hyper: PyTree,
    data: Data,
    batch_size: int | None,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree]:
    """Independent estimates of h_i and of ∂_x f_i; the same key gives the same batches at another point."""
    above, below = jax.random.split(key)
    hypergradient = own_estimate(problem, inverse, params, hyper, data, batch_size, above)
    return hypergradient, problem.inner_gradient(params, hyper, draw(data.train, batch_size, below))


def down(point: _Any, slope: PyTree, step_size: object) -> _Any:
    """point − step_size·slope, in the point's types."""
    return jax.tree.map(lambda p, s: (p - step_size * s).astype(p.dtype), point, slope)
