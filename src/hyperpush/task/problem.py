"""One client's inner and outer cost, with the gradients and products that methods use."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.base.checks import check_nonnegative
from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import Batch, BatchCost, open_batch, weight_of
from hyperpush.programs import Node
from hyperpush.programs.counting import mark, without_marks

Cost = Callable[[PyTree, PyTree, PyTree], Float[Array, "..."]]  # (params, hyper, batch) -> losses, or one scalar
Penalty = Callable[[PyTree, PyTree], Float[Array, ""]]  # (params, hyper) -> a scalar
Bounds = tuple[Any, Any]  # numbers, which may be traced


class ModelLoss(eqx.Module):
    """A cost in two parts, `loss(model(params, hyper, batch), batch)`, which Gauss–Newton products need."""

    model: Callable[[PyTree, PyTree, PyTree], PyTree]
    loss: Callable[[PyTree, PyTree], Float[Array, "..."]]

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, "..."]:
        return self.loss(self.model(params, hyper, batch), batch)


class JointCost(eqx.Module):
    """An outer cost of all clients together, such as a cost on their graph.

    Each client sends one vector, `represent(params, hyper)`. `own`, if given, is a separate outer cost of each client;
    its mean over clients is added.
    """

    represent: Callable[[PyTree, PyTree], Float[Array, " d"]] = eqx.field(kw_only=True)
    own: Cost | None = eqx.field(kw_only=True, default=None)

    def __call__(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        """Raise `InvalidInput`, because no client can compute a joint cost alone."""
        raise InvalidInput("task.outer", f"{type(self).__name__}, a cost of all clients", "a cost of each client's own")


class L2(eqx.Module):
    """The penalty ½·rate·‖params‖², plus the penalty `beside` unless it is None."""

    rate: Any
    beside: Penalty | None = None

    def __call__(self, params: PyTree, hyper: PyTree) -> Float[Array, ""]:
        numbers = eqx.filter(params, eqx.is_inexact_array)  # a module has other leaves, too
        own = 0.5 * self.rate * jnp.asarray(optax.tree.norm(numbers, squared=True))
        return own if self.beside is None else own + self.beside(params, hyper)


class Problem(eqx.Module):
    """One client's costs in a bilevel problem, with the gradients and products that methods use.

    All clients k together minimize Σ_k F_k(x*, λ_k) over their hypers λ_k, where x* = argmin_x Σ_k f_k(x, λ_k) are the
    params. f is the mean of the `inner` losses plus the `penalty`. F is the mean of the `outer` losses plus the
    `outer_penalty`. Methods reach data only through the gradients and products below. If `private` is True, gradients
    and products are clipped and get noise.

    Args:
        inner: One client's inner cost of (params, hyper, batch): one loss per example, or a scalar.
        outer: One client's outer cost, in the same form.
        penalty: A scalar function of (params, hyper), which is added to f; None: no penalty.
        outer_penalty: A scalar function of (params, hyper), which is added to F; None: no penalty.
        fixed: Leaves of params that are not arrays of numbers, restored before user functions run.
        by_example: True for each leaf of the hypers with one number per training example.
        outer_on: The data set that the outer level fits, for counting accesses.
        reads: A digest of the costs' code and of the values that they read. It prevents reuse of compiled code after
            globals change.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> problem = hp.tasks.quadratic(3, seed=0).problem  # a task's `problem` is what a method gets
        >>> square = hp.extend.Problem(lambda x, h, a: h * (x - a) ** 2, lambda x, h, a: (x - a) ** 2)
        >>> float(square.inner_gradient(jnp.array(3.0), jnp.array(0.5), jnp.array([1.0])))  # 2h(x − a)
        2.0
    """

    private: ClassVar[bool] = False

    inner: Cost
    outer: Cost
    penalty: Penalty | None = None
    outer_penalty: Penalty | None = None
    fixed: PyTree = None  # leaves of params that are not arrays of numbers, such as a model's activation functions
    by_example: tuple[bool, ...] = eqx.field(static=True, default=())  # leaves of the hypers with a row per example
    outer_on: str = eqx.field(static=True, default="validation")
    reads: str = eqx.field(static=True, default="")  # a digest of the globals and closures that the costs read

    # ------------------------------------------------------------------ costs

    def inner_cost(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        """Return the inner cost f on a batch: the mean loss, times the client's weight, plus the penalty."""
        return self._cost(self.inner, self.penalty, params, hyper, batch, weighted=True)

    def outer_cost(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        """Return the outer cost F on a batch: the mean loss, times the client's weight, plus the penalty."""
        return self._cost(self.outer, self.outer_penalty, params, hyper, batch, weighted=True)

    def measure(self, metric: Cost, params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
        """Return a metric's mean over the examples of a batch."""
        return self._cost(metric, None, params, hyper, batch)

    def watch(
        self, metric: Cost, params: PyTree, hyper: PyTree, batch: PyTree, on: str, bounds: Bounds | None = None
    ) -> Float[Array, ""]:
        """Return a metric's mean over a batch of the data set `on`, for choices such as early stopping.

        Each value is clipped to `bounds`, unless they are None.
        """
        return mark("metrics", self._cost(metric, None, params, hyper, batch, bounds), on)

    def _losses(self, cost: Cost, params: PyTree, hyper: PyTree, batch: PyTree) -> Any:
        # The result of a user's function is checked elsewhere.
        examples, mask, _ = open_batch(batch)
        if isinstance(cost, BatchCost):
            size = jax.tree.leaves(examples)[0].shape[0]
            examples = Batch(examples, jnp.ones(size) if mask is None else mask)
        return cost(self.whole(params), self._hyper_of(hyper, batch), examples)

    def _hyper_of(self, hyper: PyTree, batch: PyTree) -> PyTree:
        """Return the hypers for a batch; of leaves with a number per example, only the numbers of its examples."""
        number = open_batch(batch)[2]
        if number is None or not any(self.by_example):
            return hyper
        leaves, structure = jax.tree.flatten(hyper)
        # The barrier keeps XLA from moving the look-up into every use of it.
        picked = [
            jax.lax.optimization_barrier(leaf[number]) if by_example else leaf
            for leaf, by_example in zip(leaves, self.by_example, strict=True)
        ]
        return structure.unflatten(picked)

    def _cost(
        self,
        cost: Cost,
        penalty: Penalty | None,
        params: PyTree,
        hyper: PyTree,
        batch: PyTree,
        bounds: Bounds | None = None,
        weighted: bool = False,
    ) -> Float[Array, ""]:
        losses = self._losses(cost, params, hyper, batch)
        values = _mean(losses if bounds is None else jnp.clip(losses, *bounds), batch)
        if weighted and (weight := weight_of(batch)) is not None:
            values = weight * values
        if not jnp.issubdtype(values.dtype, jnp.floating):  # a metric may return whole numbers
            values = values.astype(jnp.zeros(()).dtype)
        return values if penalty is None else values + penalty(self.whole(params), hyper)

    def whole(self, params: PyTree) -> PyTree:
        """Return params in the form that user functions take."""
        return params if self.fixed is None else eqx.combine(params, self.fixed)

    def protect(self, program: Node) -> Node:
        """Return a program of this problem for engines: unchanged, or with noise if the problem is private."""
        return program

    # -------------------------------------------------- gradients and products

    def inner_gradient(self, params: PyTree, hyper: PyTree, batch: PyTree) -> PyTree:
        """Return the inner gradient ∂_x f."""
        gradient = jax.grad(self.inner_cost)(params, hyper, batch)
        return mark("gradients", gradient, "train", derivative="hessian_products")

    def expansion(
        self, params: PyTree, hyper: PyTree, batch: PyTree
    ) -> tuple[Float[Array, ""], PyTree, Float[Array, "d d"]]:
        """Return (f, ∂_x f, ∂²_xx f), where the Hessian is a matrix over the flattened params."""
        x, back = ravel_pytree(params)

        def along(direction: Float[Array, " d"]) -> tuple[Float[Array, ""], Float[Array, " d"], Float[Array, " d"]]:
            cost, gradient, product = self.along(params, hyper, batch, back(direction))
            return cost, ravel_pytree(gradient)[0], ravel_pytree(product)[0]

        with without_marks():
            # Values that do not depend on the direction are computed once.
            axes = (None, None, 0)
            cost, gradient, hessian = jax.vmap(along, out_axes=axes)(jnp.eye(x.size, dtype=x.dtype))
        columns = jax.vmap(lambda column: mark("hessian_products", column, "train"))(hessian)
        return cost, back(mark("gradients", gradient, "train")), columns

    def along(
        self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree
    ) -> tuple[Float[Array, ""], PyTree, PyTree]:
        """Return (f, ∂_x f, ∂²_xx f · vector), computed in one pass."""
        both = jax.value_and_grad(self.inner_cost)
        (cost, gradient), (_, product) = jax.jvp(lambda x: both(x, hyper, batch), (params,), (vector,))
        return cost, mark("gradients", gradient, "train"), mark("hessian_products", product, "train")

    def outer_gradients(self, params: PyTree, hyper: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return the outer gradients (∂_x F, ∂_λ F)."""
        return mark("gradients", jax.grad(self.outer_cost, argnums=(0, 1))(params, hyper, batch), self.outer_on)

    def products(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> tuple[PyTree, PyTree]:
        """Return (∂²_xx f · vector, ∂²_λx f · vector), computed in one forward-over-reverse pass."""
        along_x, along_hyper = self._product((0, 1), params, hyper, batch, vector)
        return mark("hessian_products", along_x, "train"), mark("jacobian_products", along_hyper, "train")

    def hessian_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """Return the product ∂²_xx f · vector with the Hessian."""
        return mark("hessian_products", self._product(0, params, hyper, batch, vector), "train")

    def jacobian_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """Return the product ∂²_λx f · vector with the mixed derivative."""
        return mark("jacobian_products", self._product(1, params, hyper, batch, vector), "train")

    def bounding_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """Return ∂²_xx f · vector; on a private task, its product with a bound on ∂²_xx f that uses no data."""
        return self.hessian_product(params, hyper, batch, vector)

    def gauss_newton(self, params: PyTree, hyper: PyTree, batch: PyTree) -> Callable[[PyTree], PyTree]:
        """Return the function v ↦ R'ᵀ ℓ'' R' v of Gauss–Newton products, for a cost given as (model, loss).

        R is the model and ℓ the loss. The function is linearized once for many v, and adds the Hessian of penalties.
        R'ᵀ ℓ'' R' is the Hessian without the model's own second derivatives. So a loss that is convex in the model's
        output gives no negative eigenvalue.
        """
        if not isinstance(self.inner, ModelLoss):
            raise InvalidInput("task.inner", "a cost in one part", "(model, loss): Gauss–Newton needs both parts")
        model, loss, penalty = self.inner.model, self.inner.loss, self.penalty
        examples, own = open_batch(batch)[0], self._hyper_of(hyper, batch)
        outputs, push = jax.linearize(lambda x: model(self.whole(x), own, examples), params)
        pull = jax.linear_transpose(push, params)
        weight = weight_of(batch)
        factor = 1 if weight is None else weight
        slope = jax.grad(lambda outputs: factor * _mean(loss(outputs, examples), batch))

        def product(vector: PyTree) -> PyTree:
            total = pull(jax.jvp(slope, (outputs,), (push(vector),))[1])[0]
            if penalty is not None:
                along = jax.grad(lambda x, penalty=penalty: penalty(self.whole(x), hyper))
                total = jax.tree.map(jnp.add, total, jax.jvp(along, (params,), (vector,))[1])
            return mark("hessian_products", total, "train")

        return product

    def with_l2(self, rate: float) -> "Problem":
        """Return the same problem with ½·rate·‖params‖² added to every inner cost."""
        return replace(self, penalty=L2(check_nonnegative("l2", rate), self.penalty))

    def _product(
        self, by: int | tuple[int, int], params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree
    ) -> PyTree:
        gradients = jax.grad(self.inner_cost, argnums=by)
        return jax.jvp(lambda x: gradients(x, hyper, batch), (params,), (vector,))[1]


def _mean(values: Float[Array, "..."], batch: PyTree) -> Float[Array, ""]:
    """Return the mean of losses over the real examples of a batch; a scalar is returned unchanged."""
    if not jnp.ndim(values):
        return jnp.asarray(values)
    return batch.mean(values) if isinstance(batch, Batch) else jnp.mean(values)
