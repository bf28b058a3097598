"""Hyper-gradients without cooperation, for comparison."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.recurrent import add
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Within


class DirectGradient(eqx.Module):
    """∂_λ F_i alone: how the own hypers change the own outer cost while the params stay as they are.

    The baseline "PDBO (local)" of "Cooperative personalized bilevel optimization over random directed networks".
    """

    declares: ClassVar[Declaration] = Declaration(
        network="none",
        target="direct: the own outer cost with fixed params",
        sends="nothing",
        matrices=False,
        paper="Cooperative personalized bilevel optimization over random directed networks",
    )

    def program(self, problem: Problem) -> Node:
        def estimate(state: Hyper, ctx: Context):
            _, along_hyper = problem.outer_gradients(state.params, state.hyper, everything(ctx.data.outer))
            return Hyper(state.params, state.hyper, along_hyper, state.links)

        return Local(estimate)


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    direct: PyTree  # ∂_λ F_i
    q: PyTree
    residual: PyTree
    direction: PyTree


class LocalGradient(eqx.Module):
    """d_{λ_i} F_i(x_i*(λ_i), λ_i) of the client's own inner problem, as if there were no others.

    ∂_λ F_i − B_i H_i^{-1} ∂_x F_i with the client's own Hessian, by `iterations` steps of conjugate gradients
    (H_i + `damping`·I must be positive definite).
    """

    declares: ClassVar[Declaration] = Declaration(
        network="none",
        target="local: the own outer cost through the own inner problem",
        sends="nothing",
        matrices=False,
        paper="Pedregosa, Hyperparameter optimization with approximate gradient",
    )

    iterations: int = eqx.field(static=True, default=100)
    damping: float = eqx.field(static=True, converter=float, default=0.0)

    def __check_init__(self):
        whole("LocalGradient.iterations", self.iterations, least=1)
        if self.damping < 0:
            raise InvalidInput("LocalGradient.damping", self.damping, "0 or more")

    def program(self, problem: Problem) -> Node:
        def enter(state: Hyper, ctx: Context):
            right, direct = problem.outer_gradients(state.params, state.hyper, everything(ctx.data.outer))
            return _State(state.params, state.hyper, direct, jax.tree.map(jnp.zeros_like, right), right, right)

        def improve(state: _State, ctx: Context):
            product = problem.hessian_product(state.params, state.hyper, everything(ctx.data.inner), state.direction)
            product = add(product, state.direction, self.damping)
            size = optax.tree.norm(state.residual, squared=True)
            length = _ratio(size, jnp.asarray(optax.tree.vdot(state.direction, product)))
            residual = add(state.residual, product, -length)
            kept = _ratio(optax.tree.norm(residual, squared=True), size)
            q, direction = add(state.q, state.direction, length), add(residual, state.direction, kept)
            return _State(state.params, state.hyper, state.direct, q, residual, direction)

        def leave(before: Hyper, state: _State, ctx: Context):
            product = problem.jacobian_product(before.params, before.hyper, everything(ctx.data.inner), state.q)
            return Hyper(before.params, before.hyper, add(state.direct, product, -1.0), before.links)

        return Within(Repeat(Local(improve), self.iterations, name="LocalGradient"), enter, leave)


def _ratio(a: Float[Array, ""], b: Float[Array, ""]) -> Float[Array, ""]:
    """a/b, and 0 where b is: what is solved stays as it is."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
