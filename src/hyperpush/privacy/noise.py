"""What a private task lets others know: means over clipped examples, with noise that hides any one of them."""

from collections.abc import Callable
from dataclasses import replace
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


class Noise(eqx.Module):
    """What a client lets others know of its data; `hp.Task.private` makes it, and explains its options.

    A release is the mean of N examples' parts of norm at most C, which one of them changes by at most Δ = 2C/N
    (ℓ1, for Laplace noise: √dim·2C/N), plus noise of scale `mechanism`·Δ. Its cost is 1/`mechanism`, whatever C, N and
    the dimension.
    """

    assumes: ClassVar[str] = ASSUMPTION

    mechanism: Mechanism
    clip: Number
    curvature: Number | None = None
    coupling: Number | None = None
    hypers: Literal["shared", "per example"] = eqx.field(static=True, default="shared")

    @staticmethod
    def from_options(mechanism: Any, clip: Any, curvature: Any, coupling: Any, hypers: Any) -> "Noise":
        """The same from what a user gave, which may be anything."""
        if not isinstance(mechanism, Laplace | Gaussian):
            allowed = "hp.privacy.Gaussian(…) or hp.privacy.Laplace(…)"
            raise InvalidInput("task.private.noise", mechanism, allowed)
        if hypers not in ("shared", "per example"):
            raise unknown("task.private.hypers", str(hypers), ("shared", "per example"))
        clip = check_positive("task.private.clip", clip)
        curvature = check_positive("task.private.curvature", curvature, optional=True)
        return Noise(
            mechanism, clip, curvature, check_positive("task.private.coupling", coupling, optional=True), hypers
        )

    def __check_init__(self):
        for name in ("clip", "curvature", "coupling"):
            check_positive(f"task.private.{name}", getattr(self, name), optional=name != "clip")

    def times(self, factor: float) -> "Noise":
        """The same with `factor` times as much noise."""
        return replace(self, mechanism=self.mechanism.times(factor))


def bounded_mean(function: Callable[[PyTree], PyTree], batch: PyTree, bound: Number) -> tuple[PyTree, Number]:
    """The mean of `function` over a batch's rows, each clipped to `bound`, and Δ: how far one row moves it."""
    one, rows, mask = one_by_one(function, batch)
    with unmarked():  # all rows together are one access
        mean = clipped_mean(one, rows, bound, mask)
    count = jax.tree.leaves(rows)[0].shape[0] if mask is None else jnp.maximum(jnp.sum(mask), 1)
    return mean, 2 * bound / count
