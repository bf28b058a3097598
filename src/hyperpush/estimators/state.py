"""What every hyper-gradient program starts from and ends with."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.data.batches import everything
from hyperpush.errors import InvalidInput
from hyperpush.inner.step import LinkEstimates
from hyperpush.privacy.noise import Noise
from hyperpush.problem import Problem
from hyperpush.program import Context

Aim = Literal["global", "client", "local", "direct"]


@dataclass(frozen=True)
class Declaration:
    """What a user should know before choosing a method; printed by `hyperpush list --methods`."""

    network: str
    target: str
    sends: str
    matrices: bool  # whether it forms or sends Jacobians or Hessians
    paper: str
    needs: Literal["any", "two-way", "undirected"] = "any"  # what its links must be able to do
    fixed_point: Literal["", "x_G", "x_L", "x_M"] = ""  # where a bilevel algorithm with outer consensus ends

    @property
    def aim(self) -> Aim:
        """Whose outer cost it differentiates, through what: the first word of `target`."""
        for aim in get_args(Aim):
            if re.match(rf"{aim}\b", self.target):
                return aim
        raise InvalidInput("declares.target", self.target, "a text whose first word is " + ", ".join(get_args(Aim)))


class Hyper(eqx.Module):
    """A client's side of a hyper-gradient: the point (params, hyper) and the estimate of d_{λ_i} F̄ there."""

    params: PyTree
    hyper: PyTree
    value: PyTree
    links: LinkEstimates | None = None  # what the client knows of its links, for estimators that reverse them
    memory: PyTree = None  # what the estimator wants to find again at the next outer step


def shared_gradients(
    problem: Problem, state: Hyper, ctx: Context, privacy: Noise | None = None
) -> tuple[PyTree, PyTree]:
    """(1/n)∂_x F_i and (1/n)∂_λ F_i: the client's part of the gradients of the mean outer cost.

    With `privacy` they are a client's first release.
    """
    at = state.params, state.hyper, everything(ctx.data.outer)
    gradients = problem.outer_gradients(*at) if privacy is None else privacy.outer_gradients(problem, *at, ctx.key, 0)
    return jax.tree.map(lambda g: g / ctx.clients, gradients)
