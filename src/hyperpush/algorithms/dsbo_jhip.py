"""DSBO-JHIP: clients compute the product of Jacobian and inverse Hessian together, as a matrix."""

from dataclasses import replace
from typing import ClassVar

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from hyperpush.algorithms.ma_dsbo import MADSBO
from hyperpush.algorithms.matrices import flat_outer_gradients, second_derivatives
from hyperpush.algorithms.product_tracking import ProductState, ProductTracking
from hyperpush.data.batches import minibatch
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context
from hyperpush.task.problem import Problem


class DSBOJHIP(ProductTracking):
    """Decentralized bilevel optimization by a Jacobian–Hessian-inverse product, computed as a matrix.

    Clients share the hypers x and the params y. Client i has the outer cost f_i, the inner cost g_i, H_i = ∂²_yy g_i
    and J_i = ∂²_xy g_i. W holds doubly stochastic gossip weights. Gradient tracking with the tracker D finds
    Z ≈ J̄ H̄⁻¹ (Chen, Huang and Ma, arXiv:2206.05670). An iteration is, with numbers of repetitions on the left,

        inner_steps ×    y ← Wy − β ∂_y g_i(x, y)
        product_steps ×  Z⁺ = WZ − γD,  D⁺ = WD + G_i(Z⁺) − G_i(Z),  G_i(Z) = Z H_i − J_i
        then             x ← Wx − α(∂_x f_i − Z ∂_y f_i)

    D starts from the client's own G_i(Z) in every iteration; Z continues from its last value.

    **Use it** on small models. **Avoid it** on larger ones: it sends matrices of params × hypers, while `MADSBO` ends
    at the same point with vectors. If clients' costs differ, constant step sizes leave an error of their order, which
    `tracked` removes.

    Departures from the paper:

    1. `tracked` is not in the paper: y and x also follow trackers of their mean gradients, all in the form
       v ← W(v − γd). Trackers are never restarted, so one round of each per iteration suffices.

    Args:
        steps: Iterations. With 0 all values stay as they are.
        outer_step_size: α, above 0; a number or a schedule by iteration. Start well below β.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        product_step_size: γ, above 0; a number or a schedule by iteration, with the same limit as β.
        inner_steps: Rounds on y per iteration, at least 1.
        product_steps: Rounds on Z per iteration, at least 1.
        tracked: True tracks the mean gradients of y and x, too.
        batch_size: Examples per estimate; each draws its own mini-batch. None uses all.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Tracked, it ends at the minimizer of the mean outer cost, x_G.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.DSBOJHIP(400, 0.1, 0.15, 0.2, tracked=True)
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = replace(
        MADSBO.info,
        target="client",
        sends="params, hypers, and twice a matrix of params × hypers",
        paper="Chen, Huang and Ma, Decentralized bilevel optimization, arXiv:2206.05670",
        note="own outer cost at the common inner solution; common hypers follow the mean of all clients",
        matrices=True,
    )

    def zero_solution(self, params: PyTree, hyper: PyTree) -> Float[Array, "h d"]:
        flat = ravel_pytree(params)[0]
        return jnp.zeros((ravel_pytree(hyper)[0].size, flat.size), flat.dtype)

    def residual(self, problem: Problem, state: ProductState, ctx: Context) -> Float[Array, "h d"]:
        batch = minibatch(ctx.data.train, self.batch_size, ctx.key)
        hessian, jacobian = second_derivatives(problem, state.params, state.hyper, batch)
        return state.solution @ hessian - jacobian

    def hypergradient(self, problem: Problem, state: ProductState, ctx: Context) -> PyTree:
        batch = minibatch(ctx.data.outer, self.batch_size, ctx.key)
        along_y, along_x = flat_outer_gradients(problem, state.params, state.hyper, batch)
        return ravel_pytree(state.hyper)[1](along_x - state.solution @ along_y)
