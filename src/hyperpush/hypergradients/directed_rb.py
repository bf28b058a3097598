"""Directed recurrent backpropagation: the hypergradient of SGP itself, without averaging in between."""

from typing import ClassVar

import equinox as eqx

from hyperpush.hypergradients.recurrent import Recurrent, reversed_weights
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Node, Sequence
from hyperpush.task.problem import Problem


class DirectedRB(Recurrent):
    """Directed recurrent backpropagation: back through the steps of SGP, along links that run against its own.

    From u = c_x and v = c_λ, `steps` times

        v ← v + B u,   u ← A u

    with the maps A and B of `recurrent.py`: the series of the fixed point of SGP's expected step. It estimates the
    truncated series without bias, with noise from the links that does not fall with `steps`. Several papers call it HGP
    ("Personalized decentralized bilevel optimization over stochastic and directed networks", "Cooperative personalized
    bilevel optimization over random directed networks").

    **Use it** on directed or changing networks whose links can also carry messages back, after training with `SGP` or
    `DSGD`. **Avoid it** if links run one way only, or if γ is large: the target is O(γ) away from the hypergradient of
    the common solution.

    Departures from the papers:
        1. Both variants of SGP are covered; the papers have one each.
        2. ω is its time average over training. The papers take its last value.
        3. On a private task u is known to others, so that B_i is applied once in the end: steps + 1 releases.

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
        independent_batches: Take one round and mini-batch for u and another for v. Sharing them adds no bias, as v
            takes u from before its update.

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
