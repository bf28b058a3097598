"""Sensitivity of a client's messages to one example, given all earlier messages.

Adjacent data differ in one example of one client. Runs on both are compared under the same *observations*, the noisy
messages of all clients. Given the observations, a client's messages are functions of its data alone. So privacy losses
add up over rounds, although other clients react to the messages. All bounds are ℓ2 norms; rounds count from 0.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.base.numbers import Number, as_number
from hyperpush.base.schedules import Power

Use = Literal["running averages", "once", "reused"]
Numbers = Float[np.ndarray, " rounds *clients"]

VARIABLES = ("y", "z", "x")


class Constants(eqx.Module):
    """Bounds on every single example's gradients and products, which `LoopSensitivity` uses.

    x are the hypers, y the params, z is the vector in the products, g the inner and f the outer cost. Bounds marked as
    clips are enforced by the algorithm. The others are properties of the costs. `math.inf` stands for an unknown one;
    then the guarantee rests on clipping alone. A client whose state differs may then send a whole clipped gradient in
    another direction.

    Args:
        C_y: ‖∂_y g‖ ≤ C_y, a clip, above 0.
        C_b: ‖∂_y f‖ ≤ C_b, a clip, 0 or more.
        C_x: ‖∂_x f‖ ≤ C_x, a clip, 0 or more.
        R: ‖z‖ ≤ R, above 0; z is projected to this norm.
        C_H: ‖∂²_yy g‖ ≤ C_H in the operator norm.
        C_J: ‖∂²_xy g‖ ≤ C_J in the operator norm.
        L_H: Lipschitz constant of ∂²_yy g in (x, y).
        L_J: Lipschitz constant of ∂²_xy g in (x, y).
        L_b: Lipschitz constant of ∂_y f in (x, y).
        L_fx: Lipschitz constant of ∂_x f in (x, y).
        C_Hz: ‖∂²_yy g z‖ ≤ C_Hz, a clip; None takes C_H·R, which must be finite.
        C_Jz: ‖∂²_xy g z‖ ≤ C_Jz, a clip; None takes C_J·R, which must be finite.

    Raises:
        InvalidInput: A constant is negative, or a clip is not finite.

    Example:
        >>> import hyperpush as hp
        >>> constants = hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=2, C_H=1, C_J=0.5)
        >>> print(constants.clips["z"])  # C_H·R + C_b
        3.0
    """

    C_y: Number = eqx.field(converter=as_number)
    C_b: Number = eqx.field(converter=as_number)
    C_x: Number = eqx.field(converter=as_number)
    R: Number = eqx.field(converter=as_number)
    C_H: Number = eqx.field(converter=as_number, default=math.inf)
    C_J: Number = eqx.field(converter=as_number, default=math.inf)
    L_H: Number = eqx.field(converter=as_number, default=math.inf)
    L_J: Number = eqx.field(converter=as_number, default=math.inf)
    L_b: Number = eqx.field(converter=as_number, default=math.inf)
    L_fx: Number = eqx.field(converter=as_number, default=math.inf)
    C_Hz: Number | None = eqx.field(converter=as_number, default=None)
    C_Jz: Number | None = eqx.field(converter=as_number, default=None)

    def __check_init__(self):
        check_positive("Constants.R", self.R)
        check_positive("Constants.C_y", self.C_y)
        for name in ("C_y", "C_b", "C_x", "C_H", "C_J", "L_H", "L_J", "L_b", "L_fx"):
            given, clips = getattr(self, name), name in ("C_y", "C_b", "C_x")
            if not 0 <= given <= math.inf or (clips and math.isinf(given)):
                raise InvalidInput(f"Constants.{name}", given, "a finite number, 0 or more" if clips else "0 or more")
        for name, smooth in (("C_Hz", self.C_H), ("C_Jz", self.C_J)):
            given = getattr(self, name)
            if given is None and math.isinf(smooth):
                raise InvalidInput(f"Constants.{name}", given, f"a finite number where {name[:-1]} is not known")
            if given is not None and not 0 <= given < math.inf:
                raise InvalidInput(f"Constants.{name}", given, "a finite number, 0 or more")

    @property
    def products(self) -> tuple[Number, Number]:
        """Upper bounds on the products ‖∂²_yy g z‖ and ‖∂²_xy g z‖."""
        along_y = self.C_H * self.R if self.C_Hz is None else self.C_Hz
        along_x = self.C_J * self.R if self.C_Jz is None else self.C_Jz
        return along_y, along_x

    @property
    def clips(self) -> dict[str, Number]:
        """Largest norm of one example's contribution to the update direction of each variable."""
        along_y, along_x = self.products
        return {"y": self.C_y, "z": along_y + self.C_b, "x": self.C_x + along_x}

    @property
    def slopes(self) -> Float[np.ndarray, "3 3"]:
        """Lipschitz constants of each variable's update direction (row) in each variable (column); order y, z, x."""
        z = self.L_H * self.R + self.L_b
        x = self.L_J * self.R + self.L_fx
        return np.array([[self.C_H, 0, self.C_J], [z, self.C_H, z], [x, self.C_J, x]], float)


