"""The problem of a private task, whose gradients and products are means over clipped examples with noise."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float, PyTree, UInt32

from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import OptionalPositive, Positive
from hyperpush.privacy import ASSUMPTION
from hyperpush.privacy.mechanisms import Mechanism, clipped_mean, one_by_one
from hyperpush.privacy.noise_at_releases import Noising
from hyperpush.privacy.release import DataSet, access_data, release_tree
from hyperpush.privacy.traces import calling_line
from hyperpush.programs import Node
from hyperpush.programs.counting import Kind, mark, without_marks
from hyperpush.task.problem import Bounds, Cost, Penalty, Problem


class Noise(Configured):
    """Noise and bounds of a client's releases; `hp.Task.private` makes it, and explains its options.

    A release is a mean of parts of N examples, each of norm at most C, plus noise. The noise has the scale σΔ, where σ
    is the scale of `mechanism`. Δ is the largest change of the mean by one example: 2C/N, or √dim·2C/N in the ℓ1 norm
    for Laplace noise. So a release costs 1/σ, for any C, N and dimension.
    """

    assumes: ClassVar[str] = ASSUMPTION

    mechanism: Mechanism
    clip: Positive = eqx.field(converter=as_number)
    curvature: OptionalPositive = eqx.field(converter=as_number, default=None)
    coupling: OptionalPositive = eqx.field(converter=as_number, default=None)
    hypers: Literal["shared", "per example"] = eqx.field(static=True, default="shared")

    @classmethod
    def label(cls) -> str:
        return "task.private"

    def times(self, factor: float) -> "Noise":
        """Return the same bounds with `factor` times the noise."""
        return replace(self, mechanism=self.mechanism.times(factor))


class PrivateProblem(Problem):
    """A problem in which each gradient or product is one release: a mean of clipped examples, which gets noise.

    Every example's part is scaled to a norm of at most `noise.clip` for gradients, `noise.curvature`·‖v‖ for Hessian
    products and `noise.coupling`·‖v‖ for Jacobian products. (∂_x F, ∂_λ F) of `outer_gradients` are clipped as one
    vector. Penalties do not depend on examples, so they are added afterwards, neither clipped nor noised. `protect`
    adds the noise to a program of this problem; a program without noise does not run.

    The costs themselves can be called. If their values reach a client's state or messages, the check of the program's
    trace raises `InvalidInput`.
    """

    private: ClassVar[bool] = True

    noise: Noise = eqx.field(kw_only=True)
    run: UInt32[Array, ""] | None = eqx.field(kw_only=True, default=None)

    @classmethod
    def of(cls, problem: Problem, noise: Noise, spent: int = 0) -> "PrivateProblem":
        """Return a problem with these bounds and this noise, after `spent` releases in earlier runs on these data."""
        if problem.private:
            raise InvalidInput("task.private", "a private task", "a task that is not private yet")
        names = [each.name for each in dataclasses.fields(Problem)]
        run = jnp.uint32(spent % 2**32) if spent else None
        return cls(**{name: getattr(problem, name) for name in names}, noise=noise, run=run)

    @property
    def examples(self) -> Problem:
        """The costs of single examples: without penalties, and without noise."""
        return Problem(self.inner, self.outer, None, None, self.fixed, self.by_example, self.outer_on)

    def protect(self, program: Node) -> Node:
        return Noising(self.noise.mechanism, self._hypers_are_own, self.run).add_everywhere(program)

    @property
    def _hypers_are_own(self) -> bool:
        return self.noise.hypers == "per example"

    def inner_gradient(self, params: PyTree, hyper: PyTree, batch: PyTree) -> PyTree:
        """Return a release of the inner gradient ∂_x f."""
        part = partial(_of_rows, self.examples.inner_gradient)
        released = self._release("gradients", "train", part, (params, hyper), batch, self.noise.clip)
        return self._plus(released, self.penalty, lambda penalty: jax.grad(penalty)(params, hyper))

    def outer_gradients(self, params: PyTree, hyper: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return (∂_x F, ∂_λ F) as one release, of ∂_x F alone if F does not use the hypers."""
        direct = _uses_hyper(self.examples.outer_cost, params, hyper, batch)
        if direct and self._hypers_are_own:
            allowed = "'shared': the outer cost uses the hypers"
            raise InvalidInput("task.private.hypers", self.noise.hypers, allowed)

        def gradients(at: tuple[PyTree, PyTree], rows: PyTree) -> tuple[PyTree, ...]:
            both = self.examples.outer_gradients(*at, rows)
            return both if direct else both[:1]

        released = self._release("gradients", self.outer_on, gradients, (params, hyper), batch, self.noise.clip)
        both = released if direct else (released[0], jax.tree.map(jnp.zeros_like, hyper))
        return self._plus(both, self.outer_penalty, lambda penalty: jax.grad(penalty, argnums=(0, 1))(params, hyper))

    def watch(
        self, metric: Cost, params: PyTree, hyper: PyTree, batch: PyTree, on: str, bounds: Bounds | None = None
    ) -> Float[Array, ""]:
        """Return a release of a metric's mean over N examples, with values clipped to `bounds` (low, high).

        One example changes the mean by at most (high − low) / N.
        """
        if bounds is None:
            return super().watch(metric, params, hyper, batch, on)  # refused by the check of flows
        middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2

        def value(at: tuple[PyTree, PyTree], rows: PyTree) -> Float[Array, ""]:
            return self.examples.measure(metric, *at, rows) - middle  # a norm of at most `half` is within the bounds

        if self._hypers_are_own and _uses_hyper(partial(self.examples.measure, metric), params, hyper, batch):
            given, allowed = "a metric that uses hypers of single examples", "a metric of (params, batch) alone"
            raise InvalidInput("stop.metric", given, f"{allowed}, or task.private(…, hypers='shared')")
        return self._release("metrics", on, value, (params, hyper), batch, half) + middle

    def products(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> tuple[PyTree, PyTree]:
        """Return (∂²_xx f · vector, ∂²_λx f · vector) as two releases with separate bounds."""
        at = params, hyper, batch, vector
        return self.hessian_product(*at), self.jacobian_product(*at)

    def hessian_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """Return a release of the product ∂²_xx f · vector with the Hessian."""
        return self._bent(self.examples.hessian_product, params, hyper, batch, vector)

    def bounding_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """Return `noise.curvature` · vector plus the product with the penalty's Hessian, which use no data."""
        part = jax.tree.map(lambda leaf: self._bound("curvature") * leaf, vector)
        return self._plus(part, self.penalty, lambda penalty: _product(penalty, 0, params, hyper, vector))

    def gauss_newton(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Callable[[PyTree], PyTree]:
        """Return the function v ↦ R'ᵀ ℓ'' R' v, whose every call is a release with the bound of Hessian products."""

        def product(params: PyTree, hyper: PyTree, rows: PyTree, vector: PyTree) -> PyTree:
            return self.examples.gauss_newton(params, hyper, rows)(vector)

        return lambda vector: self._bent(product, params, hyper, batch, vector)

    def along(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> NoReturn:
        """Raise `InvalidInput`, because no release covers a cost together with its derivatives."""
        raise InvalidInput(
            f"task.private: {calling_line()}",
            "a cost with its first and second derivative",
            "gradients and products one by one: HGP or TrackedHGP instead of Dense, SGP instead of TreeNewton",
        )

    def jacobian_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """Return a release of ∂²_λx f · vector, which gets no noise if all hypers belong to single examples."""
        part = partial(_of_rows, self.examples.jacobian_product)
        bound = 0.0 if self._hypers_are_own else self._bound("coupling") * optax.tree.norm(vector)
        released = self._release("jacobian_products", "train", part, (params, hyper, vector), batch, bound)
        return self._plus(released, self.penalty, lambda penalty: _product(penalty, 1, params, hyper, vector))

    def _bent(
        self, product: Callable[..., PyTree], params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree
    ) -> PyTree:
        """Return a release of a product with the examples' Hessian, plus the product with the penalty's Hessian."""
        bound = self._bound("curvature") * optax.tree.norm(vector)
        part = partial(_of_rows, product)
        released = self._release("hessian_products", "train", part, (params, hyper, vector), batch, bound)
        return self._plus(released, self.penalty, lambda penalty: _product(penalty, 0, params, hyper, vector))

    def _bound(self, name: str) -> Number:
        bound = getattr(self.noise, name)
        if bound is None:
            allowed = "a number: this method takes products, which must be clipped"
            raise InvalidInput(f"task.private.{name}", None, allowed)
        return bound

    def _release(
        self,
        kind: Kind,
        on: DataSet,
        function: Callable[[Any, PyTree], PyTree],
        public: tuple[PyTree, ...],
        batch: PyTree,
        bound: Any,
    ) -> PyTree:
        first = len(jax.tree.leaves(public[0]))
        own = range(first, first + len(jax.tree.leaves(public[1]))) if self._hypers_are_own else ()
        at, rows = access_data(public, batch, own)
        kept = self._hypers_are_own and kind == "jacobian_products"
        if kept:  # each number belongs to one example: it is neither clipped nor sent
            with without_marks():
                mean, change = function(at, rows), 0.0
        else:
            mean, change = bounded_mean(lambda row: function(at, row), rows, bound)
        return release_tree(mark(kind, mean, on), change, kind=kind, on=on, kept=kept)

    def _plus(self, released: PyTree, penalty: Penalty | None, derivative: Callable[[Penalty], PyTree]) -> PyTree:
        """Add the penalty's derivative, which does not depend on data, to a release."""
        if penalty is None:
            return released
        part = derivative(lambda params, hyper: penalty(self.whole(params), hyper))
        return jax.tree.map(lambda r, p: (r + p).astype(r.dtype), released, part)


def _of_rows(access: Callable[..., PyTree], at: tuple[PyTree, ...], rows: PyTree) -> PyTree:
    """Return `access(params, hyper, rows, …)` at a point (params, hyper, …)."""
    return access(*at[:2], rows, *at[2:])


def _product(penalty: Penalty, by: int, params: PyTree, hyper: PyTree, vector: PyTree) -> PyTree:
    return jax.jvp(lambda x: jax.grad(penalty, argnums=by)(x, hyper), (params,), (vector,))[1]


def _uses_hyper(cost: Callable[..., Array], params: PyTree, hyper: PyTree, batch: PyTree) -> bool:
    """Return True if the result of a cost or metric depends on the hypers, according to its trace."""
    jaxpr = jax.make_jaxpr(cost)(params, hyper, batch).jaxpr
    _, used = dce_jaxpr(jaxpr, [True])
    first = len(jax.tree.leaves(params))
    return any(used[first : first + len(jax.tree.leaves(hyper))])


def bounded_mean(function: Callable[[PyTree], PyTree], batch: PyTree, bound: Number) -> tuple[PyTree, Number]:
    """Return the mean of `function` over a batch's rows, each clipped to `bound`, and its largest change by one row."""
    one, rows, mask = one_by_one(function, batch)
    with without_marks():  # all rows together are one access
        mean = clipped_mean(one, rows, bound, mask)
    count = jax.tree.leaves(rows)[0].shape[0] if mask is None else jnp.maximum(jnp.sum(mask), 1)
    return mean, 2 * bound / count
