"""Methods with their grids of step sizes, and their results; one compiled run has all step sizes and seeds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

import hyperpush as hp
from hyperpush.algorithms.base import LOOP
from hyperpush.base.errors import InvalidInput
from hyperpush.base.figures import Curve
from hyperpush.big_fed.bilinear import loss, mean_square, model, represent
from hyperpush.data.batches import Data
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.networks import Network
from hyperpush.programs import Context, Node
from hyperpush.task.problem import JointCost, ModelLoss, Problem
from hyperpush_papers.big_fed.config import Tuned

SETS = ("train", "validation", "test")


class Club(NamedTuple):
    """Data and starts of all seeds of the karate club: seeds on axis 0, clients on axis 1."""

    train: tuple[Any, Any]  # inputs [seeds, clients, examples, features], outputs [seeds, clients, examples]
    validation: tuple[Any, Any]
    test: tuple[Any, Any]
    params: Any
    kernels: Any


class Method(NamedTuple):
    """A method of the comparison with its grid of step sizes."""

    name: str
    steps: list[tuple[float, ...]]
    program: Callable[..., Node]  # builds the method for one choice of step sizes
    begin: Callable[[PyTree, PyTree], PyTree]  # builds the states from params and kernels
    loops: tuple[str, ...]  # names of the loops to record, in the order in which they run
    network: Network | None = None  # None: a server
    clustered: bool = False  # True if params and hyper are in a recorded state's learner

    def at_edge(self, place: int) -> bool:
        """Return True if the chosen step size is at an end of a grid with more than two step sizes."""
        each = zip(*self.steps, strict=True)
        return any(len(set(own)) > 2 and own[place] in (min(own), max(own)) for own in each)


def problem(outer: JointCost | None = None) -> Problem:
    """Return the costs of the paper's clients; a client's own outer cost is by default its training cost."""
    return Problem(ModelLoss(model, loss), mean_square if outer is None else outer, outer_on="train")


def cosine(config: Tuned, weights: Float[np.ndarray, "n n"], *, self_loops: bool = False) -> hp.big_fed.Cosine:
    """Return the graph's cost for the paper's clients."""
    graph = hp.networks.Graph(weights)
    return hp.big_fed.Cosine(graph, config.negatives, represent=represent, self_loops=self_loops)


def big_fed(config: Tuned, name: str, outer: JointCost | None, peers: Network | None = None) -> Method:
    """Return BiG-Fed with all pairs of step sizes. The graph defines the outer cost; None: clients' own outer costs.

    With `peers` the method runs without a server, on that network.
    """
    form = "products" if peers is None else "peers"

    def program(rate: Array, first: Array) -> Node:
        falling = hp.schedule("power", first, config.outer_exponent)
        options = {"damping": config.damping, "solver_steps": config.solver_steps}
        return hp.big_fed.BiGFed(config.rounds, falling, rate, form, **options).program(problem(outer))

    steps = [(rate, first) for rate in config.rates for first in config.outer_steps]
    return Method(name, steps, program, hp.algorithms.BilevelState, (LOOP,), peers)


def solver(
    config: Tuned, name: str, make: Callable[[Array], InnerSolver], loops: tuple[str, ...], clustered: bool = False
) -> Method:
    """Return a method with an inner step only, whose grid is as large as BiG-Fed's."""
    count = len(config.rates) * len(config.outer_steps)
    steps = [(float(rate),) for rate in np.geomspace(min(config.rates), max(config.rates), count)]
    return Method(name, steps, lambda rate: make(rate).program(problem()), InnerState, loops, None, clustered)


def local_and_averaged(config: Tuned) -> list[Method]:
    """Return the two baselines: each client trains alone, and one model for all clients."""
    return [
        solver(config, "Local", lambda rate: hp.LocalSGD(config.rounds, rate), ("LocalSGD",)),
        solver(config, "FedAvg", lambda rate: hp.FedAvg(config.rounds, rate), ("FedAvg",)),
    ]


def curves(method: Method, club: Club) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the clients' mean squared error [step sizes, seeds, rounds, 3], and the last params and hypers.

    The last axis holds training, validation and test error.
    """
    # A server needs no links.
    network = method.network or hp.networks.FullyConnected(club.params.shape[1])

    def record(state: Any, ctx: Context) -> Float[Array, " 3"]:
        at = state.learner if method.clustered else state
        return jnp.stack([mean_square(at.params, at.hyper, ctx.data.sets[name]) for name in SETS])

    def one(steps: tuple[Array, ...], own: Club) -> tuple[Array, Array, Array]:
        data = Data(dict(zip(SETS, own[:3], strict=True)), "train")
        states = method.begin(own.params, own.kernels)
        recorders = dict.fromkeys(method.loops, record)
        program = method.program(*steps)
        states, history = hp.extend.evaluate(program, network, states, data, jax.random.key(0), record=recorders)
        errors = jnp.concatenate([history[loop] for loop in method.loops]).mean(1)
        return errors, states.params, states.hyper

    steps = tuple(jnp.asarray(each) for each in zip(*method.steps, strict=True))
    both = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    return jax.tree.map(np.asarray, jax.jit(both)(steps, club))


def best_of(errors: Float[np.ndarray, "steps seeds rounds 3"]) -> int:
    """Return the choice of step sizes with the lowest finite validation loss, averaged over rounds and seeds."""
    score = errors[..., 1].mean((1, 2))
    if not np.isfinite(score).any():
        raise InvalidInput("rates", "diverges with every choice of steps", "smaller ones")
    return int(np.nanargmin(score))


def mean_curves(found: dict[str, Float[np.ndarray, "seeds rounds"]]) -> list[Curve]:
    """Return a curve for each method: mean and spread over seeds by round."""
    return [Curve(name, np.arange(1, each.shape[1] + 1), each.mean(0), each.std(0)) for name, each in found.items()]
