"""Hypergradient push (HGP): hypergradients over directed, time-varying networks."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.data.batches import minibatch
from hyperpush.hypergradients.base import (
    HypergradientEstimator,
    HypergradientState,
    outer_gradient_shares,
    subtract_indirect,
)
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Local, Node, Repeat, Scope, Sequence
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    u: PyTree  # this client's term of the series; after averaging, the mean term û
    value: PyTree  # v, the estimate so far; on a private task (1/n) ∂_λ F_i alone
    q: PyTree  # η Σ û on a private task; else None
    mass: Float[Array, ""]  # ω of the push-sum


class HGP(HypergradientEstimator):
    """Hypergradient push: a Neumann series whose terms are averaged by push-sum.

    It estimates d F̄ / dλ_i, the derivative of the mean outer cost F̄ by each client's own hyperparameters, at params x
    that solve the inner problem. With H_k = ∂²_xx f_k and B_i = ∂²_λx f_i:

        d F̄ / dλ_i = (1/n) ∂_λ F_i − B_i (Σ_k H_k)⁻¹ (1/n) Σ_j ∂_x F_j

    Clients send only vectors of the size of the params (Terashita and Hara, arXiv:2210.02129):

        u_i = (1/n) ∂_x F_i,   v_i = (1/n) ∂_λ F_i
        repeat `steps` times:
            û_i = average of all u_j, by `pushes` rounds of push-sum
            v_i ← v_i − η B_i û_i
            u_i ← û_i − η H_i û_i
        return v_i

    The mean Hessian H̄ must be positive definite. Two errors remain. Each further step multiplies the truncation error
    of the series by about max |1 − ηλ| over the eigenvalues λ of H̄. Averaging with finitely many pushes leaves a bias,
    which only more pushes reduce.

    **Use it** on directed or changing networks, also with mini-batches. **Avoid it** if messages get lost, or if
    averaging is slow: a directed ring of 50 clients takes thousands of pushes. `TrackedHGP` avoids this bias. Some
    papers call `DirectedRB` HGP, too.

    Departures from the paper:
        1. Averages can also be by gossip, or exact.
        2. One mini-batch serves both products of a step, unless `independent_batches` asks for two.
        3. The push-sum weight ω can be carried over between steps (`keep_mass`).
        4. On a private task the gradients of F and the products H_i û are clipped and noisy. Other clients know û. So
           one product with all examples at the end gives v = (1/n) ∂_λ F_i − B_i (η Σ û). This takes steps + 1
           releases.

    Args:
        steps: Terms of the series. With 0 the result is the direct gradient (1/n) ∂_λ F_i. About κ·ln(1/ε) steps
            reach a relative error ε at condition number κ.
        pushes: Rounds of averaging per step, at least 1. Double the number until the estimate stops changing.
        step_size: η. With exact averages any 0 < η < 2 / λ_max(H̄) converges; 1 / λ_max(H̄) is a safe choice, which
            `hp.check` suggests. It is unrelated to the step size of training.
        batch_size: Training examples per mini-batch, drawn anew in each step, at least 1; None uses all.
        averaging: `"push"` (push-sum, any network), `"gossip"` (doubly stochastic weights, undirected networks) or
            `"exact"` (the true mean, as a server would compute it).
        independent_batches: True draws one mini-batch for B_i û_i and another for H_i û_i. Refused on private tasks.
        keep_mass: True carries the push-sum weight ω over to the next step instead of restarting at 1.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Four clients share x = 1, the inner solution. The true hypergradient of each is −1/4.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, log_rate, a: (x - a) ** 2,
        ...     penalty=lambda x, log_rate: jnp.exp(log_rate) * x**2,
        ...     outer=lambda x, log_rate, b: (x - b) ** 2, params=1.0, hypers=0.0,
        ...     train=jnp.array([[1.0], [2.0], [3.0], [2.0]]), validation=jnp.zeros((4, 1)),
        ... )
        >>> network = hp.networks.RandomDirected(4)
        >>> method = hp.HGP(steps=20, pushes=30, step_size=0.2)
        >>> print(hp.hypergradient(task, method, network, key=0).value.round(3))
        [-0.25 -0.25 -0.25 -0.25]
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

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        if task.privacy is not None and self.independent_batches:
            allowed = "False on a private task, where one of the products is taken in the end"
            raise InvalidInput("HGP.independent_batches", True, allowed)

    def program(self, problem: Problem) -> Node:
        def start(state: HypergradientState, ctx: Context) -> _State:
            u, v = outer_gradient_shares(problem, state, ctx)
            q = optax.tree.zeros_like(u) if problem.private else None
            return _State(state.params, state.hyper, u, v, q, jnp.ones(()))

        def get_term(state: _State, ctx: Context) -> tuple[PyTree, Float[Array, ""]]:
            # Push-sum starts from u, not from u·ω, even if ω is kept: all ω sum to n, so the result is the plain
            # mean. From u·ω it would weight clients unequally.
            return state.u, state.mass

        def set_mean(state: _State, mean: PyTree, mass: Float[Array, ""], ctx: Context) -> _State:
            return replace(state, u=mean, mass=mass if self.keep_mass else jnp.ones(()))

        def add_term(state: _State, ctx: Context) -> _State:
            along_x, along_hyper = self._products(problem, state, ctx)
            u = optax.tree.add_scale(state.u, -self.step_size, along_x)
            return replace(state, u=u, value=optax.tree.add_scale(state.value, -self.step_size, along_hyper))

        def finish(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            return replace(before, value=state.value)

        average = Average(get_term, set_mean, rounds=self.pushes, by=self.averaging)
        if problem.private and self.steps:
            return self._private_program(problem, average, start)
        return Scope(Repeat(Sequence(average, Local(add_term)), self.steps, name="HGP"), start, finish)

    def _products(self, problem: Problem, state: _State, ctx: Context) -> tuple[PyTree, PyTree]:
        """Return (H_i û_i, B_i û_i) on mini-batches of this step."""
        batch, other = (minibatch(ctx.data.train, self.batch_size, key) for key in jax.random.split(ctx.key))
        at = state.params, state.hyper
        if self.independent_batches:
            along_hyper = problem.jacobian_product(*at, batch, state.u)
            return problem.hessian_product(*at, other, state.u), along_hyper
        # Sharing one batch adds no bias: û depends only on the batches of earlier steps.
        return problem.products(*at, batch, state.u)

    def _private_program(self, problem: Problem, average: Average, start: Any) -> Node:
        """Return the program for private tasks: it sums η û, applies B_i once at the end, and skips the last H_i û."""

        def gather(state: _State, ctx: Context) -> _State:
            return replace(state, q=optax.tree.add_scale(state.q, self.step_size, state.u))

        def add_term(state: _State, ctx: Context) -> _State:
            batch = minibatch(ctx.data.train, self.batch_size, jax.random.split(ctx.key)[0])
            along_x = problem.hessian_product(state.params, state.hyper, batch, state.u)
            return replace(gather(state, ctx), u=optax.tree.add_scale(state.u, -self.step_size, along_x))

        def finish(before: HypergradientState, state: _State, ctx: Context) -> HypergradientState:
            return subtract_indirect(problem, before, state.value, state.q, ctx)

        series = Repeat(Sequence(average, Local(add_term)), self.steps - 1, name="HGP")
        return Scope(Sequence(series, average, Local(gather)), start, finish)
