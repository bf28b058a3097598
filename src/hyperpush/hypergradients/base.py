"""What every hypergradient estimator starts from and ends with."""

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
    """A client's side of a hypergradient: the point (params, hyper) and the estimate of d_{λ_i} F̄ there."""

    params: PyTree
    hyper: PyTree
    value: PyTree
    links: LinkEstimates | None = None  # what the client knows of its links, for estimators that reverse them
    memory: PyTree = None  # what the estimator wants to find again at the next outer step
    report: Report | None = None  # whether the estimate is to be believed; None: it does not say
    certify: Bool[Array, "*clients"] | None = None  # whether to look for all that may be wrong; None: yes
    start: Float[Array, "*clients"] | None = None  # ‖params before training‖; None: not known
    outer: Int[Array, "*clients"] | None = None  # the outer step; None: there is none
    size: Float[Array, "*clients"] | None = None  # rms ‖v_i‖ of the first outer step if it passed; 0: not yet
    terms: Float[Array, "*clients"] | None = None  # size of the two terms of v_i; None: nobody asks


class HypergradientEstimator(Method):
    """A method for how hypers change the outer cost through the inner problem that depends on them.

    Its program works on `HypergradientState` states and sets `value`. Clients' data are `Data`.
    """

    sample: ClassVar[str] = "HGP(steps=…, pushes=…, step_size=…)"
    trains: ClassVar[bool] = False  # whether it trains itself, from the params that it is given
    exact: ClassVar[bool] = False  # whether it requires products without noise
    judges: ClassVar[bool] = False  # whether its report says how far the params are from solved

    def check_task(self, task: Any) -> None:
        super().check_task(task)
        if self.exact and task.privacy is not None:
            name = type(self).__name__
            raise InvalidInput("method", f"{name} on a private task", f"TrackedHGP or HGP: {name} tolerates no noise")

    def after(self: E, inner: InnerSolver) -> tuple[InnerSolver, E]:
        """The inner solver and the estimator as they run one after the other."""
        return inner.observing(False) if getattr(inner, "observe", None) is None else inner, self

    def memory(self, params: PyTree, hyper: PyTree) -> PyTree:
        """What a client remembers before the first outer step; None: it remembers nothing from step to step."""
        return None

    def status(self, states: HypergradientState) -> Status:
        return Status() if states.report is None else states.report.status()


def outer_gradients(problem: Problem, state: HypergradientState, ctx: Context) -> tuple[PyTree, PyTree]:
    """∂_x F_i and ∂_λ F_i on all of the client's examples."""
    return problem.outer_gradients(state.params, state.hyper, full_batch(ctx.data.outer))


def outer_gradient_shares(problem: Problem, state: HypergradientState, ctx: Context) -> tuple[PyTree, PyTree]:
    """(1/n)∂_x F_i and (1/n)∂_λ F_i: the client's part of the gradients of the mean outer cost."""
    return jax.tree.map(lambda g: g / ctx.clients, outer_gradients(problem, state, ctx))


def subtract_indirect(
    problem: Problem, state: HypergradientState, direct: PyTree, q: PyTree, ctx: Context
) -> HypergradientState:
    """The state with the estimate `direct` − B_i q."""
    product = problem.jacobian_product(state.params, state.hyper, full_batch(ctx.data.train), q)
    return replace(state, value=jax.tree.map(jnp.subtract, direct, product))
