"""Directed recurrent backpropagation: the hypergradient of SGP itself, without averaging in between."""

from typing import ClassVar

import equinox as eqx

from hyperpush.hypergradients.recurrent import Recurrent, reversed_weights
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Node, Sequence
from hyperpush.task.problem import Problem


class DirectedRB(Recurrent):
    """Directed recurrent backpropagation: differentiate backward through the steps of SGP, along reversed links.

    Each client starts from u = (1/n) ∂_x F_i/ω_i, with its mean push-sum weight ω_i, and v = (1/n) ∂_λ F_i. It repeats
    `steps` times

        v ← v + B u,   u ← A u

    Here A goes back through one expected step of SGP, and B adds the effect of the hypers on that step (equations in
    `recurrent.py`). The limit is the derivative of the outer cost at the fixed point of SGP's expected step. The
    estimate of the truncated series is unbiased, but more `steps` do not reduce its noise from the links. Several
    papers call it HGP
    ("Personalized decentralized bilevel optimization over stochastic and directed networks", "Cooperative personalized
    bilevel optimization over random directed networks").

    **Use it** on directed or changing networks whose links can also carry messages back, after training with `SGP` or
    `DSGD`. **Avoid it** if links run one way only, or if γ is large: the target is O(γ) away from the hypergradient of
    the common solution.

    Departures from the papers:
        1. Both variants of SGP are covered; each paper has one of them.
        2. ω is averaged over the training. The papers take its last value.
        3. On a private task other clients know u, so B_i is applied only once at the end: steps + 1 releases.

    Args:
        steps: Terms of the series. With 0 the result is (1/n) ∂_λ F_i. The series converges at the pace of SGP: take
            about the number of training steps.
        step_size: γ, above 0: the rate of SGP at its last step, because that step is differentiated. None takes it from
            the constant or schedule of the `SGP` or `DSGD` that trained; a different number is then refused. A number
            is needed if neither the task nor the algorithm tells which solver trained.
        variant: `"gradient-first"` or `"gradient-after"`. None takes the variant of the solver that trained, or
            `"gradient-first"` if that is unknown. Algorithms refuse a variant other than their solver's.
        batch_size: Training examples per mini-batch, drawn anew in each step, at least 1; None uses all.
        links: Source of the link estimates. `"observed"`: the clients' observations during training; on a static
            network one round suffices. `"means"`: the network's true means, for comparisons; no party can see them.
        weights: Mixing weights of the training: `"push"` or `"gossip"`. None takes those of the solver that trained,
            or `"push"` if that is unknown.
        independent_batches: True takes one round and mini-batch for u and another for v. Sharing them adds no bias,
            because v uses u before its update.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.FullyConnected(5)
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> method = hp.hypergradients.DirectedRB(steps=1000, step_size=0.1)
        >>> bool(abs(hp.hypergradient(task, method, network, key=0).value - exact).max() < 1e-4)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="two-way",
        target="global",
        sends="one vector of the size of the params per step",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        note="through the steps of SGP",
        private=True,
        example={"steps": 20, "step_size": 0.1},
    )

    independent_batches: bool = eqx.field(static=True, default=False)

    def step(self, problem: Problem, last: bool = False) -> Node:
        if last or not self.independent_batches:
            return self.exchange(problem, reversed_weights, move=not last)
        collect = self.exchange(problem, reversed_weights, move=False)
        return Sequence(collect, self.exchange(problem, reversed_weights, collect=False))
