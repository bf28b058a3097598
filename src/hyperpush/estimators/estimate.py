"""Estimate the hyper-gradient of a problem at a point, on a network, with an estimator of one's choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.data.batches import Data
from hyperpush.engine import simulate
from hyperpush.engine.outcome import Outcome, Record
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration, Hyper
from hyperpush.inner.step import LinkEstimates
from hyperpush.networks import Network
from hyperpush.problem import Problem, check
from hyperpush.program import Node, program_of


@runtime_checkable
class Estimator(Protocol):
    """An estimator: a frozen module whose fields are its options."""

    declares: ClassVar[Declaration]

    def program(self, problem: Problem) -> Node:
        """The estimator as a program on `Hyper` states; the client's data are `Data`."""
        ...


@dataclass(frozen=True)
class Estimate:
    """A hyper-gradient and what it cost."""

    value: PyTree  # every client's d_{λ_i} F̄, clients on axis 0
    rounds: int  # rounds of communication
    floats: int  # numbers each client sent
    hessian_products: int  # with ∂²_xx f, that each client computed
    jacobian_products: int  # with ∂²_λx f
    gradients: int  # gradients of f and F
    step: int  # network time afterwards
    history: dict[str, PyTree]


def start(params: PyTree, hypers: PyTree, links: LinkEstimates | None = None) -> Hyper:
    """The states that an estimator's program starts from."""
    params, hypers = jax.tree.map(jnp.asarray, (params, hypers))
    return Hyper(params, hypers, jax.tree.map(jnp.zeros_like, hypers), links)


def known_links(network: Network) -> LinkEstimates:
    """What clients would estimate of their links in the long run, from the network's own description."""
    means, dtype = network.means(), jnp.zeros(()).dtype
    return LinkEstimates(*(jnp.asarray(part, dtype) for part in (means.push, means.up.T, means.stationary())))


def check_network(method: Any, network: Network) -> None:
    """Refuse a network that a method cannot use, with the reason and the methods of its kind that would work."""
    needs = method.declares.needs
    suited = {"any": True, "two-way": network.two_way(), "undirected": not network.directed}
    if not suited[needs]:
        from hyperpush.declarations import ALGORITHMS, ESTIMATORS

        kind = ALGORITHMS if type(method).__name__ in ALGORITHMS else ESTIMATORS
        others = ", ".join(name for name, declared in kind.items() if suited[declared.needs])
        reason = {"two-way": "links that can run both ways", "undirected": "links that run both ways at once"}[needs]
        raise InvalidInput("network", network.name, f"{reason}, for {type(method).__name__}; here would work: {others}")
    if hasattr(method, "check_network"):  # what a declaration cannot say
        method.check_network(network)


def hypergradient(
    problem: Problem,
    estimator: Estimator,
    network: Network,
    params: PyTree,
    hypers: PyTree,
    inner_data: PyTree,
    outer_data: PyTree,
    key: PRNGKeyArray,
    *,
    links: LinkEstimates | None = None,
    run: Callable[..., Outcome] = simulate.run,
    record: Mapping[str, Record] | None = None,
    **options: Any,
) -> Estimate:
    """Every client's derivative of the mean outer cost by its own hyper-parameters.

    `params`, `hypers` and the data have the clients on axis 0. `links` is what training with `SGP(observe=True)` saw of
    the network, for estimators that reverse its links; without it they use the network's true means. `run` is the
    engine (`hp.simulate.run`, `hp.shard.run`, `hp.peer.run`); further options go to it (`step`, `batch`, …).
    """
    data = jax.tree.map(jnp.asarray, Data(inner_data, outer_data))
    check(problem, params, hypers, data, network.clients)
    check_network(estimator, network)
    if links is None and estimator.declares.needs != "any":
        links = known_links(network)
    program = program_of(estimator, problem)
    outcome = run(program, network, start(params, hypers, links), data, key, record=record, **options)
    return Estimate(outcome.states.value, history=outcome.history, **outcome.costs)