def _as_steps(given: Power | Mapping[str, Power]) -> dict[str, Power]:
    return by_variable("LoopSensitivity.steps", given, VARIABLES, Power)


def _at_least_one(name: str) -> Callable[[int], int]:
    return lambda given: check_integer(f"LoopSensitivity.{name}", given, minimum=1)


def _as_weights(given: ArrayLike) -> Float[np.ndarray, "*clients"]:
    weights = np.asarray(given, float)
    if weights.ndim > 1 or not np.all((weights >= 0) & (weights <= 1)):
        raise InvalidInput("LoopSensitivity.others", given, "weights from 0 to 1: one, or one per client")
    return weights


class LoopSensitivity(eqx.Module):
    """Sensitivity of LDP-DSBO's messages to one example, by variable and round.

    A message holds the variables x, y and z with noise. The sensitivity Δ of each variable follows the recursion

        Δ⁺ = κΔ + λ_t min(s_t + AΔ, 2C),   Δ = 0 at first,   Δ_z ≤ 2R

    Here κ is the weight that the client keeps for its own value, and λ_t is the step size. C are the clips and A the
    slopes of `constants`. s_t is the direct effect of the changed example. The recursion holds because own values enter
    without noise and others' values are observed (Chen and Wang, ICML 2024).

    **Use it** through `LDPDSBO.accountant`, or for your own loop of this form. **Avoid it** for private tasks.

    Departures from the paper:

    1. Clips bound every change by 2C, so smoothness constants are optional.
    2. Mini-batches of a reused data set count as if each contained the changed example.

    Args:
        constants: Bounds on every example's gradients and products, which give the clips C and slopes A.
        steps: λ: one schedule `hp.schedule("power", …)` for all variables, or one for each of "x", "y", "z".
        params: Dimension of y and of z, at least 1.
        hypers: Dimension of x, at least 1.
        use: `"running averages"` over all samples so far, each re-evaluated at the current point: s_t = 2C/(t + 1).
            `"once"`: every sample in one round, s_t = 2C in that round. `"reused"`: a fixed data set, s_t = 2C always.
        others: 1 − κ, the weight of others' messages, from 0 to 1: a number, or one per client. 0 is always a valid
            bound.
        examples: Examples per round, at least 1; s_t is divided by this number.

    Raises:
        InvalidInput: An option is out of range; the message names it.

    Example:
        >>> import hyperpush as hp
        >>> constants = hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=2, C_H=0, C_J=0, L_H=0, L_J=0, L_b=0, L_fx=0)
        >>> sender = hp.privacy.LoopSensitivity(constants, hp.schedule("power", 0.1), params=5, hypers=5, use="once")
        >>> print(sender.sensitivities(3)["y"])  # the first sample moves y by 2·0.1, and stays in it
        [0.  0.2 0.2]
    """

    constants: Constants
    steps: dict[str, Power] = eqx.field(converter=_as_steps)
    params: int = eqx.field(converter=_at_least_one("params"))
    hypers: int = eqx.field(converter=_at_least_one("hypers"))
    use: Use = "running averages"
    others: Float[np.ndarray, "*clients"] = eqx.field(converter=_as_weights, default=0.0)
    examples: int = eqx.field(converter=_at_least_one("examples"), default=1)

    def __check_init__(self):
        if self.use not in get_args(Use):
            raise InvalidInput("LoopSensitivity.use", self.use, ", ".join(map(repr, get_args(Use))))

    @property
    def dims(self) -> dict[str, int]:
        return {"y": self.params, "z": self.params, "x": self.hypers}

    def sensitivities(self, rounds: int, changed: int = 0) -> dict[str, Numbers]:
        """Return Δ of each variable by round, if the example that is first used in round `changed` differs.

        Round 0 is the worst case. With running averages, later changes have smaller s_t. With samples used once, later
        changes meet smaller steps, and cost less if no noise falls faster than a step size.
        """
        t = np.arange(check_integer("rounds", rounds, minimum=1))
        check_integer("changed", changed, minimum=0)
        share = {"running averages": 1 / (t + 1), "once": t == changed, "reused": np.ones(rounds)}[self.use]
        clips = self._most()
        sources = np.where(t >= changed, share / self.examples, 0)[:, None] * clips
        steps = np.stack([self.steps[name](t) for name in VARIABLES], axis=1)
        widest = np.array([np.inf, 2 * self.constants.R, np.inf])
        with jax.enable_x64(True):
            found = np.asarray(_recursion(sources, steps, 1 - self.others, self.constants.slopes, clips, widest))
        return {name: found[:, number] for number, name in enumerate(VARIABLES)}

    def tail(self, start: int, deltas: Mapping[str, Any], noise: Mapping[str, Power], order: Literal[1, 2]) -> Any:
        """Return an upper bound on Σ_{t ≥ start} (Δ_t/noise_t)^order of the variables in `noise`; it may be infinite.

        `deltas` holds the Δ of all variables at `start`. Steps fall like (t + 1)^−v, and noise falls like (t + 1)^−ς.
        Let m_t be the maximum over variables of Δ_t (t + 1)^v / u, for any u > 0. It satisfies m⁺ ≤ q m + σ/(t + 1),
        with q and σ taken at `start`. By convexity, with p = `order`,

            (m⁺)^p ≤ q m^p + (1 − q)(σ/(1 − q)(t + 1))^p

        The weights (t + 1)^{p(ς − v)} grow at most by a factor r per round. Let E be the sum of m^p with these weights.
        Then E(1 − rq) is at most the first term of E plus r times the sum of the sources.
        """
        at, clips, slopes = start + 1, self._most(), self.constants.slopes
        v, size = (np.array([getattr(self.steps[name], of) for name in VARIABLES]) for of in ("exponent", "scale"))
        u = size * np.maximum(clips, 1e-3 * clips.max()) / self.examples
        with np.errstate(invalid="ignore"):  # ∞·0: an unknown constant gives no bound
            spread = size * np.sum(slopes * u * at**-v, axis=1) / u
            rate = (1 + 1 / at) ** v.max() * (1 - self.others + spread.max())
        rate = np.where(np.isnan(rate), np.inf, rate)
        source = (1 + 1 / at) ** v.max() * np.max(size * clips / self.examples / u) * (self.use != "once")
        first = np.max([np.asarray(deltas[name]) * at ** v[i] / u[i] for i, name in enumerate(VARIABLES)], axis=0)
        total = np.zeros(self.others.shape)
        for i, name in enumerate(VARIABLES):
            if name not in noise:
                continue
            power = order * (noise[name].exponent - v[i])
            growth = (1 + 1 / at) ** max(power, 0)
            fall = power - order  # Σ_{t ≥ start} (t + 1)^fall ≤ its first term and an integral
            rest = at**fall + at ** (fall + 1) / -(fall + 1) if fall < -1 else np.inf
            rest = source**order * rest if source else 0.0
            with np.errstate(divide="ignore", invalid="ignore"):
                bound = (at**power * first**order + growth * rest * (1 - rate) ** (1 - order)) / (1 - growth * rate)
            total += np.where(growth * rate < 1, (u[i] / noise[name].scale) ** order * bound, np.inf)
        return total

    def _most(self) -> Float[np.ndarray, " 3"]:
        return 2.0 * np.array([self.constants.clips[name] for name in VARIABLES])


