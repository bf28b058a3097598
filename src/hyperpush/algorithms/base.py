"""The common interface of bilevel algorithms, which move params and hypers together.

If clients have different costs and must agree on the hypers x, algorithms end at different points (mathematics.md):

- x_G minimizes the mean outer cost at the common inner solution.
- At x_L the mean of the clients' own hypergradients is zero, each at the client's own inner solution.
- At x_M the mean of the clients' hypergradients is zero, each with the client's own Hessian at the common inner
  solution.
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
        terms: Sum of the norms of the two terms of `first`; 0 if the estimator does not report it.
        error: Largest estimated relative error of `first`; below 0 if unknown.
        first_params: Params at which `first` was estimated; None if the estimator judged them itself.
        last_point: Params and hyper at which `last` was estimated; None unless the estimator claims an error without a
            random probe.
    """

    first: PyTree
    last: PyTree
    terms: Float[Array, "*clients"]
    error: Float[Array, "*clients"]
    first_params: PyTree = None
    last_point: tuple[PyTree, PyTree] | None = None


class BilevelState(eqx.Module):
    """Start and end state of a client: its params (inner) and its hyper (outer).

    Args:
        params: x_i.
        hyper: λ_i.
        links: Link estimates of the client; None if no estimator needs them.
        best_step: Outer step from which params and hyper are, with early stopping; None without.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.extend.BilevelState(params=jnp.zeros(3), hyper=jnp.zeros(())).hyper.shape
        ()
    """

    params: PyTree
    hyper: PyTree
    links: LinkEstimates | None = None  # for estimators that reverse links
    best_step: Int[Array, "*clients"] | None = None  # outer step of params and hyper, with early stopping
    report: Report | None = None  # report of the inner solves and estimates so far
    size: Float[Array, "*clients"] | None = None  # ‖v_i‖ at the first outer step
    judge: Bool[Array, "*clients"] | None = None  # True or None: judge params during the run
    ends: Ends | None = None  # the first and the last hypergradient of nested loops
    solved: Report | None = None  # report of the last inner solve of nested loops; empty if the solver reports nothing


class _HasSteps:
    """Declare the type of `steps`; as a field of a module it would become every algorithm's first argument."""

    steps: int


class Algorithm(Method, _HasSteps):
    """A bilevel algorithm, which moves params and hypers together.

    The algorithm's program works on states of type `BilevelState`, and its outermost loop is called `LOOP`. The states
    inside that loop have the fields `params` and `hyper`. Each client's data are a `Data`.

    Example:
        >>> import hyperpush as hp
        >>> isinstance(hp.algorithms.MDBO.example(), hp.extend.Algorithm)
        True
    """

    nested: ClassVar[bool] = False  # True: solves the inner problem before each hypergradient
    sample: ClassVar[str] = "MDBO(steps=…, outer_step_size=…, inner_step_size=…)"

    @property
    def loop(self) -> str:
        """Name of the outermost loop."""
        return LOOP

    @property
    def hides(self) -> bool:
        """True if the algorithm adds noise to its messages; then no other message may depend on the data."""
        return False

    def iterate(self, iteration: Node, enter: Callable[[BilevelState, Context], Any], *before: Node) -> Node:
        """Return a program that runs `before` once and `iteration` `steps` times, on the states that `enter` makes.

        These states need the fields `params` and `hyper`.
        """
        loop = Repeat(iteration, self.steps, name=LOOP)
        return Scope(
            Sequence(*before, loop) if before else loop,
            enter,
            leave=lambda start, state, ctx: replace(start, params=state.params, hyper=state.hyper),
        )


class TwoLevelDescent(Algorithm):
    """The base class of algorithms that descend on both levels, with one step size per level."""

    steps: Whole = eqx.field(static=True)
    outer_step_size: Rate = eqx.field(converter=as_number)
    inner_step_size: Rate = eqx.field(converter=as_number)

    def rates(self, step: Int[Array, ""]) -> tuple[Any, Any]:
        """Return the outer and the inner step size at a step."""
        return step_size_at(self.outer_step_size, step), step_size_at(self.inner_step_size, step)


def descend(point: T, gradient: PyTree, step_size: object) -> T:
    """Return point − step_size·gradient, in the types of `point`."""
    return jax.tree.map(lambda p, g: (p - step_size * g).astype(p.dtype), point, gradient)


def move_towards(point: T, goal: PyTree, share: object) -> T:
    """Return point + share·(goal − point), in the types of `point`."""
    return jax.tree.map(lambda p, g: (p + share * (g - p)).astype(p.dtype), point, goal)


def track(mean: T, new: PyTree, old: PyTree) -> T:
    """Return the tracked mean gradient `mean` after the client's own gradient changed from `old` to `new`."""
    return jax.tree.map(lambda m, new, old: m + new - old, mean, new, old)
