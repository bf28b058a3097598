"""Compute the privacy budget ε of every client, by round and in the limit of infinitely many rounds."""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Float

from hyperpush.base.checks import check_integer, check_positive, require
from hyperpush.base.errors import InvalidInput
from hyperpush.base.schedules import Power
from hyperpush.privacy import ASSUMPTION
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism
from hyperpush.privacy.sensitivity import LoopSensitivity, Use, by_variable

PerClient = Float[np.ndarray, "*clients"]
Losses = dict[str, Float[np.ndarray, " rounds *clients"]]

# Limits of composition by privacy loss distributions. Beyond them it takes minutes, and Rényi's bound is only a few
# per cent larger.
MOST_DISTRIBUTIONS, MOST_RANGE = 64, 100.0


class Accountant(eqx.Module):
    """Privacy cost ε of LDP-DSBO's noisy messages for every client, after some rounds and in the limit.

    Let Δ_{v,t} be the ℓ2 sensitivity of variable v in the message of round t, and ν_{v,t} the scale of its noise.
    Laplace noise needs the ℓ1 sensitivity, which is at most √dim_v times as large. With Laplace noise the losses of all
    messages add up to a pure ε (Chen and Wang, ICML 2024):

        ε = Σ_t Σ_v √dim_v Δ_{v,t} / ν_{v,t}

    Pure ε requires Laplace noise. With Gaussian noise, and whenever `delta` is given, the result is the ε of (ε, δ).
    Every result holds one ε per client of the sender. Each ε is an upper bound for ideal real-valued noise only: see
    `assumes`.

    **Use it** for messages that are not releases of a private task; `LDPDSBO.accountant` makes it. **Avoid it** for
    private tasks: `hp.budget` counts their releases.

    Args:
        sender: Sensitivity of the messages to one example.
        noise: One mechanism for all variables of the sender, or one for each of "y", "z", "x".

    Raises:
        InvalidInput: The noise is not a mechanism. Or samples are used once, and the noise falls so fast that later
            samples cost more.

    Example:
        >>> import hyperpush as hp
        >>> constants = hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=2, C_H=1, C_J=0.5, L_H=0, L_J=0, L_b=1, L_fx=0)
        >>> steps = hp.schedule("power", 0.1, 0.8)
        >>> sender = hp.privacy.LoopSensitivity(constants, steps, params=10, hypers=10, others=0.5, examples=100)
        >>> account = hp.privacy.Accountant(sender, hp.privacy.Laplace(hp.schedule("power", 1, 0.6)))
        >>> print(account.epsilon(1000).round(3), account.limit().round(3))
        0.486 0.581
    """

    assumes: ClassVar[str] = ASSUMPTION

    sender: LoopSensitivity
    noise: dict[str, Mechanism]

    def __init__(self, sender: LoopSensitivity, noise: Mechanism | Mapping[str, Mechanism]):
        self.sender = sender
        self.noise = by_variable("Accountant.noise", noise, tuple(sender.dims), (Laplace, Gaussian))
        if sender.use == "once":  # else later samples cost more
            _finite_budget(sender.steps, self.noise, sender.use)

    def losses(self, rounds: int) -> Losses:
        """Return each message's sensitivity divided by its noise scale, by variable and round.

        The ratio is the ε of a Laplace release, and the μ of a Gaussian release.
        """
        t = np.arange(check_integer("rounds", rounds, minimum=1))
        found = {}
        for name, delta in self.sender.sensitivities(rounds).items():
            scale = np.broadcast_to(self._scale(name)(t), rounds)
            found[name] = delta / scale.reshape(-1, *(1,) * (delta.ndim - 1))
        return found

    def epsilon_by_round(self, rounds: int) -> Float[np.ndarray, " rounds *clients"]:
        """Return each client's pure ε after each round; this requires Laplace noise."""
        self._only_laplace()
        return np.cumsum(np.sum(list(self.losses(rounds).values()), axis=0), axis=0)

    def epsilon(self, rounds: int, delta: float | None = None, by: str | None = None) -> PerClient:
        """Return each client's ε after a number of rounds: pure ε, or the ε of (ε, δ) by the package dp-accounting.

        Gaussian releases compose to a single Gaussian release. Many Laplace releases are grouped by similar loss, and
        each counts as the largest of its group.

        Args:
            rounds: Number of rounds, at least 1.
            delta: δ, in (0, 1). None asks for pure ε, which requires Laplace noise.
            by: Composition of Laplace releases: `"pld"` (privacy loss distributions, tight) or `"rdp"` (Rényi
                divergences, fast). None takes `"pld"` if few different losses are to be composed.
        """
        if delta is None:
            return np.asarray(self.epsilon_by_round(rounds)[-1])
        return self._with_delta(self.losses(rounds), delta, by)

    def limit(self, delta: float | None = None, rounds: int = 100_000, by: str | None = None) -> PerClient:
        """Return an upper bound on each client's ε for any number of rounds.

        The first `rounds` rounds count exactly, and a bound covers all later rounds. If this bound is infinite, ten
        times as many rounds count exactly. The limit exists if the noise falls more slowly than the sensitivity.

        Raises:
            InvalidInput: The limit does not exist. It never exists for a reused data set, whose ε grows without end.
        """
        if delta is None:
            self._only_laplace()
        sender = self.sender
        _finite_budget(sender.steps, self.noise, sender.use)
        if not np.all(sender.others > 0):
            raise InvalidInput("LoopSensitivity.others", sender.others, "weights above 0")
        for count in (check_integer("rounds", rounds, minimum=1), 10 * rounds):
            losses = self.losses(count + 1)
            last = {name: found[-1] * self._scale(name)(count) for name, found in losses.items()}
            scales = [{name: self._scale(name) for name in self._with(kind)} for kind in (Laplace, Gaussian)]
            pure, normal = sender.tail(count, last, scales[0], 1), sender.tail(count, last, scales[1], 2)
            if np.all(np.isfinite(pure + normal)):
                before = {name: found[:-1] for name, found in losses.items()}
                if delta is None:
                    return np.asarray(sum(np.sum(found, axis=0) for found in before.values()) + pure)
                return self._with_delta(before, delta, by, pure, normal)
        allowed = "more, until the steps times the slopes of the constants are below `others`"
        raise InvalidInput("rounds", rounds, allowed)

    def noise_for(self, epsilon: float, rounds: int | None = None, delta: float | None = None) -> dict[str, Mechanism]:
        """Return the noise at which no client's ε exceeds `epsilon`: all scales multiplied by one factor.

        Args:
            epsilon: Target, above 0. `epsilon(rounds)` or `limit()` of the returned noise never exceeds it.
            rounds: Number of rounds; None: any number.
            delta: δ, in (0, 1); None asks for pure ε.
        """
        check_positive("epsilon", epsilon)

        def cost(noise: dict[str, Mechanism]) -> float:
            account = Accountant(self.sender, noise)
            # Rényi's bound is fast and never too small.
            found = account.limit(delta, by="rdp") if rounds is None else account.epsilon(rounds, delta, "rdp")
            return float(np.max(found))

        def times(factor: float) -> dict[str, Mechanism]:
            return {name: noise.times(factor) for name, noise in self.noise.items()}

        return times(least_factor(lambda factor: cost(times(factor)), epsilon, exact=delta is None))

    def _scale(self, name: str) -> Power:
        """Return the noise schedule of a variable, divided by the mechanism's norm of a unit ℓ2 change."""
        mechanism = self.noise[name]
        return mechanism.scale.times(1 / mechanism.norm_of_unit(self.sender.dims[name]))

    def _with(self, kind: type) -> list[str]:
        return [name for name, mechanism in self.noise.items() if isinstance(mechanism, kind)]

    def _only_laplace(self) -> None:
        if self._with(Gaussian):
            raise InvalidInput("delta", None, "a number in (0, 1): pure ε needs Laplace noise")

    def _with_delta(
        self, losses: Losses, delta: float, by: str | None, pure: PerClient | float = 0, normal: PerClient | float = 0
    ) -> PerClient:
        """Return ε at δ of `losses`, a further pure ε `pure`, and Gaussian losses whose squares sum to `normal`."""
        shape = next(iter(losses.values())).shape[1:]
        flat = {name: found.reshape(len(found), -1) for name, found in losses.items()}
        laplace = np.concatenate([flat[name] for name in self._with(Laplace)] or [np.zeros((1, math.prod(shape)))])
        squares = sum((np.sum(flat[name] ** 2, axis=0) for name in self._with(Gaussian)), np.zeros(math.prod(shape)))
        squares = squares + np.broadcast_to(normal, shape).reshape(-1)
        known: dict[bytes, float] = {}  # clients with the same weights spend the same
        found = []
        for own, square in zip(laplace.T, squares, strict=True):
            key = own.tobytes() + square.tobytes()
            if key not in known:
                known[key] = compose(own, math.sqrt(square), delta, by)
            found.append(known[key])
        return np.asarray(np.reshape(found, shape) + pure)


