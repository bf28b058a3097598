"""LDP-DSBO: locally private bilevel optimization with one loop, a noisy message per round and a finite budget."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hyperpush.algorithms.base import Algorithm, BilevelState, descend
from hyperpush.base.checks import check_integer, check_positive, is_jax_number, is_number
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number
from hyperpush.base.ranges import Count, Whole
from hyperpush.base.schedules import Power
from hyperpush.data.batches import Ragged, capacity, full_batch
from hyperpush.methods.base import MethodInfo
from hyperpush.networks import Network, matrix
from hyperpush.privacy.accountant import Accountant, check_schedules
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism, mean_of, one_by_one, project
from hyperpush.privacy.sensitivity import VARIABLES, Constants, LoopSensitivity, Use, by_variable
from hyperpush.programs import Context, Exchange, Inbox, Node
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    params: PyTree  # y
    hyper: PyTree  # x
    solution: PyTree  # z, which approaches H̄⁻¹ ∂_y f̄


def _as_powers(given: Any) -> Any:
    """Return one schedule for all variables, or a tuple with one per variable; a number is a constant schedule."""
    if isinstance(given, Mapping):
        return _in_order("LDPDSBO.step_sizes", {name: _as_powers(each) for name, each in given.items()}, Power)
    return Power(check_positive("LDPDSBO.step_sizes", given)) if is_number(given) or is_jax_number(given) else given


def _as_mechanisms(given: Any) -> Any:
    """Return one mechanism for all variables, or a tuple with one per variable."""
    return _in_order("LDPDSBO.noise", given, (Laplace, Gaussian)) if isinstance(given, Mapping) else given


def _in_order(field: str, given: Mapping[str, Any], kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    # A tuple, because methods are hashed and mappings are not hashable.
    return tuple(map(by_variable(field, given, VARIABLES, kind).__getitem__, VARIABLES))


def _by_name(values: Any) -> dict[str, Any]:
    """Return the value of each of the variables x, y and z by name; a single value is that of all variables."""
    each = values if isinstance(values, tuple) else (values,) * len(VARIABLES)
    return dict(zip(VARIABLES, each, strict=True))


class LDPDSBO(Algorithm):
    """Locally differentially private decentralized stochastic bilevel optimization: one loop, noise on every message.

    Clients share the hypers x and the params y. Client i has the outer cost f_i and the inner cost g_i; w are the
    gossip weights. The variables y, x and z ≈ H̄⁻¹ ∂_y f̄, with the mean inner Hessian H̄, descend together. Every
    message carries fresh noise: ζ on y, ϑ on z and χ on x (Chen and Wang, ICML 2024):

        y_i += Σ_j w_ij (y_j + ζ_j − y_i) − λ_y ∂_y g_i
        z_i += Σ_j w_ij (z_j + ϑ_j − z_i) − λ_z (∂²_yy g_i z_i − ∂_y f_i)          then projected to ‖z‖ ≤ R
        x_i += Σ_j w_ij (x_j + χ_j − x_i) − λ_x (∂_x f_i − ∂²_xy g_i z_i)

    A client uses its own values without noise, and the values of others as received. Derivatives are taken at the
    client's values before the round.

    **Use it** where messages must be private and examples come as a stream. With λ ~ t^−v, noise ~ t^−ς and
    v/2 < ς < v it converges at a finite budget. **Avoid it** on a reused data set, where ε grows without bound. On a
    task of `task.private(…)`, which adds noise itself, use `noise=None`.

    Departures from the paper:

    1. Derivatives of single examples are clipped (`constants`), so the budget holds without assumptions.
    2. `use` also allows samples that are used once, and a reused data set. The paper takes running averages.

    Args:
        steps: Iterations, one round of gossip each. With 0 all values stay as they are.
        step_sizes: λ: a number, `hp.schedule("power", scale, exponent)`, or a mapping with one of these for each of
            "x", "y", "z".
        noise: `Laplace(…)` or `Gaussian(…)`, or a mapping with one for each of "x", "y", "z"; None sends clean values.
        constants: Clipping bounds of single examples, and R. None does not clip; only for runs without noise.
        use: Examples of a round. `"running averages"`: all that have arrived so far; work grows with the round.
            `"once"`: only the next `examples` rows of the stream. `"reused"`: the whole data set. The first two need
            streams of `steps` × `examples` rows, for training and outer examples alike.
        examples: Examples that arrive per round, at least 1.
        checked: True refuses step sizes and noise that do not converge at a finite budget.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Without noise and with falling steps it approaches the minimizer of the mean outer cost, x_G.

        >>> import hyperpush as hp
        >>> from hyperpush.tasks.quadratic import outer_fixed_points
        >>> task = hp.tasks.quadratic(4, seed=0, common=True)
        >>> method = hp.algorithms.LDPDSBO(10_000, hp.schedule("power", 0.5, 0.8), use="reused")
        >>> found = hp.solve(task, method, hp.networks.Ring(4), key=0, every=1000)
        >>> bool(abs(found.hypers - outer_fixed_points(task.train, task.validation)["x_G"]).max() < 0.02)
        True
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

    steps: Whole = eqx.field(static=True)
    step_sizes: Number | Power | Mapping[str, Any] | tuple[Power, ...] = eqx.field(converter=_as_powers)
    noise: Mechanism | Mapping[str, Any] | tuple[Mechanism, ...] | None = eqx.field(
        converter=_as_mechanisms, default=None
    )
    constants: Constants | None = None
    use: Use = eqx.field(static=True, default="running averages")
    examples: Count = eqx.field(static=True, default=1)
    checked: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        if self.noise is None:
            return
        if self.constants is None:
            raise InvalidInput("LDPDSBO.constants", None, "Constants(…): noise protects only clipped derivatives")
        step_sizes, noise = _by_name(self.step_sizes), _by_name(self.noise)
        powers = *step_sizes.values(), *(each.scale for each in noise.values())
        if self.checked and all(is_number(each.exponent) for each in powers):  # traced numbers were checked before
            check_schedules(step_sizes, noise, self.use)

    @property
    def hides(self) -> bool:
        return self.noise is not None

    def check(self, task: Any, network: Any = None) -> None:
        """Refuse `noise` on a private task, whose gradients and products already get noise."""
        super().check(task, network)
        if self.noise is not None and task.privacy is not None:
            allowed = "noise=None on a task of task.private(…), which clips and adds noise itself; or the plain task"
            raise InvalidInput("LDPDSBO.noise", "noise on a private task", allowed)

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
            return slope, optax.tree.sub(product_y, pull), optax.tree.sub(along_x, product_x)

        def values(state: _State) -> tuple[PyTree, PyTree, PyTree]:
            return state.params, state.solution, state.hyper

        def send(state: _State, ctx: Context) -> PyTree:
            if self.noise is None:
                return values(state)
            keys, noise = jax.random.split(ctx.key, len(VARIABLES)), _by_name(self.noise).values()
            return tuple(
                optax.tree.add(value, mechanism.noise(key, value, ctx.round))
                for value, mechanism, key in zip(values(state), noise, keys, strict=True)
            )

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            rates = [step_size(ctx.round) for step_size in _by_name(self.step_sizes).values()]
            y, z, x = map(descend, inbox.mix(values(state)), directions(state, ctx), rates)
            return _State(y, x, z if self.constants is None else project(z, self.constants.R))

        def enter(state: BilevelState, ctx: Context) -> _State:
            return _State(state.params, state.hyper, optax.tree.zeros_like(state.params))

        return self.iterate(Exchange(send, receive, weights="gossip"), enter)

    def _mean(
        self,
        function: Callable[[PyTree], tuple[PyTree, ...]],
        data: PyTree,
        bounds: tuple[Number, ...] | None,
        ctx: Context,
    ) -> tuple[PyTree, ...]:
        """Return the mean of `function` over the examples of a round.

        Each example's results are clipped to `bounds`, one per result; None does not clip.
        """
        batch, mask = full_batch(data), None
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
        """Return the accountant of the clients' privacy on this network.

        `params` and `hypers` have the clients on axis 0. `rows` is the smallest number of rows that a client reuses.
        """
        if self.noise is None or self.constants is None:
            raise InvalidInput("LDPDSBO.noise", None, "a mechanism: a run without noise is not private")
        others = np.zeros(network.clients)  # always a valid bound
        if not network.varying:
            others = 1 - np.diag(np.asarray(matrix(network, jax.random.key(0), 0, "gossip"), np.float64))
        examples = check_integer("rows", rows, minimum=1) if self.use == "reused" else self.examples
        step_sizes, inner, outer = _by_name(self.step_sizes), optax.tree.size(params), optax.tree.size(hypers)
        sizes = inner // network.clients, outer // network.clients
        sender = LoopSensitivity(self.constants, step_sizes, sizes[0], sizes[1], self.use, others, examples)
        return Accountant(sender, _by_name(self.noise))
