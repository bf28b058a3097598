"""Recurrent backpropagation through stochastic gradient push (SGP): common parts of estimators that reverse its links.

SGP's expected step has a fixed point. The derivative of the mean outer cost there, with respect to the clients' hypers,
is B̄(I − Ā)^{-1} c_x + c_λ, where

    gradient-after:  (Ā u)_i = Σ_j p̄_{i→j} u_j − γ/ω_i H_i u_i,        (B̄ u)_i = −γ B_i u_i
    gradient-first:  m_i = Σ_j p̄_{i→j} u_j,  (Ā u)_i = m_i − γ/ω_i H_i m_i,  (B̄ u)_i = −γ B_i m_i

with H_i = ∂²_xx f_i, B_i = ∂²_λx f_i, c_x = (1/n)∂_x F_i/ω_i, c_λ = (1/n)∂_λ F_i, and SGP's step size γ. During SGP,
p̄_{i→j} is the mean weight that i sent to j, δ̄_{j→i} the frequency of messages from j to i, and ω_i the mean push-sum
weight. Messages of the estimate must flow against the links of SGP. So client i weights a message from j by
p̄_{i→j}/δ̄_{j→i}. This weight is p̄_{i→j} on average if the link from j to i is ever up. The target is O(γ) away from
the hypergradient of the exact consensus solution.

On a private task B_i is applied once, to the sum of the vectors of all steps, and the last H_i u is not needed. So
DirectedRB takes `steps` + 1 releases and VRHGP 2·`steps`.

If training mixed params with doubly stochastic weights, p̄ are the means of these weights, and ω = 1.
"""

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import OptionalCount, OptionalPositive, Whole
from hyperpush.data.batches import minibatch
from hyperpush.hypergradients.base import (
    HypergradientEstimator,
    HypergradientState,
    outer_gradient_shares,
    subtract_indirect,
)
from hyperpush.inner.base import InnerSolver
from hyperpush.methods.base import Method
from hyperpush.networks import Network
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope, Sequence
from hyperpush.task.problem import Problem

Variant = Literal["gradient-first", "gradient-after"]


class Backward(eqx.Module):
    """A client's state during the backward pass through SGP."""

    params: PyTree
    hyper: PyTree
    links: LinkEstimates
    source: PyTree  # c_x
    direct: PyTree  # c_λ
    u: PyTree
    value: PyTree  # v; on a private task the vector to which B_i is applied at the end


def _is_close(given: Any, trained: Any) -> bool:
    """Return True if two step sizes are equal up to the float32 rounding of a schedule, or if one is traced."""
    if isinstance(given, Tracer) or isinstance(trained, Tracer):
        return True
    return math.isclose(float(given), float(trained), rel_tol=1e-5)


