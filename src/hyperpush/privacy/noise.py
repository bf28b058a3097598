"""Privacy as an option: derivatives of clipped examples, with noise that hides any one of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.checks import positive
from hyperpush.errors import InvalidInput
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism, clipped_mean, one_by_one
from hyperpush.problem import Problem


def _bound(field: str) -> Any:
    return eqx.field(static=True, default=None, converter=lambda c: None if c is None else positive(field, c))


class Noise(eqx.Module):
    """What a client lets others know of its data: means over examples, each clipped, and noise.

    A release is the mean of N examples' parts of norm at most C, which one of them changes by at most Δ = 2C/N
    (ℓ1, for Laplace noise: √dim·2C/N), plus noise of scale `mechanism`·Δ. Its cost is 1/`mechanism`, whatever C, N and
    the dimension. The client itself goes on from what it released, so that all that follows is free.

    C is `clip` for gradients (an estimator's ∂_x F and ∂_λ F count as one vector), `curvature`·‖v‖ for products
    ∂²_xx f v and `coupling`·‖v‖ for ∂²_λx f v: everybody can know v, which is made of earlier releases. Costs must be
    means over rows; they are called with one row at a time.

    `hypers="noisy"`: an estimate is a release too, though not sent, so that hypers are made of releases and can differ
    in nothing else. `"per example"`: it is clean. That is right where every hyper belongs to one inner example and
    enters only this example's cost (weights of examples), the outer optimiser moves each by itself, and hypers are
    never sent.
    """

    mechanism: Mechanism
    clip: float = eqx.field(static=True, converter=partial(positive, "Noise.clip"))
    curvature: float | None = _bound("Noise.curvature")
    coupling: float | None = _bound("Noise.coupling")
    hypers: Literal["noisy", "per example"] = eqx.field(static=True, default="noisy")

    def __check_init__(self):
        if not isinstance(self.mechanism, Laplace | Gaussian):
            raise InvalidInput("Noise.mechanism", self.mechanism, "Laplace(…) or Gaussian(…)")
        if self.hypers not in ("noisy", "per example"):
            raise InvalidInput("Noise.hypers", self.hypers, "'noisy' or 'per example'")

    def check_estimator(self, name: str) -> None:
        """Refuse what does not bound all that an estimator takes."""
        needed = ("curvature", "coupling") if self.hypers == "noisy" else ("curvature",)
        for bound in needed:
            if getattr(self, bound) is None:
                raise InvalidInput(f"{name}.privacy.{bound}", None, "a number: products of examples must be clipped")

    def times(self, factor: float) -> "Noise":
        """The same with `factor` times as much noise."""
        return replace(self, mechanism=type(self.mechanism)(self.mechanism.scale.times(factor)))

    def inner_gradient(
        self, problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree, key: PRNGKeyArray, t: Any
    ) -> PyTree:
        """∂_x f, released as number t of the run."""
        return self._release(lambda rows: problem.inner_gradient(params, hyper, rows), batch, self.clip, key, t)

    def outer_gradients(
        self, problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree, key: PRNGKeyArray, t: Any
    ) -> tuple[PyTree, PyTree]:
        """(∂_x F, ∂_λ F), one release; of ∂_x F alone where F does not use the hypers."""
        direct = _uses_hyper(problem, params, hyper, batch)
        if direct and self.hypers == "per example":
            raise InvalidInput("Noise.hypers", self.hypers, "'noisy': the outer cost uses the hypers")

        def gradients(rows: PyTree) -> tuple[PyTree, ...]:
            both = problem.outer_gradients(params, hyper, rows)
            return both if direct else both[:1]

        released = self._release(gradients, batch, self.clip, key, t)
        return released if direct else (released[0], jax.tree.map(jnp.zeros_like, hyper))

    def hessian_product(
        self, problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree, key: PRNGKeyArray, t: Any
    ) -> PyTree:
        """∂²_xx f · vector, released as number t of the run."""
        assert self.curvature is not None
        bound = self.curvature * optax.tree.norm(vector)
        return self._release(lambda rows: problem.hessian_product(params, hyper, rows, vector), batch, bound, key, t)

    def jacobian_product(
        self, problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree, key: PRNGKeyArray, t: Any
    ) -> PyTree:
        """∂²_λx f · vector, released as number t of the run; clean where hypers are."""
        if self.hypers == "per example":
            return problem.jacobian_product(params, hyper, batch, vector)
        assert self.coupling is not None
        bound = self.coupling * optax.tree.norm(vector)
        return self._release(lambda rows: problem.jacobian_product(params, hyper, rows, vector), batch, bound, key, t)

    def _release(
        self,
        function: Callable[[PyTree], PyTree],
        batch: PyTree,
        bound: float | Float[Array, ""],
        key: PRNGKeyArray,
        t: Any,
    ) -> PyTree:
        one, rows, mask = one_by_one(function, batch)
        mean = clipped_mean(one, rows, bound, mask)
        count = jax.tree.leaves(rows)[0].shape[0] if mask is None else jnp.maximum(jnp.sum(mask), 1)
        change = 2 * bound / count
        if self.mechanism.norm == "l1":
            change *= math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(mean)))
        noise = self.mechanism.noise(key, mean, t)
        return jax.tree.map(lambda m, drawn: (m + change * drawn).astype(m.dtype), mean, noise)


def check_noise(field: str, given: Any) -> None:
    """Refuse a `privacy` that is neither None nor `Noise`."""
    if not isinstance(given, Noise | None):
        raise InvalidInput(field, given, "Noise(…) or None")


def _uses_hyper(problem: Problem, params: PyTree, hyper: PyTree, batch: PyTree) -> bool:
    """Whether the outer cost contains the hypers at all, read off its trace."""
    jaxpr = jax.make_jaxpr(problem.outer)(params, hyper, batch).jaxpr
    _, used = dce_jaxpr(jaxpr, [True])
    first = len(jax.tree.leaves(params))
    return any(used[first : first + len(jax.tree.leaves(hyper))])
