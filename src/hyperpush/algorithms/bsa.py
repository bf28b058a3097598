"""BSA: bilevel stochastic approximation on one machine, the reference for all other algorithms."""

import math
from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from hyperpush.algorithms.base import BilevelState
from hyperpush.algorithms.pooled import PooledDescent, PooledState, average_fields
from hyperpush.base.ranges import Count, Probability
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Context, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class _State(PooledState):
    first: PyTree  # the params at the start


class BSA(PooledDescent):
    """Bilevel stochastic approximation: in every iteration several inner steps, then one outer step.

    All clients share the params y and the hypers x. Let g be the mean inner cost, F the mean outer cost, H = ∂²_yy g
    and J = ∂²_xy g. Iteration k = 0, 1, … is (Ghadimi and Wang, arXiv:1802.02246)

        repeat t_k = ⌈inner_steps·(k + 1)^growth⌉ times:
            y ← y − β_t ∂_y g(x, y)
        x ← x − α_k (∂_xF − J H⁻¹ ∂_yF)(x, y)

    α is the outer and β the inner step size. A schedule of α counts k; one of β counts t from 0 in every iteration.

    **Use it** as the reference for methods on networks: it takes exact averages. **Avoid it** where a server is too
    expensive: iteration k takes t_k + 2 averages, and the inverse takes more.

    Departures from the paper:

    1. `inverse` is conjugate gradients on all examples by default. The paper draws a random `Neumann`.
    2. The hypers are not projected to a set.

    Args:
        steps: Outer iterations. With 0 every client gets the mean of the initial values.
        outer_step_size: α, above 0; a number or a schedule. Halve it if the run diverges.
        inner_step_size: β, above 0; a number or a schedule. Constant steps need β < 2/λ_max(H).
        inner_steps: Inner steps of the first iteration, at least 1.
        growth: Exponent from 0 to 1. 0 takes `inner_steps` in every iteration; the default ½ is the paper's. A new
            value recompiles the program.
        inverse: Method that applies H⁻¹: `ConjugateGradients(steps)` or `Neumann(terms, step_size)`.
        batch_size: Examples per estimate, drawn anew each time; None uses all. A number needs `inverse=Neumann(…)`.
        restart: Start the inner steps of every iteration from the first params instead of the last ones.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        It ends at the minimizer of the mean outer cost, x_G.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.BSA(steps=100, outer_step_size=0.2, inner_step_size=0.3, inner_steps=3)
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 1e-3)
        True
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="global",
        sends="vectors of the size of the params, and the hypers",
        paper="Ghadimi and Wang, Approximation methods for bilevel programming, arXiv:1802.02246",
        note="one machine with all data, or exact averages",
        fixed_point="x_G",
        example={"steps": 3, "outer_step_size": 0.1, "inner_step_size": 0.1, "inner_steps": 2},
    )

    inner_steps: Count = eqx.field(static=True, default=1)
    growth: Probability = eqx.field(static=True, converter=float, default=0.5)
    restart: bool = eqx.field(static=True, default=False)

    def program(self, problem: Problem) -> Node:
        def enter(state: BilevelState, ctx: Context) -> _State:
            return _State(state.params, state.hyper, optax.tree.zeros_like(state.hyper), state.params)

        def begin(state: _State, ctx: Context) -> _State:
            return replace(state, params=state.first) if self.restart else state

        def times(state: _State, ctx: Context) -> Int[Array, ""]:
            return jnp.ceil(self.inner_steps * (ctx.round + 1.0) ** self.growth).astype(jnp.int32)

        solve = Repeat(self.descend_inner(problem), self.inner_steps)
        if self.growth > 0:
            most = math.ceil(self.inner_steps * self.steps**self.growth) + 1  # + 1 against rounding
            solve = Repeat(solve.body, most, times=times)
        improve = Sequence(self.hypergradient(problem), self.descend_outer())
        start = average_fields("params", "hyper", "first")
        return self.iterate(Sequence(Local(begin), solve, improve), enter, start)
