"""One client's inner and outer cost."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.counting import marked
from hyperpush.data.batches import Data, Ragged, everything
from hyperpush.errors import InvalidInput
from hyperpush.processes import visible

Cost = Callable[[PyTree, PyTree, PyTree], Float[Array, ""]]


class Problem(eqx.Module):
    """min over every client's hyper λ_i of Σ_s F_s(x*, λ_s), where x* = argmin_x Σ_k f_k(x, λ_k).

    `inner(params, hyper, batch)` is f and `outer(params, hyper, batch)` is F, each for one client: pure functions of
    any pytrees that return a scalar.
    """

    inner: Cost = eqx.field(static=True)
    outer: Cost = eqx.field(static=True)

    def with_l2(self, rate: float) -> "Problem":
        """The same problem with ½·rate·‖params‖² added to every inner cost."""
        if rate < 0:
            raise InvalidInput("l2", rate, "0 or more")

        def inner(params, hyper, batch):
            return self.inner(params, hyper, batch) + 0.5 * rate * optax.tree.norm(params, squared=True)

        return Problem(inner, self.outer)

    def inner_gradient(self, params: PyTree, hyper: PyTree, batch: PyTree) -> PyTree:
        """∂_x f."""
        return marked("gradients", jax.grad(self.inner)(params, hyper, batch), derivative="hessian_products")

    def outer_gradients(self, params: PyTree, hyper: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """(∂_x F, ∂_λ F)."""
        return marked("gradients", jax.grad(self.outer, argnums=(0, 1))(params, hyper, batch))

    def products(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> tuple[PyTree, PyTree]:
        """(∂²_xx f · vector, ∂²_λx f · vector) in one forward-over-reverse pass."""
        along_x, along_hyper = self._product((0, 1), params, hyper, batch, vector)
        return marked("hessian_products", along_x), marked("jacobian_products", along_hyper)

    def hessian_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """∂²_xx f · vector."""
        return marked("hessian_products", self._product(0, params, hyper, batch, vector))

    def jacobian_product(self, params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree) -> PyTree:
        """∂²_λx f · vector."""
        return marked("jacobian_products", self._product(1, params, hyper, batch, vector))

    def _product(
        self, by: int | tuple[int, int], params: PyTree, hyper: PyTree, batch: PyTree, vector: PyTree
    ) -> PyTree:
        gradients = jax.grad(self.inner, argnums=by)
        return jax.jvp(lambda x: gradients(x, hyper, batch), (params,), (vector,))[1]


def check(problem: Problem, params: PyTree, hypers: PyTree, data: Data, clients: int) -> None:
    """Refuse arguments that cannot work, naming the one at fault."""
    parts = (("params", params), ("hypers", hypers), ("inner_data", data.inner), ("outer_data", data.outer))
    for name, tree in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            field, array, shape = f"{name}{jax.tree_util.keystr(path)}", visible(leaf), jnp.shape(leaf)
            if not shape or shape[0] != clients:
                raise InvalidInput(field, shape, f"{clients} clients on axis 0")
            if name in ("params", "hypers") and not jnp.issubdtype(array.dtype, jnp.floating):
                raise InvalidInput(field, f"numbers of type {array.dtype}", "real floating-point numbers")
            if jnp.issubdtype(array.dtype, jnp.inexact) and not np.all(np.isfinite(array)):
                bad = np.unique(np.nonzero(~np.isfinite(array))[0])[:5].tolist()
                raise InvalidInput(field, f"NaN or infinity at clients {bad}", "finite numbers")
        if isinstance(tree, Ragged) and np.any(visible(tree.counts) < 1):
            empty = np.nonzero(visible(tree.counts) < 1)[0][:5].tolist()
            raise InvalidInput(name, f"no examples at clients {empty}", "at least 1 example per client")
        if name.endswith("data") and any(leaf.shape[1:2] == (0,) for leaf in jax.tree.leaves(tree)):
            raise InvalidInput(name, "0 examples per client", "at least 1 example per client")
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], jnp.asarray(leaf).dtype), (params, hypers, data)
    )
    for name, cost, examples in (("inner", problem.inner, one[2].inner), ("outer", problem.outer, one[2].outer)):
        try:
            shape = jax.eval_shape(lambda x, h, d, cost=cost: cost(x, h, everything(d)), one[0], one[1], examples)
        except Exception as error:  # the cost is the user's: whatever it raises, say which one and what
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            hint = (
                " (a Ragged data set gives costs a Batch: .examples, .mask, .mean)"
                if isinstance(examples, Ragged)
                else ""
            )
            raise InvalidInput(
                f"problem.{name}", f"a cost that fails with {said}", f"one that takes one client's shapes{hint}"
            ) from error
        leaves = jax.tree.leaves(shape)
        if len(leaves) != 1 or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
            raise InvalidInput(f"problem.{name}", f"a cost that returns {shape}", "one real scalar")
