"""Hyper-gradients without cooperation, for comparison."""

from typing import ClassVar

import equinox as eqx

from hyperpush.checks import whole
from hyperpush.data.batches import everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.own import own_hypergradient
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node


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
        def estimate(state: Hyper, ctx: Context):
            batches = everything(ctx.data.inner), everything(ctx.data.outer)
            value = own_hypergradient(problem, state.params, state.hyper, *batches, self.iterations, self.damping)
            return Hyper(state.params, state.hyper, value, state.links)

        return Local(estimate)
