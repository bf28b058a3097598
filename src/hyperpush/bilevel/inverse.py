"""Ways to apply the inverse of the inner Hessian, and the hyper-gradient of one's own that they give."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.checks import positive, whole, yes_or_no
from hyperpush.data.batches import Data, draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.own import own_hypergradient
from hyperpush.problem import Problem


class ConjugateGradients(eqx.Module):
    """H^{-1}b by at most `iterations` of conjugate gradients, on all examples."""

    iterations: int = eqx.field(static=True, default=20)

    def __check_init__(self):
        whole("ConjugateGradients.iterations", self.iterations, least=1)


class Neumann(eqx.Module):
    """H^{-1}b ≈ η Σ_{m < terms} (I − ηH)^m b, with η = `step` below 2/λ_max(H).

    With `random` one term stands for all of them: terms·η Π_{m ≤ p} (I − ηH_m) b, p uniform from 0 to terms − 1, which
    is the same on average (Ghadimi, Wang 2018). Every factor takes a batch of its own, so that mini-batches add no
    bias.
    """

    terms: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)
    random: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        whole("Neumann.terms", self.terms, least=1)
        positive("Neumann.step", self.step)
        yes_or_no("Neumann.random", self.random)

    def total(self, last: PyTree, everything: PyTree) -> PyTree:
        """The estimate of H^{-1}b from the last term reached and the sum of all of them."""
        if self.random:
            return jax.tree.map(lambda term: self.terms * self.step * term, last)
        return jax.tree.map(lambda term: self.step * term, everything)

    def solve(self, product: Callable[[PyTree, PRNGKeyArray], PyTree], right: PyTree, key: PRNGKeyArray) -> PyTree:
        """H^{-1}b for b = `right`, where `product(vector, key)` is H·vector on a batch drawn with the key."""
        length, key = jax.random.split(key)
        last = jax.random.randint(length, (), 0, self.terms)

        def multiply(m, held):
            term, added = held
            after = jax.tree.map(lambda t, h: t - self.step * h, term, product(term, jax.random.fold_in(key, m)))
            if self.random:
                after = jax.tree.map(lambda new, old: jnp.where(m < last, new, old), after, term)
            return after, jax.tree.map(jnp.add, added, after)

        return self.total(*jax.lax.fori_loop(0, self.terms - 1, multiply, (right, right)))


Inverse = ConjugateGradients | Neumann
_Any = TypeVar("_Any")


def check_estimates(name: str, inverse: Inverse, batch: int | None) -> None:
    """Refuse a batch size that makes no sense, or one that the inverse cannot use."""
    if not isinstance(inverse, Inverse):
        raise InvalidInput(f"{name}.inverse", inverse, "ConjugateGradients(…) or Neumann(…)")
    if batch is not None:
        whole(f"{name}.batch", batch, least=1)
        if isinstance(inverse, ConjugateGradients):
            allowed = "None, or inverse=Neumann(terms, step): the inverse of a batch's Hessian is biased"
            raise InvalidInput(f"{name}.batch", batch, allowed)


def expected(inverse: Inverse) -> Inverse:
    """The inverse without chance: all terms of the series instead of one."""
    return Neumann(inverse.terms, inverse.step, random=False) if isinstance(inverse, Neumann) else inverse


def own_estimate(
    problem: Problem,
    inverse: Inverse,
    params: PyTree,
    hyper: PyTree,
    data: Data,
    batch: int | None,
    key: PRNGKeyArray,
) -> PyTree:
    """h_i = ∂_λF_i − B_i H_i^{-1} ∂_xF_i of one client at any point; each derivative takes a batch of its own."""
    if isinstance(inverse, ConjugateGradients):
        batches = everything(data.inner), everything(data.outer)
        return own_hypergradient(problem, params, hyper, *batches, inverse.iterations)
    outer, cross, inside = jax.random.split(key, 3)
    along_x, along_hyper = problem.outer_gradients(params, hyper, draw(data.outer, batch, outer))

    def product(vector: PyTree, key: PRNGKeyArray) -> PyTree:
        return problem.hessian_product(params, hyper, draw(data.inner, batch, key), vector)

    q = inverse.solve(product, along_x, inside)
    back = problem.jacobian_product(params, hyper, draw(data.inner, batch, cross), q)
    return jax.tree.map(jnp.subtract, along_hyper, back)


def own_slopes(
    problem: Problem,
    inverse: Inverse,
    params: PyTree,
    hyper: PyTree,
    data: Data,
    batch: int | None,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree]:
    """Independent estimates of h_i and of ∂_x f_i; the same key gives the same batches at another point."""
    above, below = jax.random.split(key)
    hypergradient = own_estimate(problem, inverse, params, hyper, data, batch, above)
    return hypergradient, problem.inner_gradient(params, hyper, draw(data.inner, batch, below))


def down(point: _Any, slope: PyTree, rate: object) -> _Any:
    """point − rate·slope, in the point's types."""
    return jax.tree.map(lambda p, s: (p - rate * s).astype(p.dtype), point, slope)
