"""Hyper-gradient push: the hyper-gradient over directed, time-varying networks, exchanging vectors only."""

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration, Hyper, shared_gradients
from hyperpush.problem import Problem
from hyperpush.program import Average, Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    u: PyTree
    value: PyTree  # v
    mass: Float[Array, ""]  # ω of the push-sum, if it is kept between orders


class HGP(eqx.Module):
    """Fixed-point iteration on x_i = mean_j [x_j − η∂f_j(x_j, λ_j)], whose averages are taken by push-sum.

    From u = (1/n)∂_x F_i, v = (1/n)∂_λ F_i, `order` times:

        û = average of u;  v ← v − η ∂²_λx f_i û;  u ← û − η ∂²_xx f_i û

    Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed networks". `averaging`
    `"push"` takes `pushes` steps of push-sum on any network, `"gossip"` as many on undirected ones with doubly
    stochastic weights, `"exact"` the true mean, as a server would. With few pushes a bias remains at any order.

    `batch` is the mini-batch size of the products (None: all examples); `two_batches` draws one for each product, not
    one for both. `keep_mass` keeps push-sum's weight ω from one order to the next instead of starting at 1.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="any: directed, time-varying",
        target="global: everybody's mean outer cost",
        sends="vectors of the size of the params",
        matrices=False,
        paper="Terashita and Hara, Decentralized hyper-gradient computation over time-varying directed networks",
    )

    order: int = eqx.field(static=True)
    pushes: int = eqx.field(static=True)
    step: float = eqx.field(static=True, converter=float)
    batch: int | None = eqx.field(static=True, default=None)
    averaging: Literal["push", "gossip", "exact"] = eqx.field(static=True, default="push")
    two_batches: bool = eqx.field(static=True, default=False)
    keep_mass: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        whole("HGP.order", self.order, least=0)
        whole("HGP.pushes", self.pushes, least=1)
        positive("HGP.step", self.step)
        if self.batch is not None:
            whole("HGP.batch", self.batch, least=1)
        if self.averaging not in ("push", "gossip", "exact"):
            raise InvalidInput("HGP.averaging", self.averaging, "'push', 'gossip' or 'exact'")

    def program(self, problem: Problem) -> Node:
        def enter(state: Hyper, ctx):
            u, v = shared_gradients(problem, state, ctx)
            return _State(state.params, state.hyper, u, v, jnp.ones(()))

        def put(state: _State, average, mass, ctx):
            kept = mass if self.keep_mass else jnp.ones(())
            return _State(state.params, state.hyper, average, state.value, kept)

        def multiply(state: _State, ctx):
            first, second = jax.random.split(ctx.key)
            batch = draw(ctx.data.inner, self.batch, first)
            along_x, along_hyper = problem.products(state.params, state.hyper, batch, state.u)
            if self.two_batches:
                batch = draw(ctx.data.inner, self.batch, second)
                along_x = problem.hessian_product(state.params, state.hyper, batch, state.u)
            u = jax.tree.map(lambda u, h: u - self.step * h, state.u, along_x)
            v = jax.tree.map(lambda v, b: v - self.step * b, state.value, along_hyper)
            return _State(state.params, state.hyper, u, v, state.mass)

        average = Average(get=lambda state, ctx: (state.u, state.mass), put=put, rounds=self.pushes, by=self.averaging)
        return Within(
            Repeat(Sequence(average, Local(multiply)), self.order, name="HGP"),
            enter,
            leave=lambda before, state, ctx: Hyper(state.params, state.hyper, state.value, before.links),
        )