class Recurrent(HypergradientEstimator):
    """An estimator that differentiates backward through `steps` steps of SGP, all with the final `step_size`."""

    steps: Whole = eqx.field(static=True)
    step_size: OptionalPositive = eqx.field(converter=as_number, default=None)
    variant: Variant | None = eqx.field(static=True, default=None, kw_only=True)
    batch_size: OptionalCount = eqx.field(static=True, default=None, kw_only=True)
    links: Literal["observed", "means"] = eqx.field(static=True, default="observed", kw_only=True)
    weights: Literal["push", "gossip"] | None = eqx.field(static=True, default=None, kw_only=True)

    def after(self, inner: InnerSolver) -> tuple[InnerSolver, "Recurrent"]:
        self._check_iteration(inner.iteration, type(inner).__name__)
        return inner.observing(self.links == "observed"), self._after(inner.iteration)

    def bind(self, network: Network, engine: Any = None, task: Any = None) -> "Recurrent":
        point = None if task is None else task.point
        known = self
        if point is not None and point.network == network:
            if "step_size" in point.iteration:  # an SGP; other solvers lack a step to differentiate
                self._check_iteration(point.iteration, "the solver that trained the task")
            known = self._after(point.iteration)
        if known.step_size is None:
            allowed = "a number above 0: neither the task nor the algorithm tells the step size of an SGP that trained"
            raise InvalidInput(f"{type(self).__name__}.step_size", None, allowed)
        return replace(known, weights=known.weights or "push", variant=known.variant or "gradient-first")

    def _check_iteration(self, trained: Mapping[str, Any], solver: str) -> None:
        """Refuse a step size, variant or weights that differ from the end of the differentiated training."""
        for name, own in trained.items():
            given = getattr(self, name)
            if None in (given, own) or given == own or (name == "step_size" and _is_close(given, own)):
                continue
            at_the_end = " at its last step" if name == "step_size" else ""
            allowed = f"None, or {own!r}: {solver} trains with it{at_the_end}, and that is differentiated"
            raise InvalidInput(f"{type(self).__name__}.{name}", given, allowed)

    def _after(self, trained: Mapping[str, Any]) -> "Recurrent":
        """Return the estimator with options that are None taken from the training."""
        return replace(self, **{name: value for name, value in trained.items() if getattr(self, name) is None})

    @abc.abstractmethod
    def step(self, problem: Problem, last: bool = False) -> Node:
        """Return one backward step, on states that `begin` returns; the `last` step need not update u."""

    def begin(self, back: Backward) -> PyTree:
        """Return the state before the first backward step."""
        return back

    def back(self, state: PyTree) -> Backward:
        """Return the `Backward` part of a state between backward steps."""
        return state

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> PyTree:
            assert state.links is not None  # known_links refuses methods without link estimates
            along_x, along_hyper = outer_gradient_shares(problem, state, ctx)
            mass = state.links.mass
            source = jax.tree.map(lambda g: g / mass, along_x)
            zero = jax.tree.map(jnp.zeros_like, source if problem.private else along_hyper)
            return self.begin(Backward(state.params, state.hyper, state.links, source, along_hyper, source, zero))

        def finish(before: HypergradientState, state: PyTree, ctx: Context) -> HypergradientState:
            back = self.back(state)
            if problem.private and self.steps:
                return subtract_indirect(problem, before, back.direct, optax.tree.scale(-1, back.value), ctx)
            return replace(before, value=back.direct if problem.private else optax.tree.add(back.value, back.direct))

        private = problem.private and self.steps > 0  # else an unneeded product would be released, too
        loop = Repeat(self.step(problem), self.steps - private, name=type(self).__name__)
        return Scope(Sequence(loop, self.step(problem, last=True)) if private else loop, start, finish)

    def maps(
        self, problem: Problem, state: Backward, vector: PyTree, mixed: PyTree, ctx: Context
    ) -> tuple[PyTree, PyTree]:
        """Return (A u, B u) of one client for u = `vector`, after the reversed messages were mixed.

        On a private task B is postponed: it is linear, and other clients know u, so one product at the end is enough.
        """
        assert self.step_size is not None  # `bind` refuses None
        at = vector if self.variant == "gradient-after" else mixed
        batch, along_hyper = minibatch(ctx.data.train, self.batch_size, ctx.key), at
        if problem.private:
            along_x = problem.hessian_product(state.params, state.hyper, batch, at)
        else:
            along_x, along_hyper = problem.products(state.params, state.hyper, batch, at)
        onward = optax.tree.add_scale(mixed, -self.step_size / state.links.mass, along_x)
        return onward, optax.tree.scale(-self.step_size, along_hyper)

    def exchange(
        self,
        problem: Problem,
        weights: Literal["reverse", "gossip"] | Callable[[Backward, Context], Float[Array, " n"]],
        *,
        move: bool = True,
        collect: bool = True,
    ) -> Exchange:
        """Return a round that exchanges u. With `move` it sets u ← A u, and with `collect` v ← v + B u."""

        def receive(state: Backward, inbox: Inbox, ctx: Context) -> Backward:
            onward, added = self.maps(problem, state, state.u, inbox.mix(state.u), ctx)
            value = optax.tree.add(state.value, added) if collect else state.value
            return replace(state, u=onward if move else state.u, value=value)

        return Exchange(send=lambda state, ctx: state.u, receive=receive, weights=weights)


def find_recurrent(method: Method) -> Recurrent | None:
    """Return the method or its part that is a `Recurrent` estimator, which needs link estimates; None without one."""
    return next((part for part in (method, *method.parts()) if isinstance(part, Recurrent)), None)


def known_links(method: Method, network: Network, point: Any, task: Any) -> LinkEstimates | None:
    """Return the clients' link estimates for a method on the network; None if it needs none.

    The estimates come from the training, and are empty if the method trains itself. On a static network they equal the
    true means, because one round shows all links. On other networks the true means are returned only with
    `links="means"`. They are never returned to a party, which sees only its own links.
    """
    estimator = find_recurrent(method)
    if estimator is None:
        return None
    if estimator.links == "observed":
        if any(part.option("observe") for part in method.parts()):
            return LinkEstimates.none(network.clients, (network.clients,) if task.owner is None else ())
        if (
            point is not None
            and point.links is not None
            and estimator.weights in (None, point.iteration.get("weights"))
        ):
            return point.links
    name = type(estimator).__name__
    if task.owner is not None and estimator.links == "means":
        raise InvalidInput(f"{name}.links", "means", "'observed' for one party's task: a party sees its own links only")
    if estimator.links == "observed" and (network.varying or task.owner is not None):
        allowed = (
            f"link estimates of {network.name} from SGP or DSGD: run hp.train (observe=True for many clients) "
            f'and use its task; or give links=…; or {name}(…, links="means"), which no party can see'
        )
        raise InvalidInput("links", None, allowed)
    # Custom networks may provide push weights only.
    means = network.means("gossip") if estimator.weights == "gossip" else network.means()
    dtype = jnp.zeros(()).dtype
    parts = (means.weights, means.up.T, means.stationary(), np.ones(network.clients))
    return LinkEstimates(*(jnp.asarray(part, dtype) for part in parts))


def reversed_weights(state: Backward, ctx: Context) -> Float[Array, " n"]:
    """Return p̃_{j→i} = p̄_{i→j}/δ̄_{j→i} for messages from j; the client's own entry is p̄_{i→i}."""
    links = state.links
    return jnp.where(links.heard > 0, links.sent / jnp.where(links.heard > 0, links.heard, 1), 0)