@jax.jit
def _recursion(
    sources: Float[Array, "rounds 3"],
    steps: Float[Array, "rounds 3"],
    keep: Float[Array, "*clients"],
    slopes: Float[Array, "3 3"],
    clips: Float[Array, " 3"],
    widest: Float[Array, " 3"],
) -> Float[Array, "rounds 3 *clients"]:
    def column(values: Array) -> Array:
        return values.reshape(*values.shape, *(1,) * keep.ndim)

    slopes, clips, widest = column(slopes), column(clips), column(widest)

    def advance(delta: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        source, step = now
        spread = jnp.where(delta == 0, 0, slopes * delta)  # not ∞·0
        difference = jnp.minimum(column(source) + jnp.sum(spread, axis=1), clips)
        return jnp.minimum(keep * delta + column(step) * difference, widest), delta

    return jax.lax.scan(advance, jnp.zeros((3, *keep.shape)), (sources, steps))[1]


def by_variable(field: str, given: Any, names: Any, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Return one value per name; a single value holds for all names."""
    if isinstance(given, kind):
        return dict.fromkeys(names, given)
    fits = isinstance(given, Mapping) and set(given) == set(names) and all(isinstance(v, kind) for v in given.values())
    if not fits:
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise InvalidInput(field, given, f"a {kinds}, or one for each of {', '.join(names)}")
    return dict(given)