def compose(laplace: np.ndarray, mu: float, delta: float, by: str | None) -> float:
    """Return ε at δ of Laplace releases with pure ε `laplace` and one Gaussian release with mean `mu`, deviation 1."""
    if not (isinstance(delta, float) and 0 < delta < 1):
        raise InvalidInput("delta", delta, "a number in (0, 1)")
    if by not in (None, "pld", "rdp"):
        raise InvalidInput("by", by, "'pld', 'rdp' or None")
    dp = require("dp_accounting", "privacy")  # takes seconds to load
    total = float(laplace.sum())
    laplace = np.sort(laplace)
    slight = np.cumsum(laplace) <= 1e-4 * total  # their pure ε is added at the end; fewer distributions are composed
    rest, laplace = float(laplace[slight].sum()), laplace[~slight]
    if not laplace.size:
        return dp.get_epsilon_gaussian(1 / mu, delta) if mu > 0 else 0.0
    levels, counts = np.unique(laplace, return_counts=True)
    if len(levels) > MOST_DISTRIBUTIONS:
        levels, counts = _group(laplace, 1.01 if by == "rdp" else 1.05)
    if by is None:
        by = "pld" if len(levels) <= MOST_DISTRIBUTIONS and total <= MOST_RANGE else "rdp"
    if by == "pld":
        accountant = dp.pld.PLDAccountant(value_discretization_interval=max(1e-4, 1e-5 * total))
    else:
        accountant = dp.rdp.RdpAccountant()
    for level, count in zip(levels, counts, strict=True):
        accountant.compose(dp.LaplaceDpEvent(1 / level), int(count))
    if mu > 0:
        accountant.compose(dp.GaussianDpEvent(1 / mu))
    found = float(accountant.get_epsilon(delta)) + rest
    return min(found, total) if mu == 0 else found


