"""LDP-DSBO: one loop, one noisy message per round, a finite privacy budget."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import down
from hyperpush.checks import whole, yes_or_no
from hyperpush.data.batches import Ragged, capacity, everything
from hyperpush.errors import InvalidInput
from hyperpush.estimators.state import Declaration
from hyperpush.networks import Network, matrix
from hyperpush.privacy.accountant import Accountant, check_schedules
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism, mean_of, one_by_one, project
from hyperpush.privacy.schedules import Power
from hyperpush.privacy.sensitivity import VARIABLES, Constants, SingleLoop, Use, by_variable
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Node, Repeat, Within


class _State(eqx.Module):
    params: PyTree  # y
    hyper: PyTree  # x
    solution: PyTree  # z


class LDPDSBO(eqx.Module):
    """y, z ≈ H̄^{-1} ∂_y f̄ and x descend together; what is sent of them carries fresh noise (ζ, ϑ, χ).

        y_i += Σ_j w_ij (y_j + ζ_j − y_i) − λ_y ∂_y g_i
        z_i += Σ_j w_ij (z_j + ϑ_j − z_i) − λ_z (∂²_yy g_i z_i − ∂_y f_i)          then projected to ‖z‖ ≤ R
        x_i += Σ_j w_ij (x_j + χ_j − x_i) − λ_x (∂_x f_i − ∂²_xy g_i z_i)

    x are the hypers and y the params of a client, f its outer and g its inner cost, w the gossip weights. A client's
    own values enter clean, others' as they arrived. Derivatives are taken at the own values before. Chen, Wang 2024.

    `steps` are λ and `noise` the mechanism, each one for all or one for each of "x", "y", "z". `constants` holds the
    clipping bounds of single examples and R; None: no clipping, for runs without noise. `use` says which examples a
    round takes: `"running averages"` all that have come so far (work grows with the round, the paper's choice);
    `"once"` only its own, the next `examples` of the stream; `"reused"` the whole data set, always. The first two need
    streams of iterations × `examples` rows, of inner and outer examples alike.

    Steps ~ t^−v and noise ~ t^−ς with v/2 < ς < v converge at a finite budget; others are refused, unless
    `checked=False`. `accountant(…)` tells the budget.
    """

    declares: ClassVar[Declaration] = Declaration(
        network="undirected",
        target="global: everybody's mean outer cost",
        sends="params, hypers and one vector of the size of the params, with noise",
        matrices=False,
        paper="Chen and Wang, Locally differentially private decentralized stochastic bilevel optimization",
        needs="undirected",
        fixed_point="x_G",
    )

    iterations: int = eqx.field(static=True)
    steps: tuple[Power, Power, Power]  # in the order of VARIABLES
    noise: tuple[Mechanism, Mechanism, Mechanism] | None
    constants: Constants | None
    use: Use = eqx.field(static=True)
    examples: int = eqx.field(static=True)
    checked: bool = eqx.field(static=True)

    def __init__(
        self,
        iterations: int,
        steps: Power | Mapping[str, Power],
        noise: Mechanism | Mapping[str, Mechanism] | None = None,
        constants: Constants | None = None,
        use: Use = "running averages",
        examples: int = 1,
        checked: bool = True,
    ):
        self.iterations = whole("LDPDSBO.iterations", iterations, least=0)
        each_step = by_variable("LDPDSBO.steps", steps, VARIABLES, Power)
        y, z, x = VARIABLES
        self.steps = each_step[y], each_step[z], each_step[x]
        self.noise = None
        if noise is not None:
            each = by_variable("LDPDSBO.noise", noise, VARIABLES, (Laplace, Gaussian))
            self.noise = each[y], each[z], each[x]
        self.constants = constants
        if use not in get_args(Use):
            raise InvalidInput("LDPDSBO.use", use, ", ".join(map(repr, get_args(Use))))
        self.use = use
        self.examples = whole("LDPDSBO.examples", examples, least=1)
        self.checked = yes_or_no("LDPDSBO.checked", checked)
        if self.noise is not None and constants is None:
            raise InvalidInput("LDPDSBO.constants", None, "Constants: noise hides nothing of what is not clipped")
        if self.noise is not None and checked:
            check_schedules(_named(self.steps), _named(self.noise), use)

    def program(self, problem: Problem) -> Node:
        inner_bounds = outer_bounds = None
        if self.constants is not None:
            inner_bounds = self.constants.C_y, *self.constants.products
            outer_bounds = self.constants.C_b, self.constants.C_x

        def directions(state: _State, ctx: Context) -> tuple[PyTree, PyTree, PyTree]:
            x, y, z = state.hyper, state.params, state.solution

            def inner(batch: PyTree) -> PyTree:
                return problem.inner_gradient(y, x, batch), *problem.products(y, x, batch, z)

            def outer(batch: PyTree) -> PyTree:
                return problem.outer_gradients(y, x, batch)

            slope, product_y, product_x = self._mean(inner, ctx.data.inner, inner_bounds, ctx)
            pull, along_x = self._mean(outer, ctx.data.outer, outer_bounds, ctx)
            return slope, jax.tree.map(jnp.subtract, product_y, pull), jax.tree.map(jnp.subtract, along_x, product_x)

        def values(state: _State) -> tuple[PyTree, PyTree, PyTree]:
            return state.params, state.solution, state.hyper

        def send(state: _State, ctx: Context) -> PyTree:
            if self.noise is None:
                return values(state)
            keys = jax.random.split(ctx.key, len(VARIABLES))
            return tuple(
                jax.tree.map(jnp.add, value, mechanism.noise(key, value, ctx.round))
                for value, mechanism, key in zip(values(state), self.noise, keys, strict=True)
            )

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            y, z, x = (
                down(mixed, along, step(ctx.round))
                for mixed, along, step in zip(inbox.mix(values(state)), directions(state, ctx), self.steps, strict=True)
            )
            return _State(y, x, z if self.constants is None else project(z, self.constants.R))

        return Within(
            Repeat(Exchange(send, receive, weights="gossip"), self.iterations, name=LOOP),
            enter=lambda state, ctx: _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.params)),
            leave=lambda before, state, ctx: Bilevel(state.params, state.hyper),
        )

    def _mean(
        self,
        function: Callable[[PyTree], tuple[PyTree, ...]],
        data: PyTree,
        bounds: tuple[float, ...] | None,
        ctx: Context,
    ) -> tuple[PyTree, ...]:
        """The mean of `function` over the examples of a round, of each clipped to one bound per result if there are."""
        batch, mask = everything(data), None
        if self.use != "reused":
            padded = isinstance(data, Ragged)
            if padded or capacity(data) < self.iterations * self.examples:
                given = "clients with different numbers of examples" if padded else f"{capacity(data)} rows"
                raise InvalidInput("data", given, f"streams of at least {self.iterations * self.examples} rows")
            first = ctx.round * self.examples
            if self.use == "once":
                batch = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, self.examples), data)
            else:
                mask = (jnp.arange(capacity(data)) < first + self.examples).astype(jnp.zeros(()).dtype)
        if bounds is None and mask is None:
            return function(batch)
        one, rows, real = one_by_one(function, batch)

        def each(row: PyTree) -> tuple[PyTree, ...]:
            parts = one(row)
            return parts if bounds is None else tuple(map(project, parts, bounds))

        return mean_of(jax.vmap(each)(rows), real if mask is None else mask)

    def accountant(self, network: Network, params: PyTree, hypers: PyTree, rows: int | None = None) -> Accountant:
        """What the clients' privacy costs on this network.

        `params` and `hypers` have the clients on axis 0. `rows` is how many a client reuses, at least.
        """
        if self.noise is None or self.constants is None:
            raise InvalidInput("LDPDSBO.noise", None, "a mechanism: without noise there is no privacy")
        params_size, hypers_size = (sum(leaf[0].size for leaf in jax.tree.leaves(tree)) for tree in (params, hypers))
        others = np.zeros(network.clients)  # always a valid bound
        if not network.varying:
            others = 1 - np.diag(np.asarray(matrix(network, jax.random.key(0), 0, "gossip"), np.float64))
        examples = whole("rows", rows, least=1) if self.use == "reused" else self.examples
        steps = _named(self.steps)
        sender = SingleLoop(self.constants, steps, params_size, hypers_size, self.use, others, examples)
        return Accountant(sender, _named(self.noise))


def _named(values: tuple[Any, Any, Any]) -> dict[str, Any]:
    return dict(zip(VARIABLES, values, strict=True))
