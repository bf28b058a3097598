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

    What i hears from j counts as much as i sends to j. Where every live link runs both ways at once these weights are
    known, and need no estimates (algorithm 3 of "Personalized decentralized bilevel optimization over stochastic and
    directed networks").

    **Use it** on undirected networks instead of `DirectedRB`. **Avoid it** elsewhere: it refuses directed networks.

    Departures from the paper:
        1. Both variants of SGP are covered.

    Args:
        steps: Terms of the series. With 0 the result is (1/n) ∂_λ F_i. The series converges at the pace of SGP: take
            about as many steps as training took.
        step_size: γ, above 0. The step of SGP is what is differentiated, so γ is its rate at its last step. None: that
            rate, from the constant or schedule of the `SGP` or `DSGD` that trained; another one is then refused. A
            number is needed where the task is not known to be trained.
        variant: `"gradient-first"` or `"gradient-after"`. None: that of the solver that trained, if the task or the
            algorithm tells, else `"gradient-first"`. Algorithms refuse another one than theirs.
        batch_size: Training examples per mini-batch, drawn anew in each step, at least 1; None uses all.
        links: What is known of the links. `"observed"`: what clients saw while they trained; on a network that never
            changes one round shows it. `"means"`: the network's true means, which no party can see, for comparisons.
        weights: With which training mixed params: `"push"` or `"gossip"`. None: those of the solver that trained, if
            the task or the algorithm tells, else `"push"`.

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