def _group(values: np.ndarray, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Return levels that exceed the values by less than a factor `ratio`, and the number of values at each."""
    largest = values.max()
    steps, counts = np.unique(np.floor(np.log(largest / values) / math.log(ratio)), return_counts=True)
    return largest * ratio**-steps, counts


def least_factor(cost: Callable[[float], float], target: float, exact: bool) -> float:
    """Return the smallest factor, up to 0.1 %, at which a decreasing cost is at most `target`.

    `exact` declares that the cost is proportional to 1/factor, so that one division finds the factor.
    """
    if exact:
        factor = cost(1.0) / target or 1.0  # with sensitivity 0 any factor is enough
        while cost(factor) > target:
            factor *= 1 + 4e-16
        return factor
    low = high = 1.0
    while cost(high) > target:
        if high > 1e12:
            raise InvalidInput("epsilon", target, "a larger value: no amount of noise reaches it with this delta")
        low, high = high, 2 * high
    while low == high or cost(low) <= target:
        if low < 1e-9:
            return low
        low, high = low / 2, low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > target else (low, middle)
    return high


def check_schedules(
    steps: Power | Mapping[str, Power], noise: Mechanism | Mapping[str, Mechanism], use: Use = "running averages"
) -> None:
    """Raise `InvalidInput` for schedules whose noise prevents convergence, or whose privacy budget is infinite.

    Let the steps fall like t^−v and the noise like t^−ς. The mean square error from noise then behaves like
    t^(v − 2ς), so convergence requires ς > v/2. The steps must add up to infinity, so v ≤ 1.

    A finite budget requires ς < v with Laplace noise and running averages. Gaussian noise and running averages require
    ς < v + 1/2. If samples are used once, a finite budget requires ς ≤ v. For reused data the budget is infinite (Chen
    and Wang, ICML 2024).

    Args:
        steps: One schedule for all variables, or one by variable.
        noise: One mechanism for all variables, or one by variable.
        use: Use of the data, as in `LoopSensitivity`.

    Raises:
        InvalidInput: An exponent breaks its bound; the message names both.

    Example:
        >>> import hyperpush as hp
        >>> noise = hp.privacy.Laplace(hp.schedule("power", 1, 0.6))
        >>> hp.privacy.check_schedules(hp.schedule("power", 0.1, 0.8), noise)  # 0.4 < 0.6 < 0.8
    """
    names = tuple(steps) if isinstance(steps, Mapping) else tuple(noise) if isinstance(noise, Mapping) else ("all",)
    steps = by_variable("steps", steps, names, Power)
    noise = by_variable("noise", noise, names, (Laplace, Gaussian))
    for name in names:
        v, decay = steps[name].exponent, noise[name].scale.exponent
        if v > 1:
            raise InvalidInput(f"steps[{name!r}].exponent", v, "at most 1: steps with a finite sum stop short")
        if decay <= v / 2:
            allowed = f"above {v / 2}, half that of the steps: else noise stays"
            raise InvalidInput(f"noise[{name!r}].scale.exponent", decay, allowed)
    _finite_budget(steps, noise, use)


def _finite_budget(steps: Mapping[str, Power], noise: Mapping[str, Mechanism], use: Use) -> None:
    if use == "reused":
        raise InvalidInput("use", use, "'running averages' or 'once': a data set that is reused costs more every round")
    least = min(step.exponent for step in steps.values())
    for name, mechanism in noise.items():
        field, decay = f"noise[{name!r}].scale.exponent", mechanism.scale.exponent
        if use == "once" and decay > least:
            allowed = f"at most {least}, the least exponent of the steps: else ε grows without limit"
            raise InvalidInput(field, decay, allowed)
        below = steps[name].exponent + (0.5 if isinstance(mechanism, Gaussian) else 0)
        if use == "running averages" and decay >= below:
            raise InvalidInput(field, decay, f"below {below}: else ε grows without limit")
