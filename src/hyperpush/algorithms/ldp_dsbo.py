"""LDP-DSBO: one loop, one noisy message per round, a finite privacy budget."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import down
from hyperpush.checks import check_integer, check_positive, is_jax_number, is_number
from hyperpush.data.batches import Ragged, capacity, everything
from hyperpush.errors import InvalidInput
from hyperpush.method import MethodInfo, Number
from hyperpush.networks import Network, matrix
from hyperpush.optimizers import Power
from hyperpush.privacy.accountant import Accountant, check_schedules
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism, mean_of, one_by_one, project
from hyperpush.privacy.sensitivity import VARIABLES, Constants, LoopSensitivity, Use, by_variable
from hyperpush.problem import Problem
from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Scope


class _State(eqx.Module):
    params: PyTree  # y
    hyper: PyTree  # x
    solution: PyTree  # z


def _as_powers(given: Any) -> Any:
    """One schedule for all variables, or one for each in their order; a number stands for a constant one."""
    if isinstance(given, Mapping):
        return _in_order("LDPDSBO.step_sizes", {name: _as_powers(each) for name, each in given.items()}, Power)
    return Power(check_positive("LDPDSBO.step_sizes", given)) if is_number(given) or is_jax_number(given) else given


def _as_mechanisms(given: Any) -> Any:
    """One mechanism for all variables, or one for each in their order."""
    return _in_order("LDPDSBO.noise", given, (Laplace, Gaussian)) if isinstance(given, Mapping) else given


def _in_order(field: str, given: Mapping[str, Any], kind: Any) -> tuple[Any, ...]:
    # A tuple: methods are hashed, and mappings cannot be.
    each = by_variable(field, given, VARIABLES, kind)
    return tuple(each[name] for name in VARIABLES)


def _by_name(values: Any) -> dict[str, Any]:
    """The value of each variable."""
    each = values if isinstance(values, tuple) else (values,) * len(VARIABLES)
    return dict(zip(VARIABLES, each, strict=True))


class LDPDSBO(Algorithm):
    """Locally differentially private decentralized stochastic bilevel optimization: one loop, noise on every message.

    Clients share the hypers x and the params y; f_i is a client's outer and g_i its inner cost, w the gossip weights.
    z ≈ H̄⁻¹ ∂_y f̄, y and x descend together; what is sent of them carries fresh noise ζ, ϑ, χ (Chen and Wang,
    ICML 2024):

        y_i += Σ_j w_ij (y_j + ζ_j − y_i) − λ_y ∂_y g_i
        z_i += Σ_j w_ij (z_j + ϑ_j − z_i) − λ_z (∂²_yy g_i z_i − ∂_y f_i)          then projected to ‖z‖ ≤ R
        x_i += Σ_j w_ij (x_j + χ_j − x_i) − λ_x (∂_x f_i − ∂²_xy g_i z_i)

    A client's own values enter clean, others' as they arrived. Derivatives are taken at the own values before.

    **Use it** where messages must be private and examples come as a stream: with λ ~ t^−v, noise ~ t^−ς and
    v/2 < ς < v it converges at a finite budget. **Avoid it** on a data set that is reused: its ε grows without end.

    Departures from the paper:

    1. Derivatives of single examples are clipped (`constants`), so that the budget holds without assumptions.
    2. `use` allows samples that are used once, and a data set that is reused. The paper takes running averages.

    Args:
        steps: Iterations, one round of gossip each.
        step_sizes: λ: a number, `hp.schedule("power", scale, exponent)`, or a mapping with one of them for each of "x",
            "y", "z".
        noise: `Laplace(…)` or `Gaussian(…)`, or a mapping with one for each of "x", "y", "z"; None sends clean values.
        constants: Clipping bounds of single examples, and R; None does not clip, for runs without noise.
        use: Which examples a round takes. `"running averages"`: all that have come so far; work grows with the round.
            `"once"`: only its own, the next `examples` of the stream. `"reused"`: the whole data set. The first two
            need streams of `steps` × `examples` rows, of training and outer examples alike.
        examples: Examples that come per round, at least 1.
        checked: Refuse step sizes and noise that do not converge at a finite budget.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="undirected",
        target="global",
        sends="params, hypers and one vector of the size of the params, with noise",
        paper="Chen and Wang, Locally differentially private decentralized stochastic bilevel optimization with "
        "guaranteed convergence accuracy, ICML 2024",
        fixed_point="x_G",
        private=True,
        example={"steps": 3, "step_sizes": 0.1, "use": "reused"},
    )

    steps: int = eqx.field(static=True)
    step_sizes: Number | Power | Mapping[str, Any] | tuple[Power, ...] = eqx.field(converter=_as_powers)
    noise: Mechanism | Mapping[str, Any] | tuple[Mechanism, ...] | None = eqx.field(
        converter=_as_mechanisms, default=None
    )
    constants: Constants | None = None
    use: Use = eqx.field(static=True, default="running averages")
    examples: int = eqx.field(static=True, default=1)
    checked: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        check_integer("LDPDSBO.steps", self.steps, minimum=0)
        check_integer("LDPDSBO.examples", self.examples, minimum=1)
        step_sizes = self._powers()
        if self.noise is None:
            return
        noise = self._mechanisms()
        if self.constants is None:
            raise InvalidInput("LDPDSBO.constants", None, "Constants: noise hides nothing of what is not clipped")
        exponents = [
            *(each.exponent for each in step_sizes.values()),
            *(each.scale.exponent for each in noise.values()),
        ]
        if self.checked and all(map(is_number, exponents)):  # what is traced was checked before
            check_schedules(step_sizes, noise, self.use)

    def _powers(self) -> dict[str, Power]:
        return _by_name(self.step_sizes)

    def _mechanisms(self) -> dict[str, Mechanism]:
        return _by_name(self.noise)

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

            slope, product_y, product_x = self._mean(inner, ctx.data.train, inner_bounds, ctx)
            pull, along_x = self._mean(outer, ctx.data.outer, outer_bounds, ctx)
            return slope, jax.tree.map(jnp.subtract, product_y, pull), jax.tree.map(jnp.subtract, along_x, product_x)

        def values(state: _State) -> tuple[PyTree, PyTree, PyTree]:
            return state.params, state.solution, state.hyper

        def send(state: _State, ctx: Context) -> PyTree:
            if self.noise is None:
                return values(state)
            keys, noise = jax.random.split(ctx.key, len(VARIABLES)), self._mechanisms()
            return tuple(
                jax.tree.map(jnp.add, value, noise[name].noise(key, value, ctx.round))
                for value, name, key in zip(values(state), VARIABLES, keys, strict=True)
            )

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            mixed, along, step_sizes = inbox.mix(values(state)), directions(state, ctx), self._powers()
            y, z, x = (
                down(value, slope, step_sizes[name](ctx.round))
                for value, slope, name in zip(mixed, along, VARIABLES, strict=True)
            )
            return _State(y, x, z if self.constants is None else project(z, self.constants.R))

        return Scope(
            Repeat(Exchange(send, receive, weights="gossip"), self.steps, name=LOOP),
            enter=lambda state, ctx: _State(state.params, state.hyper, jax.tree.map(jnp.zeros_like, state.params)),
            leave=lambda before, state, ctx: BilevelState(state.params, state.hyper),
        )

    def _mean(
        self,
        function: Callable[[PyTree], tuple[PyTree, ...]],
        data: PyTree,
        bounds: tuple[Number, ...] | None,
        ctx: Context,
    ) -> tuple[PyTree, ...]:
        """The mean of `function` over the examples of a round, of each clipped to one bound per result if there are."""
        batch, mask = everything(data), None
        if self.use != "reused":
            padded = isinstance(data, Ragged)
            if padded or capacity(data) < self.steps * self.examples:
                given = "clients with different numbers of examples" if padded else f"{capacity(data)} rows"
                raise InvalidInput("data", given, f"streams of at least {self.steps * self.examples} rows")
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
        examples = check_integer("rows", rows, minimum=1) if self.use == "reused" else self.examples
        sender = LoopSensitivity(self.constants, self._powers(), params_size, hypers_size, self.use, others, examples)
        return Accountant(sender, self._mechanisms())
