"""What a whole private run costs, and the noise at which it costs no more than it may."""

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import numpy as np

from hyperpush.checks import positive, whole
from hyperpush.errors import InvalidInput
from hyperpush.privacy.accountant import composed, least_factor
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism
from hyperpush.privacy.noise import Noise


@runtime_checkable
class Private(Protocol):
    """A solver or an estimator that can be private."""

    privacy: Noise | None

    @property
    def releases(self) -> int:
        """How many releases one run of it makes, at most; numbered from 0, by which the noise may fall."""
        ...


class Spending(eqx.Module):
    """`releases` of `Noise`, numbered from 0, in each of `runs`."""

    mechanism: Mechanism
    releases: int = eqx.field(static=True)
    runs: int = eqx.field(static=True)


class Budget(eqx.Module):
    """The cost of releases to each client: release t costs 1/`mechanism`(t), and all of them compose."""

    parts: tuple[Spending, ...]

    @property
    def releases(self) -> int:
        return sum(part.releases * part.runs for part in self.parts)

    def epsilon(self, delta: float | None = None, by: str | None = None) -> float:
        """ε of the run, the same for all clients: pure, or that of (ε, δ); `by` as in `Accountant.epsilon`."""
        laplace, gaussian = self._losses(Laplace), self._losses(Gaussian)
        if delta is None and gaussian.size:
            raise InvalidInput("delta", None, "a number in (0, 1): Gaussian noise has no pure ε")
        if delta is None:
            return float(laplace.sum())
        return composed(laplace, float(np.sqrt(np.sum(gaussian**2))), delta, by)

    def factor(self, epsilon: float, delta: float | None = None) -> float:
        """The least factor by which all noise must be multiplied for the run to cost at most `epsilon`."""
        positive("epsilon", epsilon)
        return least_factor(lambda factor: self.times(factor).epsilon(delta, "rdp"), epsilon, exact=delta is None)

    def times(self, factor: float) -> "Budget":
        """The same releases with `factor` times as much noise."""
        return Budget(
            tuple(
                replace(part, mechanism=type(part.mechanism)(part.mechanism.scale.times(factor))) for part in self.parts
            )
        )

    def _losses(self, kind: type) -> np.ndarray:
        found = [
            np.tile(np.broadcast_to(1 / part.mechanism.scale(np.arange(part.releases)), part.releases), part.runs)
            for part in self.parts
            if isinstance(part.mechanism, kind)
        ]
        return np.concatenate(found) if found else np.zeros(0)


def budget(
    inner: Any = None, hypergradient: Any = None, outer_steps: int = 0, consensus: Any = None, stop: Any = None
) -> Budget:
    """What `hp.solve` with these arguments costs: `outer_steps` + 1 inner solves and `outer_steps` estimates.

    `inner` alone is `hp.train`; `hypergradient` alone, one `outer_steps` each, are estimates at params and hypers that
    do not depend on data or were released.
    """
    whole("outer_steps", outer_steps, least=0)
    parts = []
    for field, method, runs in (("inner", inner, outer_steps + 1), ("hypergradient", hypergradient, outer_steps)):
        if method is None:
            continue
        if not isinstance(method, Private) or method.privacy is None:
            name = type(method).__name__
            raise InvalidInput(
                field, name, "SGP, HGP or TrackedHGP with privacy=Noise(…): else messages or hypers betray"
            )
        parts.append(Spending(method.privacy.mechanism, method.releases, runs))
    if not parts:
        raise InvalidInput("inner, hypergradient", None, "at least one of them")
    if (hypergradient is None) != (outer_steps == 0):
        raise InvalidInput("outer_steps", outer_steps, "0 without an estimator, 1 or more with one")
    if stop is not None:
        raise InvalidInput("stop", "early stopping", "None: clients would send their metrics without noise")
    if consensus is not None and hypergradient is not None and hypergradient.privacy.hypers != "noisy":
        raise InvalidInput("consensus", consensus, "None, or Noise(…, hypers='noisy'): clean hypers must not be sent")
    return Budget(tuple(parts))


def within(
    epsilon: float,
    delta: float | None,
    inner: Any = None,
    hypergradient: Any = None,
    outer_steps: int = 0,
    consensus: Any = None,
    stop: Any = None,
) -> tuple[Any, Any]:
    """The solver and the estimator with all noise multiplied by one factor, so that all of it costs at most `epsilon`.

    The other arguments are those of `budget`; `delta` None asks for pure ε.
    """
    factor = budget(inner, hypergradient, outer_steps, consensus, stop).factor(epsilon, delta)
    scaled = [m if m is None else replace(m, privacy=m.privacy.times(factor)) for m in (inner, hypergradient)]
    return scaled[0], scaled[1]
