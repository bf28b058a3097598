"""Iterative differentiation: stochastic gradient push as a run that can be differentiated step by step.

To a small change of z and λ, one step of SGP with its links, step size γ and batch answers by

    gradient-first:  dz⁺ = P(dz − γ(H dz/ω + Bᵀdλ))         gradient-after:  dz⁺ = P dz − γ(H dz/ω + Bᵀdλ)

with H_i = ∂²_xx f_i and B_i = ∂²_λx f_i at x_i = z_i/ω_i. In the end F̄ changes by Σ_i c_iᵀdz_i + (1/n)∂_λF_iᵀdλ_i with
c_i = (1/n)∂_xF_i/ω_i. Forward mode multiplies these maps from the first step on, backward mode their transposes from
the last (Franceschi, Donini, Frasconi and Pontil, arXiv:1703.01785).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.checks import check_integer
from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.inner.sgp import SGP
from hyperpush.method import Number
from hyperpush.optimizers import step_size_at
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope


class SGPRun(eqx.Module):
    """A client in the middle of SGP."""

    z: PyTree
    mass: Float[Array, ""]  # ω
    hyper: PyTree
    key: PRNGKeyArray  # its mini-batches follow from this and the step, so that they can be drawn again
    tangents: PyTree = None  # derivatives of z, which are pushed along with it
    kept: PyTree = None  # what the client keeps of its steps to itself

    @property
    def params(self) -> PyTree:
        return jax.tree.map(lambda z: (z / self.mass).astype(z.dtype), self.z)


class IterativeDifferentiation(HypergradientEstimator):
    """An estimator that trains with `solver` and differentiates its steps."""

    trains: ClassVar[bool] = True

    solver: SGP

    def __check_init__(self):
        name = type(self).__name__
        if self.solver.optimizer is not None:
            allowed = "None: only plain SGD, given by step_size"
            raise InvalidInput(f"{name}.solver.optimizer", self.solver.optimizer, allowed)
        check_integer(f"{name}.solver.steps", self.solver.steps, minimum=1)

    def step_size_and_batch(self, key: PRNGKeyArray, step: Int[Array, ""], ctx: Context) -> tuple[Number, PyTree]:
        """The client's step size and mini-batch at a step of its run."""
        assert self.solver.step_size is not None
        batch = draw(ctx.data.train, self.solver.batch_size, jax.random.fold_in(key, step))
        return step_size_at(self.solver.step_size, step), batch

    def run_program(
        self,
        change: Callable[[SGPRun, Context], tuple[PyTree, PyTree]],
        record: Callable[[SGPRun, Inbox, Context], PyTree] | None = None,
    ) -> Node:
        """SGP's steps on `SGPRun` states.

        `change` is what a gradient step adds to (z, tangents); `record` is what is kept after a step, from the run
        before.
        """
        first = self.solver.variant == "gradient-first"

        def send(held: tuple[SGPRun, PyTree], ctx: Context):
            run, added = held
            values = run.z, run.tangents
            return _add(values, added) if first else values, run.mass

        def receive(held: tuple[SGPRun, PyTree], inbox: Inbox, ctx: Context) -> SGPRun:
            run, added = held
            values, mass = inbox.mix(send(held, ctx))
            z, tangents = values if first else _add(values, added)
            kept = None if record is None else record(run, inbox, ctx)
            return replace(run, z=z, mass=mass, tangents=tangents, kept=kept)

        step = Scope(
            Exchange(send, receive, conserved=True, observe=record is not None),
            enter=lambda run, ctx: (run, change(run, ctx)),
            leave=lambda run, after, ctx: after,
        )
        return Repeat(step, self.solver.steps, name="SGP")


def sources(problem: Problem, run: SGPRun, ctx: Context) -> tuple[PyTree, PyTree]:
    """(1/n)∂_x F_i/ω_i and (1/n)∂_λ F_i where the run has ended."""
    along_x, along_hyper = outer_gradient_shares(problem, HypergradientState(run.params, run.hyper, None), ctx)
    return jax.tree.map(lambda g: g / run.mass, along_x), along_hyper


def _add(values: PyTree, added: PyTree) -> PyTree:
    return jax.tree.map(lambda v, a: (v + a).astype(v.dtype), values, added)
