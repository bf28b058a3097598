"""FedNest: rounds of corrected local steps on both levels, with a server."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import BilevelState, descend
from hyperpush.algorithms.bsa import BSA
from hyperpush.algorithms.inverse import correct
from hyperpush.algorithms.pooled import PooledDescent, PooledState, average_fields, mean
from hyperpush.base.ranges import Count
from hyperpush.data.batches import full_batch, minibatch
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class _State(PooledState):
    iteration: Int[Array, ""]


def corrected_steps(
    gradient: Callable[[PyTree, PRNGKeyArray], PyTree],
    start: PyTree,
    pull: PyTree,
    rate: Any,
    steps: int,
    key: PRNGKeyArray,
) -> PyTree:
    """Return z after `steps` steps z ← z − rate·(g_i(z) − g_i(start) + pull) from `start`.

    Both gradients of a step use the same batch.

    `pull` is the mean gradient at the start, so clients do not drift to their own minima.
    """

    def step(number, z):
        own = jax.random.fold_in(key, number)
        return descend(z, correct(lambda point: gradient(point, own), pull, z, start), rate)

    return jax.lax.fori_loop(0, steps, step, start)


class FedNest(PooledDescent):
    """Federated nested optimization: rounds of corrected local steps on both levels, with a server.

    All clients share the params y and the hypers x; g_i is a client's inner and F_i its outer cost. An iteration has
    three parts: `inner_rounds` rounds on y, the hypergradient h̄ at (x, y) with averaged products, and one round on x
    (Tarzanagh, Li, Thrampoulidis and Oymak, arXiv:2205.02215):

        y_i ← y_i − β(∂_y g_i(x, y_i) − ∂_y g_i(x, y) + mean_k ∂_y g_k(x, y))
        x_i ← x_i − α(∂_xF_i(x_i, y) − ∂_xF_i(x, y) + h̄)

    A round on y takes `inner_steps` such steps from the common y, then the mean of all y_i. A round on x takes
    `outer_steps`. The mean of ∂_y g_k takes all examples; all other derivatives take mini-batches.

    **Use it** where rounds with the server are expensive and clients' costs differ: the correction keeps local steps
    from drifting to the clients' own minima. **Avoid it** without a server: every round takes exact averages.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper draws a random `Neumann`.

    Args:
        steps: Iterations. With 0 every client gets the mean of the initial values.
        outer_step_size: α, above 0; a number or a schedule by iteration. Halve it if the run diverges.
        inner_step_size: β, above 0; a number or a schedule by iteration. Constant steps need β < 2/λ_max(H_i).
        inner_rounds: Rounds with the server on y per iteration, at least 1.
        inner_steps: Local steps per round on y, at least 1.
        outer_steps: Local steps per round on x, at least 1.
        inverse: Method that applies H⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.FedNest(steps=200, outer_step_size=0.1, inner_step_size=0.1, inner_steps=3)
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = replace(
        BSA.info,
        paper="Tarzanagh et al., FedNest: federated bilevel, minimax, and compositional optimization, arXiv:2205.02215",
        note="",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "inner_steps": 2},
    )

    inner_rounds: Count = eqx.field(static=True, default=1)
    inner_steps: Count = eqx.field(static=True, default=1)
    outer_steps: Count = eqx.field(static=True, default=1)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            zero = optax.tree.zeros_like(state.hyper)
            return _State(state.params, state.hyper, zero, jnp.zeros((), jnp.int32))

        def anchor(state: _State, ctx: Context) -> PyTree:
            return problem.inner_gradient(state.params, state.hyper, full_batch(ctx.data.train))

        def inner(state: _State, pull: PyTree, ctx: Context) -> _State:
            def gradient(params: PyTree, key: PRNGKeyArray) -> PyTree:
                return self.inner_gradient(problem, params, state.hyper, replace(ctx, key=key))

            rate = self.rates(state.iteration)[1]
            return replace(state, params=corrected_steps(gradient, state.params, pull, rate, self.inner_steps, ctx.key))

        def outer(state: _State, pull: PyTree, ctx: Context) -> _State:
            def gradient(hyper: PyTree, key: PRNGKeyArray) -> PyTree:
                return problem.outer_gradients(state.params, hyper, minibatch(ctx.data.outer, self.batch_size, key))[1]

            rate = self.rates(state.iteration)[0]
            return replace(state, hyper=corrected_steps(gradient, state.hyper, pull, rate, self.outer_steps, ctx.key))

        def count(state: _State, ctx: Context) -> _State:
            return replace(state, iteration=state.iteration + 1)

        iteration = Sequence(
            Repeat(Sequence(mean(anchor, inner), average_fields("params")), self.inner_rounds, name="inner rounds"),
            self.hypergradient(problem),
            mean(lambda state, ctx: state.value, outer),
            average_fields("hyper"),
            Local(count),
        )
        return self.iterate(iteration, enter, average_fields("params", "hyper"))
