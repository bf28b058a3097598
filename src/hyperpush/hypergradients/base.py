"""The base class of hypergradient estimators, and their state."""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.base.status import Status
from hyperpush.data.batches import full_batch
from hyperpush.inner.base import InnerSolver
from hyperpush.methods.base import Method
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.programs import Context
from hyperpush.programs.report import Report
from hyperpush.task.problem import Problem

E = TypeVar("E", bound="HypergradientEstimator")


class HypergradientState(eqx.Module):
    """A client's state in an estimate: the point (params, hyper) and the estimate of d_{λ_i} F̄ at that point."""

    params: PyTree
    hyper: PyTree
    value: PyTree
    links: LinkEstimates | None = None  # for estimators that reverse links
    memory: PyTree = None  # state that the estimator keeps for the next outer step
    report: Report | None = None  # convergence report; None if the estimator measures none
    certify: Bool[Array, "*clients"] | None = None  # False skips the checks of singularity and of params; None: True
    start: Float[Array, "*clients"] | None = None  # ‖params before training‖; None: unknown
    outer: Int[Array, "*clients"] | None = None  # outer step; None outside of an algorithm
    size: Float[Array, "*clients"] | None = None  # rms ‖v_i‖ of the first outer step, if that estimate passed; else 0
    terms: Float[Array, "*clients"] | None = None  # sum of the norms of the two terms of v_i; None: not requested


class HypergradientEstimator(Method):
    """The base class of methods that estimate the derivative of the outer cost with respect to the hypers.

    The derivative includes the effect of the hypers on the inner solution. The method's program works on states of type
    `HypergradientState` and sets their `value`. Each client's data are a `Data`.
    """

    sample: ClassVar[str] = "HGP(steps=…, pushes=…, step_size=…)"
    exact: ClassVar[bool] = False  # True if it requires products without noise

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        if self.exact and task.privacy is not None:
            name = type(self).__name__
            raise InvalidInput("method", f"{name} on a private task", f"TrackedHGP or HGP: {name} tolerates no noise")

    def after(self: E, inner: InnerSolver) -> tuple[InnerSolver, E]:
        """Return the inner solver and the estimator with options that suit each other, such as observed links."""
        return inner.observing(False) if inner.option("observe") is None else inner, self

    def memory(self, params: PyTree, hyper: PyTree) -> PyTree:
        """Return a client's memory before the first outer step; None if the estimator keeps none."""
        return None

    def status(self, states: HypergradientState) -> Status:
        return Status() if states.report is None else states.report.status()


def outer_gradients(problem: Problem, state: HypergradientState, ctx: Context) -> tuple[PyTree, PyTree]:
    """Return ∂_x F_i and ∂_λ F_i on all of the client's examples."""
    return problem.outer_gradients(state.params, state.hyper, full_batch(ctx.data.outer))


def outer_gradient_shares(problem: Problem, state: HypergradientState, ctx: Context) -> tuple[PyTree, PyTree]:
    """Return (1/n)∂_x F_i and (1/n)∂_λ F_i, the client's part of the gradients of the mean outer cost."""
    return jax.tree.map(lambda g: g / ctx.clients, outer_gradients(problem, state, ctx))


def subtract_indirect(
    problem: Problem, state: HypergradientState, direct: PyTree, q: PyTree, ctx: Context
) -> HypergradientState:
    """Return the state with the estimate `direct` − B_i q, where B_i = ∂²_λx f_i on all training examples."""
    product = problem.jacobian_product(state.params, state.hyper, full_batch(ctx.data.train), q)
    return replace(state, value=jax.tree.map(jnp.subtract, direct, product))
