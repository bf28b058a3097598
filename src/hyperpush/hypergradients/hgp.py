"""Hypergradient push (HGP): hypergradients over directed, time-varying networks."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import check_integer, check_positive
from hyperpush.data.batches import draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.problem import Problem
from hyperpush.programs import Average, Local, Node, Repeat, Scope, Sequence


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    u: PyTree
    value: PyTree  # v; on a private task, what will be of it without the product
    q: PyTree  # η Σ û on a private task; else None
    mass: Float[Array, ""]  # ω of the push-sum, if it is kept between steps


class HGP(HypergradientEstimator):
    """Hypergradient push: a Neumann series whose terms are averaged by push-sum.

    Estimates d F̄ / dλ_i, how each client's own hyperparameters move the mean outer cost F̄, at params x that solve the
    inner problem. With H_k = ∂²_xx f_k and B_i = ∂²_λx f_i:

        d F̄ / dλ_i = (1/n) ∂_λ F_i − B_i (Σ_k H_k)⁻¹ (1/n) Σ_j ∂_x F_j

    Clients send only vectors of the size of the params (Terashita and Hara, arXiv:2210.02129):

        u_i = (1/n) ∂_x F_i,   v_i = (1/n) ∂_λ F_i
        repeat `steps` times:
            û_i = average of all u_j, by `pushes` rounds of push-sum
            v_i ← v_i − η B_i û_i
            u_i ← û_i − η H_i û_i
        return v_i

    The mean Hessian H̄ must be positive definite. Two errors remain. Cutting off the series leaves one that each further
    step multiplies by about max |1 − ηλ| over the eigenvalues λ of H̄. Averaging with finitely many pushes leaves a
    bias, which only more pushes reduce.

    **Use it** on directed or changing networks, also with mini-batches. **Avoid it** if messages get lost, or if
    averaging is slow: a directed ring of 50 clients takes thousands of pushes. `TrackedHGP` has no such bias. Some
    papers call `DirectedRB` HGP, too.

    On a private task the gradients of F and the products H_i û are clipped and noisy. As û is known to others, v is
    taken in the end, (1/n) ∂_λ F_i − B_i (η Σ û), by one product with all examples: steps + 1 releases.

    Args:
        steps: Terms of the series. With 0 the result is the direct gradient (1/n) ∂_λ F_i.
        pushes: Rounds of averaging per step, at least 1.
        step_size: η. With exact averages any 0 < η < 2 / λ_max(H̄) converges; 1 / λ_max(H̄) is a safe choice. It is
            unrelated to the step size of training.
        batch_size: Training examples per mini-batch, drawn anew in each step; None uses all.
        averaging: `"push"` (push-sum, any network), `"gossip"` (doubly stochastic weights, undirected networks) or
            `"exact"` (the true mean, as a server would compute it).
        independent_batches: Draw one mini-batch for B_i û_i and another for H_i û_i.
        keep_mass: Carry the push-sum weight ω over to the next step instead of restarting at 1.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="global",
        sends="one vector of the size of the params, and one number, per push",
        paper="Terashita and Hara, arXiv:2210.02129",
        private=True,
        example={"steps": 20, "pushes": 5, "step_size": 0.2},
    )

    steps: int = eqx.field(static=True)
    pushes: int = eqx.field(static=True)
    step_size: Number = eqx.field(converter=as_number)
    batch_size: int | None = eqx.field(static=True, default=None)
    averaging: Literal["push", "gossip", "exact"] = eqx.field(static=True, default="push")
    independent_batches: bool = eqx.field(static=True, default=False)
    keep_mass: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_integer("HGP.steps", self.steps, minimum=0)
        check_integer("HGP.pushes", self.pushes, minimum=1)
        check_positive("HGP.step_size", self.step_size)
        check_integer("HGP.batch_size", self.batch_size, minimum=1, optional=True)

    def check_task(self, task: Any) -> None:
        super().check_task(task)
        if task.privacy is not None and self.independent_batches:
            allowed = "False on a private task, where one of the products is taken in the end"
            raise InvalidInput("HGP.independent_batches", True, allowed)

    def program(self, problem: Problem) -> Node:
        def enter(state: HypergradientState, ctx):
            u, v = outer_gradient_shares(problem, state, ctx)
            q = jax.tree.map(jnp.zeros_like, u) if problem.private else None
            return _State(state.params, state.hyper, u, v, q, jnp.ones(()))

        def put(state: _State, average, mass, ctx):
            return replace(state, u=average, mass=mass if self.keep_mass else jnp.ones(()))

        def gather(state: _State, ctx):
            return replace(state, q=jax.tree.map(lambda q, u: q + self.step_size * u, state.q, state.u))

        def multiply(state: _State, ctx):
            first, second = jax.random.split(ctx.key)
            batch = draw(ctx.data.train, self.batch_size, first)
            if problem.private:
                along_x = problem.hessian_product(state.params, state.hyper, batch, state.u)
                u = jax.tree.map(lambda u, h: u - self.step_size * h, state.u, along_x)
                return replace(gather(state, ctx), u=u)
            along_x, along_hyper = problem.products(state.params, state.hyper, batch, state.u)
            if self.independent_batches:
                batch = draw(ctx.data.train, self.batch_size, second)
                along_x = problem.hessian_product(state.params, state.hyper, batch, state.u)
            u = jax.tree.map(lambda u, h: u - self.step_size * h, state.u, along_x)
            v = jax.tree.map(lambda v, b: v - self.step_size * b, state.value, along_hyper)
            return replace(state, u=u, value=v)

        def leave(before: HypergradientState, state: _State, ctx):
            value = state.value
            if problem.private and self.steps:
                product = problem.jacobian_product(state.params, state.hyper, everything(ctx.data.train), state.q)
                value = jax.tree.map(jnp.subtract, value, product)
            return HypergradientState(state.params, state.hyper, value, before.links)

        average = Average(get=lambda state, ctx: (state.u, state.mass), put=put, rounds=self.pushes, by=self.averaging)
        body = Sequence(average, Local(multiply))
        if problem.private and self.steps:  # nobody needs the last product
            loop = Sequence(Repeat(body, self.steps - 1, name="HGP"), average, Local(gather))
        else:
            loop = Repeat(body, self.steps, name="HGP")
        return Scope(loop, enter, leave)
