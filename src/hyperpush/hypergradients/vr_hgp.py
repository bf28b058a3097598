"""Variance-reduced directed recurrent backpropagation."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Probability
from hyperpush.hypergradients.directed_rb import DirectedRB
from hyperpush.hypergradients.recurrent import Backward, Recurrent, reversed_weights
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    back: Backward
    w: PyTree


class VRHGP(Recurrent):
    """Variance-reduced hypergradient push: two running estimates of the series of `DirectedRB`, so early noise fades.

    Each client starts from v = 0 and u = w = c_x, and repeats `steps` times

        v ← α(v + B u) + (1 − α) B w,   u⁺ = A u,   w ← β(A w + c_x) + (1 − β)(w + u⁺)

    The result is v + c_λ. The maps A and B of one step of SGP are those of `DirectedRB` (equations in `recurrent.py`).
    With the mean push-sum weight ω_i, c_x = (1/n) ∂_x F_i/ω_i and c_λ = (1/n) ∂_λ F_i. The method is from
    "Personalized decentralized bilevel optimization over stochastic and directed networks".

    **Use it** where the noise of `DirectedRB` is too large: on links that change at random, or with mini-batches.
    **Avoid it** on fixed links with all examples: it sends and computes twice as much for the same result.

    Departures from the paper:
        1. u and w share the links and the mini-batch of a step.
        2. Both variants of SGP are covered.
        3. On a private task other clients know u and w, so B_i is applied only once at the end: 2·steps releases.

    Args:
        steps: Terms of the series. With 0 the result is (1/n) ∂_λ F_i. The series converges at the pace of SGP: take
            about the number of training steps.
        step_size: γ, above 0: the rate of SGP at its last step, because that step is differentiated. None takes it from
            the constant or schedule of the `SGP` or `DSGD` that trained; a different number is then refused. A number
            is needed if neither the task nor the algorithm tells which solver trained.
        alpha: α from 0 to 1; 0.9 is the paper's. Smaller values forget early noise sooner. α = 1 and β = 0 give
            `DirectedRB`.
        beta: β from 0 to 1; 0.1 is the paper's. Larger values average w over more steps.
        variant: `"gradient-first"` or `"gradient-after"`. None takes the variant of the solver that trained, or
            `"gradient-first"` if that is unknown. Algorithms refuse a variant other than their solver's.
        batch_size: Training examples per mini-batch, drawn anew in each step, at least 1; None uses all.
        links: Source of the link estimates. `"observed"`: the clients' observations during training; on a static
            network one round suffices. `"means"`: the network's true means, for comparisons; no party can see them.
        weights: Mixing weights of the training: `"push"` or `"gossip"`. None takes those of the solver that trained,
            or `"push"` if that is unknown.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.FullyConnected(5)
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> method = hp.hypergradients.VRHGP(steps=1000, step_size=0.1)
        >>> bool(abs(hp.hypergradient(task, method, network, key=0).value - exact).max() < 1e-4)
        True
    """

    info: ClassVar[MethodInfo] = replace(DirectedRB.info, sends="two vectors of the size of the params per step")

    alpha: Probability = eqx.field(converter=as_number, default=0.9)
    beta: Probability = eqx.field(converter=as_number, default=0.1)

    def begin(self, back: Backward) -> _State:
        return _State(back, back.source)

    def back(self, state: _State) -> Backward:
        return state.back

    def step(self, problem: Problem, last: bool = False) -> Node:
        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            back, alpha, beta = state.back, self.alpha, self.beta
            mixed_u, mixed_w = inbox.mix((back.u, state.w))
            a_u, b_u = self.maps(problem, back, back.u, mixed_u, ctx)
            a_w, b_w = self.maps(problem, back, state.w, mixed_w, ctx)
            value = jax.tree.map(lambda v, bu, bw: alpha * (v + bu) + (1 - alpha) * bw, back.value, b_u, b_w)
            if last:
                return replace(state, back=replace(back, value=value))
            w = jax.tree.map(lambda aw, c, w, u: beta * (aw + c) + (1 - beta) * (w + u), a_w, back.source, state.w, a_u)
            return _State(replace(back, u=a_u, value=value), w)

        return Exchange(
            send=lambda state, ctx: (state.back.u, state.w),
            receive=receive,
            weights=lambda state, ctx: reversed_weights(state.back, ctx),
        )
