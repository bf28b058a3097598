"""What a private task lets others know: means over clipped examples, with noise that hides any one of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.checks import check_positive
from hyperpush.errors import InvalidInput, unknown
from hyperpush.method import Number
from hyperpush.privacy import ASSUMPTION
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism, clipped_mean, one_by_one
from hyperpush.programs.counting import unmarked


def _bound(field: str) -> Any:
    return eqx.field(default=None, converter=lambda c: None if c is None else check_positive(field, c))


class Noise(eqx.Module):
    """What a client lets others know of its data; `hp.Task.private` makes it, and says what its options are.

    A release is the mean of N examples' parts of norm at most C, which one of them changes by at most Δ = 2C/N
    (ℓ1, for Laplace noise: √dim·2C/N), plus noise of scale `mechanism`·Δ. Its cost is 1/`mechanism`, whatever C, N and
    the dimension.
    """

    assumes: ClassVar[str] = ASSUMPTION

    mechanism: Mechanism
    clip: Number = eqx.field(converter=partial(check_positive, "task.private.clip"))
    curvature: Number | None = _bound("task.private.curvature")
    coupling: Number | None = _bound("task.private.coupling")
    hypers: Literal["shared", "per example"] = eqx.field(static=True, default="shared")

    @staticmethod
    def checked(mechanism: Any, clip: Any, curvature: Any, coupling: Any, hypers: Any) -> "Noise":
        """The same from what a user gave, which may be anything."""
        if not isinstance(mechanism, Laplace | Gaussian):
            allowed = "hp.privacy.Gaussian(…) or hp.privacy.Laplace(…)"
            raise InvalidInput("task.private.noise", mechanism, allowed)
        check_positive("task.private.clip", clip)
        check_positive("task.private.curvature", curvature, optional=True)
        check_positive("task.private.coupling", coupling, optional=True)
        if hypers not in ("shared", "per example"):
            raise unknown("task.private.hypers", str(hypers), ("shared", "per example"))
        return Noise(mechanism, clip, curvature, coupling, hypers)

    def times(self, factor: float) -> "Noise":
        """The same with `factor` times as much noise."""
        return replace(self, mechanism=type(self.mechanism)(self.mechanism.scale.times(factor)))

    def bounded(self, function: Callable[[PyTree], PyTree], batch: PyTree, bound: Number) -> tuple[PyTree, Number]:
        """The mean of `function` over a batch's rows, each clipped to `bound`, and Δ: how far one row moves it."""
        one, rows, mask = one_by_one(function, batch)
        with unmarked():  # all rows together are one access
            mean = clipped_mean(one, rows, bound, mask)
        count = jax.tree.leaves(rows)[0].shape[0] if mask is None else jnp.maximum(jnp.sum(mask), 1)
        change = 2 * bound / count
        if self.mechanism.norm == "l1":
            change *= math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(mean)))
        return mean, change
