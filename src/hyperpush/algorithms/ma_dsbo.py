"""MA-DSBO: a product with the inverse Hessian by gradient tracking, and a moving average of hypergradients."""

from typing import ClassVar

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.product_tracking import ProductState, ProductTracking
from hyperpush.base.numbers import as_number
from hyperpush.base.schedules import Rate, step_size_at
from hyperpush.data.batches import minibatch
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context
from hyperpush.task.problem import Problem


class MADSBO(ProductTracking):
    """Moving-average decentralized stochastic bilevel optimization, which sends only vectors.

    Clients share the hypers x and the params y. Client i has the outer cost f_i, the inner cost g_i, H_i = ∂²_yy g_i
    and J_i = ∂²_xy g_i. W holds doubly stochastic gossip weights. Gradient tracking with the tracker d finds
    z ≈ H̄⁻¹ ∂_y f̄, and r is a moving average of hypergradients (Chen, Huang, Ma and Balasubramanian, arXiv:2210.12839).
    An iteration is, with numbers of repetitions on the left,

        inner_steps ×    y ← Wy − β ∂_y g_i(x, y)
        product_steps ×  z⁺ = Wz − γd,  d⁺ = Wd + s_i(z⁺) − s_i(z),  s_i(z) = H_i z − ∂_y f_i
        then             r ← (1 − θ)r + θ(∂_x f_i − J_i z),  x ← Wx − αr

    d starts from the client's own s_i(z) in every iteration; z continues from its last value.

    **Use it** with `tracked=True` on undirected networks, for clients with different costs that share hypers: it ends
    at the minimizer of the mean outer cost. **Avoid it** on directed networks, and with constant step sizes without
    `tracked`, which leave an error of their order if clients' costs differ.

    Departures from the paper:

    1. `tracked` is not in the paper: y and x also follow trackers of their mean gradients, all in the form
       v ← W(v − γd). Trackers are never restarted, so one round of each per iteration suffices.

    Args:
        steps: Iterations. With 0 all values stay as they are.
        outer_step_size: α, above 0; a number or a schedule by iteration. Start well below β.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        product_step_size: γ, above 0; a number or a schedule by iteration, with the same limit as β.
        inner_steps: Rounds on y per iteration, at least 1.
        product_steps: Rounds on z per iteration, at least 1.
        tracked: True tracks the mean gradients of y and x, too.
        batch_size: Examples per estimate; each draws its own mini-batch. None uses all.
        averaging: θ, above 0; a number or a schedule by iteration. 1 keeps no old direction.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Tracked, it ends at the minimizer of the mean outer cost, x_G.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.MADSBO(400, 0.1, 0.15, 0.2, tracked=True)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="global",
        sends="params, hypers, and two vectors of the size of the params",
        paper="Chen et al., Decentralized stochastic bilevel optimization with improved per-iteration complexity, "
        "arXiv:2210.12839",
        fixed_point="x_G",
        example={
            "steps": 3,
            "outer_step_size": 0.05,
            "inner_step_size": 0.1,
            "product_step_size": 0.1,
            "tracked": True,
        },
    )

    averaging: Rate = eqx.field(converter=as_number, default=0.5)

    def new_share(self, iteration: Int[Array, ""]) -> object:
        return step_size_at(self.averaging, iteration)

    def zero_solution(self, params: PyTree, hyper: PyTree) -> PyTree:
        return optax.tree.zeros_like(params)

    def residual(self, problem: Problem, state: ProductState, ctx: Context) -> PyTree:
        first, second = jax.random.split(ctx.key)
        batch = minibatch(ctx.data.train, self.batch_size, first)
        product = problem.hessian_product(state.params, state.hyper, batch, state.solution)
        along_y, _ = problem.outer_gradients(
            state.params, state.hyper, minibatch(ctx.data.outer, self.batch_size, second)
        )
        return optax.tree.sub(product, along_y)

    def hypergradient(self, problem: Problem, state: ProductState, ctx: Context) -> PyTree:
        first, second = jax.random.split(ctx.key)
        _, along_x = problem.outer_gradients(
            state.params, state.hyper, minibatch(ctx.data.outer, self.batch_size, first)
        )
        batch = minibatch(ctx.data.train, self.batch_size, second)
        product = problem.jacobian_product(state.params, state.hyper, batch, state.solution)
        return optax.tree.sub(along_x, product)
