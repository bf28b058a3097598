"""Hyper-gradient push: the hyper-gradient over directed, time-varying networks, exchanging vectors only."""

from dataclasses import replace
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import draw, everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration, Hyper, shared_gradients
from hyperpush.privacy.noise import Noise, check_noise
from hyperpush.problem import Problem
from hyperpush.program import Average, Local, Node, Repeat, Sequence, Within


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    u: PyTree
    value: PyTree  # v; with privacy, what will be of it without the product
    q: PyTree  # η Σ û, with privacy; else None
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

    With `privacy` the gradients of F and the products ∂²_xx f û are clipped and noisy, and as û is known to others,
    v = (1/n)∂_λ F_i − ∂²_λx f_i (η Σ û) is taken in the end, by one product with all examples: order + 1 releases.
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
    privacy: Noise | None = None

    def __check_init__(self):
        whole("HGP.order", self.order, least=0)
        whole("HGP.pushes", self.pushes, least=1)
        positive("HGP.step", self.step)
        if self.batch is not None:
            whole("HGP.batch", self.batch, least=1)
        if self.averaging not in ("push", "gossip", "exact"):
            raise InvalidInput("HGP.averaging", self.averaging, "'push', 'gossip' or 'exact'")
        check_noise("HGP.privacy", self.privacy)
        if self.privacy is not None:
            self.privacy.check_estimator("HGP")
            if self.two_batches:
                raise InvalidInput(
                    "HGP.two_batches", True, "False with privacy, which takes one of the products in the end"
                )

    @property
    def releases(self) -> int:
        return self.order + 1  # the gradients, the products that are averaged afterwards, the estimate

    def program(self, problem: Problem) -> Node:
        def enter(state: Hyper, ctx):
            u, v = shared_gradients(problem, state, ctx, self.privacy)
            q = None if self.privacy is None else jax.tree.map(jnp.zeros_like, u)
            return _State(state.params, state.hyper, u, v, q, jnp.ones(()))

        def put(state: _State, average, mass, ctx):
            return replace(state, u=average, mass=mass if self.keep_mass else jnp.ones(()))

        def multiply(state: _State, ctx):
            first, second = jax.random.split(ctx.key)
            batch = draw(ctx.data.inner, self.batch, first)
            if self.privacy is not None:
                at = state.params, state.hyper, batch, state.u
                along_x = self.privacy.hessian_product(problem, *at, second, ctx.round + 1)
                u = jax.tree.map(lambda u, h: u - self.step * h, state.u, along_x)
                return replace(state, u=u, q=jax.tree.map(lambda q, u: q + self.step * u, state.q, state.u))
            along_x, along_hyper = problem.products(state.params, state.hyper, batch, state.u)
            if self.two_batches:
                batch = draw(ctx.data.inner, self.batch, second)
                along_x = problem.hessian_product(state.params, state.hyper, batch, state.u)
            u = jax.tree.map(lambda u, h: u - self.step * h, state.u, along_x)
            v = jax.tree.map(lambda v, b: v - self.step * b, state.value, along_hyper)
            return replace(state, u=u, value=v)

        def leave(before: Hyper, state: _State, ctx):
            value = state.value
            if self.privacy is not None:
                at = state.params, state.hyper, everything(ctx.data.inner), state.q
                product = self.privacy.jacobian_product(problem, *at, ctx.key, self.order)
                value = jax.tree.map(jnp.subtract, value, product)
            return Hyper(state.params, state.hyper, value, before.links)

        average = Average(get=lambda state, ctx: (state.u, state.mass), put=put, rounds=self.pushes, by=self.averaging)
        return Within(Repeat(Sequence(average, Local(multiply)), self.order, name="HGP"), enter, leave)
