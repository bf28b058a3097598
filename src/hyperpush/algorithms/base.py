"""Bilevel algorithms that move params and hypers together, behind one interface.

With outer consensus and unlike clients they end at different points (mathematics.md): x_G, the minimizer of the mean
outer cost at the common inner solution; x_L, where the mean of the clients' own hypergradients at their own inner
solutions is zero; x_M, the same with each client's own Hessian at the common inner solution.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Whole
from hyperpush.base.schedules import Rate, step_size_at
from hyperpush.methods.base import Method
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.programs import Context, Node, Repeat, Scope, Sequence
from hyperpush.programs.report import Report

LOOP = "iterations"  # the name of every algorithm's outermost loop
T = TypeVar("T")


class Ends(eqx.Module):
    """Hypergradients of a client at the first and the last outer step.

    Args:
        first: v_i of the first step.
        last: v_i of the last step.
        terms: Size of the two terms of the first; 0 where the estimator does not tell.
        error: Largest estimated relative error of the first; below 0 where it is not known.
    """

    first: PyTree
    last: PyTree
    terms: Float[Array, "*clients"]
    error: Float[Array, "*clients"]


class BilevelState(eqx.Module):
    """What a client starts from and ends with: its params (inner) and its hyper (outer).

    Args:
        params: x_i.
        hyper: λ_i.
        links: What the client knows of its links; None if no estimator asks.
        best_step: With early stopping, the step that params and hyper belong to.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.extend.BilevelState(params=jnp.zeros(3), hyper=jnp.zeros(())).hyper.shape
        ()
    """

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None  # what the client knows of its links, for estimators that reverse them
    best_step: Int[Array, "*clients"] | None = None  # with early stopping, the step that params and hyper belong to
    report: Report | None = None  # of the inner solves and estimates so far
    size: Float[Array, "*clients"] | None = None  # ‖v_i‖ at the first outer step
    judge: Bool[Array, "*clients"] | None = None  # True or None: judge params on the way
    ends: Ends | None = None  # the first and the last hypergradient of nested loops


class _HasSteps:
    """A plain class: in a module this would be a field, and so the first argument of every algorithm."""

    steps: int


class Algorithm(Method, _HasSteps):
    """A bilevel algorithm: it moves params and hypers together.

    Its program works on `BilevelState` states, and its loop is called `LOOP`. The states inside that loop have the
    fields `params` and `hyper`. Clients' data are `Data`.

    Example:
        >>> import hyperpush as hp
        >>> isinstance(hp.algorithms.MDBO.example(), hp.extend.Algorithm)
        True
    """

    nested: ClassVar[bool] = False  # True: it solves the inner problem before it estimates a hypergradient
    sample: ClassVar[str] = "MDBO(steps=…, outer_step_size=…, inner_step_size=…)"

    @property
    def loop(self) -> str:
        """The name of its main loop."""
        return LOOP

    @property
    def hides(self) -> bool:
        """Whether it adds noise to messages itself, so that nothing else may be sent of the data."""
        return False

    def iterate(self, iteration: Node, enter: Callable[[BilevelState, Context], Any], *before: Node) -> Node:
        """`before`, then `steps` times `iteration`, on states with `params` and `hyper` that `enter` makes."""
        loop = Repeat(iteration, self.steps, name=LOOP)
        return Scope(
            Sequence(*before, loop) if before else loop,
            enter,
            leave=lambda start, state, ctx: replace(start, params=state.params, hyper=state.hyper),
        )


class TwoLevelDescent(Algorithm):
    """An algorithm that descends on both levels, with a step size for each."""

    steps: Whole = eqx.field(static=True)
    outer_step_size: Rate = eqx.field(converter=as_number)
    inner_step_size: Rate = eqx.field(converter=as_number)

    def rates(self, step: Int[Array, ""]) -> tuple[Any, Any]:
        """The outer and the inner step size at a step."""
        return step_size_at(self.outer_step_size, step), step_size_at(self.inner_step_size, step)


def descend(point: T, gradient: PyTree, step_size: object) -> T:
    """point − step_size·gradient, in the point's types."""
    return jax.tree.map(lambda p, g: (p - step_size * g).astype(p.dtype), point, gradient)


def move_towards(point: T, goal: PyTree, share: object) -> T:
    """point + share·(goal − point), in the point's types."""
    return jax.tree.map(lambda p, g: (p + share * (g - p)).astype(p.dtype), point, goal)


def track(mean: T, new: PyTree, old: PyTree) -> T:
    """The estimate of the clients' mean gradient after the own one changed from `old` to `new`."""
    return jax.tree.map(lambda m, new, old: m + new - old, mean, new, old)
