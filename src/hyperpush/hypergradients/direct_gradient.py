"""The gradient of the own outer cost by the own hypers, with fixed params."""

from typing import Any, ClassVar

from hyperpush.data.batches import everything
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.method import MethodInfo
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node


class DirectGradient(HypergradientEstimator):
    """∂_λ F_i alone: how the own hypers change the own outer cost while the params stay as they are.

    The baseline "PDBO (local)" of "Cooperative personalized bilevel optimization over random directed networks".

    **Use it** as the baseline that ignores the inner problem. **Avoid it** where the outer cost does not contain the
    hypers: it is zero there.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="none",
        target="direct",
        sends="nothing",
        paper="Cooperative personalized bilevel optimization over random directed networks",
        lossy=True,
    )

    def check_task(self, task: Any) -> None:
        super().check_task(task)
        if not {"outer", "outer_penalty"} & set(task.uses_hypers):
            allowed = "an outer cost or penalty that contains the hypers: else the direct gradient is zero"
            raise InvalidInput("task.outer", "a cost without hypers, for DirectGradient", allowed)

    def program(self, problem: Problem) -> Node:
        def estimate(state: HypergradientState, ctx: Context):
            _, along_hyper = problem.outer_gradients(state.params, state.hyper, everything(ctx.data.outer))
            return HypergradientState(state.params, state.hyper, along_hyper, state.links)

        return Local(estimate)
