"""Bilevel algorithms that move params and hypers together, behind one interface.

With outer consensus and unlike clients they end at different points (mathematics.md): x_G, the minimizer of the mean
outer cost at the common inner solution; x_L, where the mean of the clients' own hypergradients at their own inner
solutions is zero; x_M, the same with each client's own Hessian at the common inner solution.
"""

from typing import TYPE_CHECKING, ClassVar

import equinox as eqx
from jaxtyping import Array, Int, PyTree

from hyperpush.inner.base import LinkEstimates
from hyperpush.method import Method

LOOP = "iterations"  # the name of every algorithm's outermost loop


class BilevelState(eqx.Module):
    """What a client starts from and ends with: its params (inner) and its hyper (outer)."""

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None  # what the client knows of its links, for estimators that reverse them
    best_step: Int[Array, "*clients"] | None = None  # with early stopping, the step that params and hyper belong to


class Algorithm(Method):
    """A bilevel algorithm: it moves params and hypers together.

    Its program works on `BilevelState` states, and its loop is called `LOOP`. The states inside that loop have the
    fields `params` and `hyper`. Clients' data are `Data`.
    """

    if TYPE_CHECKING:  # as a property: a field would be the first argument of every algorithm

        @property
        def steps(self) -> int: ...
    else:
        steps: eqx.AbstractVar[int]

    sample: ClassVar[str] = "MDBO(steps=…, outer_step_size=…, inner_step_size=…)"

    @property
    def loop(self) -> str:
        """The name of its main loop."""
        return LOOP
