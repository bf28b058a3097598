"""Simulated faults of a network: messages that are lost, duplicated or delayed, and therefore reordered."""

from typing import Annotated, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, Integer, PRNGKeyArray

from hyperpush.base.limits import Whole, interval
from hyperpush.base.options import Configured
from hyperpush.networks.hashing import words


@final
class Faults(Configured):
    """Faults of every link, drawn afresh for each message.

    Methods that start a new average in every step, such as HGP, require reliable links and refuse faults.

    Args:
        loss: Probability that a copy of a message is lost, from 0 (never) to below 1.
        duplicate: Probability that a message is sent in a second copy, from 0 to 1.
        delay: Largest delay of a copy in rounds, 0 or more. The delays 0, …, `delay` are equally likely.

    Example:
        >>> import hyperpush as hp
        >>> hp.Simulate(faults=hp.Faults(loss=0.3, delay=2)).lossy.loss
        0.3
    """

    loss: Annotated[float | int, interval(0, 1, outside="high")] = eqx.field(static=True, default=0.0)
    duplicate: Annotated[float | int, interval(0, 1)] = eqx.field(static=True, default=0.0)
    delay: Whole = eqx.field(static=True, default=0)

    @classmethod
    def label(cls) -> str:
        return "faults"

    @property
    def all_lost(self) -> float:
        """Probability that no copy of a message arrives."""
        return self.loss * (1 - self.duplicate * (1 - self.loss))

    def fates(
        self, key: PRNGKeyArray, step: Integer[ArrayLike, ""], sender: Integer[ArrayLike, ""], clients: int
    ) -> tuple[Bool[Array, "clients 2"], Int[Array, "clients 2"]]:
        """Return, for each receiver and copy of a message, whether the copy arrives, and its delay in rounds.

        The message is that of `sender` at `step`. The results depend only on (key, step, sender), with or without
        `jit` and `vmap`. A second copy that does not exist counts as one that does not arrive.
        """
        # One vectorized hash for all numbers compiles several times faster than draws from separate keys.
        index = jnp.asarray(sender, jnp.uint32) * clients * 5 + jnp.arange(clients * 5, dtype=jnp.uint32)
        drawn = words(key, step, index.reshape(clients, 5))
        uniform = (drawn[:, :3] >> 8).astype(jnp.float32) * jnp.float32(2**-24)
        survives = uniform[:, :2] >= self.loss
        repeated = uniform[:, 2] < self.duplicate
        exists = jnp.stack([jnp.ones_like(repeated), repeated], axis=1)
        delays = (drawn[:, 3:] % jnp.uint32(self.delay + 1)).astype(jnp.int32)
        return survives & exists, delays
