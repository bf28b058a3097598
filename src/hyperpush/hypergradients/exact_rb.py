"""Exact recurrent backpropagation: directed recurrent backpropagation with the true weights of undirected links."""

from dataclasses import replace
from typing import ClassVar

from hyperpush.hypergradients.directed_rb import DirectedRB
from hyperpush.hypergradients.recurrent import Recurrent
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Node
from hyperpush.task.problem import Problem


class ExactRB(Recurrent):
    """Exact recurrent backpropagation: `DirectedRB` with the true weights of SGP's links.

    Client i weights j's message by the weight that it sends to j with. If every live link runs both ways at once, these
    weights need no estimates (algorithm 3 of "Personalized decentralized bilevel optimization over stochastic and
    directed networks").

    **Use it** on undirected networks instead of `DirectedRB`. **Avoid it** elsewhere: it refuses directed networks.

    Departures from the paper:
        1. Both variants of SGP are covered.

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

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> task, network = hp.tasks.quadratic(5, seed=0), hp.networks.FullyConnected(5)
        >>> exact = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
        >>> method = hp.hypergradients.ExactRB(steps=1000, step_size=0.1)
        >>> bool(abs(hp.hypergradient(task, method, network, key=0).value - exact).max() < 1e-4)
        True
    """

    info: ClassVar[MethodInfo] = replace(DirectedRB.info, network="undirected")

    def step(self, problem: Problem, last: bool = False) -> Node:
        weights = "gossip" if self.weights == "gossip" else "reverse"  # gossip is symmetric
        return self.exchange(problem, weights, move=not last)
