"""Gradients of each client's outer cost by its own hypers, at fixed params."""

from dataclasses import replace
from typing import Any, ClassVar

from hyperpush.base.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradients
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node
from hyperpush.task.problem import Problem


class DirectGradient(HypergradientEstimator):
    """The gradient ∂_λ F_i alone: derivative of a client's outer cost by its own hypers, at fixed params.

    It is the baseline "PDBO (local)" of "Cooperative personalized bilevel optimization over random directed networks".

    **Use it** as the baseline that ignores the inner problem. **Avoid it** where the outer cost does not contain the
    hypers: it is zero there, and such a task is refused.

    Raises:
        InvalidInput: The task's outer cost and outer penalty do not contain the hypers.

    Example:
        The outer cost ½‖λ − g‖² + … of these quadratics has the gradient λ − g.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.RandomDirected(5)
        >>> found = hp.hypergradient(task, hp.hypergradients.DirectGradient(), network, key=0)
        >>> bool(jnp.allclose(found.value, task.hypers - task.validation["hyper_target"]))
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="none",
        target="direct",
        sends="nothing",
        paper="Cooperative personalized bilevel optimization over random directed networks",
        lossy=True,
    )

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        if not {"outer", "outer_penalty"} & set(task.uses_hypers):
            allowed = "an outer cost or penalty that contains the hypers: else the direct gradient is zero"
            raise InvalidInput("task.outer", "a cost without hypers, for DirectGradient", allowed)

    def program(self, problem: Problem) -> Node:
        def estimate(state: HypergradientState, ctx: Context) -> HypergradientState:
            return replace(state, value=outer_gradients(problem, state, ctx)[1])

        return Local(estimate)
