"""Gradient tracking over push-sum, shared by inner solvers and estimators.

Each client has an estimate q, a push-sum weight ω, and a tracker y of the mean gradient. Client i's gradient at its aim
p is g_i(p), and y starts at g(p). With the push-sum weights P of the links, a step is

    p⁺ = q + Δ,  z ← P(z + ωΔ),  ω ← Pω,  y ← P(y + g(p⁺) − g(p)),  q = z/ω

The sums of all pushed values are conserved. So at the only fixed point the mean gradient is zero, for any Δ.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.programs import Context, Exchange, Inbox, Node, Repeat, Sequence
from hyperpush.solving.judgment import Judgment
from hyperpush.solving.secants import Secants
from hyperpush.solving.settings import MOST_PUSHES, norm

CHECK = 5  # steps between two votes on ending
KNOWN = 0.1  # largest relative error of q at which an estimated error of the result is trusted
CAUTION = 1.3  # factor by which the smallest curvature may have fallen since the previous outer step
T = TypeVar("T", bound="Tracked")


class TrackedMemory(eqx.Module):
    """A client's tracking state, from which the next outer step continues, and the settings of the last solve."""

    z: Float[Array, "*clients d"]
    mass: Float[Array, "*clients"]
    aim: Float[Array, "*clients d"]
    gradient: Float[Array, "*clients d"]
    tracker: Float[Array, "*clients d"]
    pushes: Int[Array, "*clients"]  # 0: not known yet
    curvature: Float[Array, "*clients"]  # this client's estimate of the mean of the clients' largest curvatures
    own: Float[Array, "*clients"]  # largest curvature of this client when `curvature` was averaged
    smallest: Float[Array, "*clients"]  # smallest curvature of the mean cost seen so far; 0: none yet

    @staticmethod
    def none(vector: Float[Array, " d"]) -> "TrackedMemory":
        """Return the memory of a client at a vector, before any tracking."""
        zero, one = jnp.zeros((), vector.dtype), jnp.ones((), vector.dtype)
        nothing = jnp.zeros_like(vector)
        return TrackedMemory(vector, one, vector, nothing, nothing, jnp.zeros((), jnp.int32), zero, zero, zero)

    def expected(self, own: Float[Array, ""]) -> Float[Array, ""]:
        """Return the mean of the clients' largest curvatures, scaled by the change of `own`; at first `own`."""
        earlier = self.curvature * own / jnp.where(self.own > 0, self.own, 1)
        return jnp.where(self.pushes > 0, earlier, own)


class Tracked(eqx.Module):
    """A client's state during gradient tracking."""

    z: Float[Array, " d"]
    mass: Float[Array, ""]  # ω
    aim: Float[Array, " d"]  # p: end of the client's step, before mixing
    gradient: Float[Array, " d"]  # g_i at the aim, without a part that is the same at all points
    tracker: Float[Array, " d"]  # y
    secants: Secants | None  # None: plain steps without votes
    count: Int[Array, ""]
    pushes: Int[Array, ""]
    curvature: Float[Array, ""]
    own: Float[Array, ""]
    judgment: Judgment | None  # None without a tolerance

    @property
    def q(self) -> Float[Array, " d"]:
        return self.z / self.mass

    @property
    def slope(self) -> Float[Array, " d"]:
        """The tracked mean gradient."""
        return self.tracker / self.mass

    def displacement(self, given: Any, accelerates: bool) -> tuple[Secants | None, Float[Array, " d"]]:
        """Return the secants for the next step, and the displacement Δ of this one.

        `given` is the step size; None takes it from the clients' mean curvature. With `accelerates` the secants give Δ.
        """
        plain = 0.5 / self.curvature if given is None else jnp.asarray(given)
        step_size = 2 * plain if given is None else plain
        if self.secants is None:
            return None, -plain * self.slope
        floor = jnp.zeros((), self.z.dtype) if self.judgment is None else self.judgment.floor
        secants, change = self.secants.advance(self.q, self.slope, self.aim, step_size, floor, self.count)
        return secants, change if accelerates else -plain * self.slope

    def moved(
        self: T, change: Float[Array, " d"], aim: Float[Array, " d"], gradient: Array, secants: Secants | None
    ) -> T:
        """Return the state after the client's own step, before mixing; `gradient` is g_i at the new aim."""
        return replace(
            self,
            z=self.z + self.mass * change,
            aim=aim,
            gradient=gradient,
            tracker=self.tracker + gradient - self.gradient,
            secants=secants,
            count=self.count + 1,
            judgment=self.judgment and self.judgment.after_step(self.slope, gradient, secants),
        )

    def away(self) -> tuple[Float[Array, ""], Bool[Array, ""]]:
        """Return an estimate of the distance of q to the solution, and True if the estimate can be trusted.

        If q has a large error, apparent curvature may come from disagreement of the clients.
        """
        assert self.judgment is not None
        assert self.secants is not None
        rise, floor = norm(self.slope), self.judgment.floor
        curvature = self.secants.curvature(self.q, self.slope, floor)
        away = (rise + floor) / jnp.where(curvature > 0, curvature, 1) + jnp.linalg.norm(self.q - self.aim)
        seen = (curvature > 0) & ((away <= KNOWN * jnp.linalg.norm(self.q)) | (rise <= floor))
        return away, seen

    def remember(self, gradient: Float[Array, " d"], smallest: Float[Array, ""]) -> TrackedMemory:
        """Return the memory for the next outer step; `gradient` is the full g_i at the aim."""
        stood = self.z, self.mass, self.aim, gradient, self.tracker
        return TrackedMemory(*stood, self.pushes, self.curvature, self.own, smallest)


def send(state: Tracked, ctx: Context) -> PyTree:
    """Return a client's message: its z, ω and y, and its counts of negative curvature (None without a judgment)."""
    return state.z, state.mass, state.tracker, state.judgment and state.judgment.curvature_signs


def take(state: T, mixed: PyTree) -> T:
    """Return the state with the mixed values of `send`."""
    z, mass, tracker, signs = mixed
    judgment = state.judgment and replace(state.judgment, curvature_signs=signs)
    return replace(state, z=z, mass=mass, tracker=tracker, judgment=judgment)


def repeat_pushes(pushes: int | None) -> Repeat:
    """Return the node with the pushes of a step; with None their number is the state's field `pushes`."""
    push = Exchange(send, _receive, conserved=True)
    if pushes is not None:
        return Repeat(push, pushes, name="pushes")
    return Repeat(push, MOST_PUSHES, times=lambda state, ctx: state.pushes, name="pushes")


def repeat_until_judged(
    body: Node, judge: Node, steps: int, name: str, ended: Callable[[Any, Context], Bool[Array, ""]]
) -> Repeat:
    """Return a loop that ends when all clients agree, after at most `steps` steps rounded up to a multiple of five."""
    some = Sequence(Repeat(body, CHECK, name="steps"), judge)
    return Repeat(some, -(-steps // CHECK), until=ended, name=name)


def _receive(state: T, inbox: Inbox, ctx: Context) -> T:
    return take(state, inbox.mix(send(state, ctx)))
