"""Combine training and a hypergradient estimate into one program, so that a party needs one checkpoint for both."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from hyperpush.base.status import Status
from hyperpush.hypergradients.automatic import Automatic
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import Method, MethodInfo, info_by_options
from hyperpush.networks import Network
from hyperpush.networks.link_estimates import join_links
from hyperpush.programs import Context, Node, Scope, Sequence
from hyperpush.solving.choice import join_choices
from hyperpush.task.problem import Problem
from hyperpush.task.task import Task


class TrainFirst(HypergradientEstimator):
    """A hypergradient estimator that first trains with an inner solver, then estimates at the trained params."""

    # The method's facts are those of the hypergradient estimator, not of the inner solver.
    info: ClassVar[MethodInfo] = info_by_options(Automatic.info, lambda self, usual: self.hypergradient.info)

    inner: InnerSolver
    hypergradient: HypergradientEstimator

    def parts(self) -> Iterator[Method]:
        yield self.inner
        yield self.hypergradient

    def bind(self, network: Network, engine: Any = None, task: Any = None) -> "TrainFirst":
        inner, estimator = self.hypergradient.after(self.inner)
        return TrainFirst(inner.bind(network, engine, task), estimator.bind(network, engine, task))

    def choice(self, engine: Any, task: Task, network: Any = None) -> str:
        return join_choices([part.choice(engine, task, network) for part in self.parts()])

    def check(self, task: Task, network: Network | None = None) -> None:
        for part in self.parts():
            part.check(task, network)

    def status(self, states: Any) -> Status:
        return self.hypergradient.status(states)

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> InnerState:
            return InnerState(state.params, state.hyper)

        def end(state: HypergradientState, trained: InnerState, ctx: Context) -> HypergradientState:
            links = join_links(state.links, trained.links)
            return replace(state, params=trained.params, hyper=trained.hyper, links=links)

        return Sequence(Scope(self.inner.program(problem), start, end), self.hypergradient.program(problem))
