"""One hyper for all: push-sum on the outer level."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import check_boolean, check_integer
from hyperpush.programs import Inbox


class Shared(eqx.Module):
    """A client's part of the hypers that all agree on."""

    z: PyTree
    mass: Float[Array, ""]  # ω
    tracker: PyTree  # y; None if nothing is tracked
    last: PyTree  # the gradient that y took in last; None if nothing is tracked

    @property
    def message(self) -> PyTree:
        return self.z, self.mass, self.tracker

    @property
    def hyper(self) -> PyTree:
        return jax.tree.map(lambda z: (z / self.mass).astype(z.dtype), self.z)


class OuterConsensus(eqx.Module):
    """Hypers that agree: λ_i = z_i/ω_i, where every outer step pushes z and ω `pushes` times.

    With g_i such that mean g_i = dF̄/dλ for a common λ, and `update` the outer optimizer's (−rate·g for SGD):

        tracked:      y_i ← y_i + g_i − (g_i before);  z ← P(z + ω·update(y/ω)),  ω ← Pω,  y ← Py
        not tracked:  z ← P(z + update(g)),  ω ← Pω

    Tracking (Push-DIGing: Nedić, Olshevsky, Shi 2017) gives every client the mean gradient, so the hypers reach a
    stationary point of F̄ with any optimizer at any rate that converges. Without it (SGP on the outer level, as
    "Personalized decentralized bilevel optimization over stochastic and directed networks" proposes) half is sent, but
    a constant rate leaves an error of its order between unlike clients, and optimizers that are not linear in the
    gradient, such as Adam, end elsewhere: each normalizes its client's own gradient.
    """

    pushes: int = eqx.field(static=True, default=1)
    tracked: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        check_integer("OuterConsensus.pushes", self.pushes, minimum=1)
        check_boolean("OuterConsensus.tracked", self.tracked)

    def start(self, hyper: PyTree) -> Shared:
        """A client's part at the beginning."""
        zeros = jax.tree.map(jnp.zeros_like, hyper) if self.tracked else None
        return Shared(hyper, jnp.ones(()), zeros, zeros)

    def aim(self, shared: Shared, gradient: PyTree) -> tuple[Shared, PyTree]:
        """Take in the own gradient; what the client knows of everybody's."""
        if not self.tracked:
            return shared, gradient
        tracker = jax.tree.map(lambda y, new, old: y + new - old, shared.tracker, gradient, shared.last)
        aimed = jax.tree.map(lambda y: (y / shared.mass).astype(y.dtype), tracker)
        return Shared(shared.z, shared.mass, tracker, gradient), aimed

    def move(self, shared: Shared, updates: PyTree) -> Shared:
        """Add the optimizer's change of λ to z."""
        if self.tracked:
            updates = jax.tree.map(lambda u: shared.mass * u, updates)
        return Shared(optax.apply_updates(shared.z, updates), shared.mass, shared.tracker, shared.last)

    def receive(self, shared: Shared, inbox: Inbox) -> Shared:
        """One push."""
        z, mass, tracker = inbox.mix(shared.message)
        return Shared(z, mass, tracker, shared.last)
