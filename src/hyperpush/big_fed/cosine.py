"""The outer cost of BiG-Fed: clients that are neighbors should look alike, others should not."""

from typing import Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hyperpush.base.numbers import as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import NonNegative, Whole
from hyperpush.networks.hashing import words
from hyperpush.networks.structure import Graph
from hyperpush.task.task import JointCost


@final
class Cosine(Configured, JointCost):
    """A joint outer cost: clients that are neighbors on a graph should look alike, others should not.

        F = (1/n) Σ_u [ Σ_v a_uv (1 − cos(H_u, H_v)) + Σ_v c_uv max(0, cos(H_u, H_v)) ],   H = M p

    p_u is what client u shows of its model, a the weights of the graph, and M passes messages between neighbors (Xing,
    Lu, Wu and Yu 2021, equations 3 to 5).

    c_uv counts how often u drew v, not a neighbor, as a negative sample: floor(r_u + U), U uniform. There are
    `negatives` for every link of u on average, evenly over all who are no neighbors. Draws follow (`seed`, round,
    u, v) alone: whoever knows r_u knows whom u drew, and a server draws what peers draw.

    **Use it** as the `outer` of a task for `BiGFed`. **Avoid it** with methods for costs of each client's own, which
    refuse it. It does not look at examples.

    Args:
        graph: Who is whose neighbor.
        negatives: Negative samples for each link, 0 or more. With 0 there is only attraction: F is least where all
            look alike.
        passing: M: the mean over neighbors (`"mean"`, D⁻¹a) or D^−½ a D^−½ (`"symmetric"`). A sum over neighbors would
            give the same F as the mean.
        self_loops: Pass messages with a + I instead of a.
        seed: Of the draws, 0 or more.
        represent: `represent(params, hyper)`, the vector p that a client shows of its model.
        own: An outer cost of each client's own, `own(params, hyper, batch)`, in the form of a task's; the mean over the
            clients that are present is added to F. None: the graph's cost alone counts.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Two neighbors at a right angle, who see each other: the cost is 1 − cos 90° for each of them.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> graph = hp.networks.Graph([[0, 1], [1, 0]])
        >>> look = hp.big_fed.Cosine(graph, negatives=0, represent=lambda params, hyper: params)
        >>> print(look.cost(jnp.eye(2), round=0))
        1.0
    """

    graph: Graph = eqx.field(static=True)
    negatives: NonNegative = eqx.field(converter=as_number, default=5.0)
    passing: Literal["mean", "symmetric"] = eqx.field(static=True, default="mean")
    self_loops: bool = eqx.field(static=True, default=False)
    seed: Whole = eqx.field(static=True, default=0)

    def scales(self, degree: Float[Array, "*clients"]) -> tuple[Float[Array, "*clients"], Float[Array, "*clients"]]:
        """(l, r) with M_uv = l_u (a + loops)_uv r_v, from the sum of a client's weights."""
        safe = jnp.where(degree + self.self_loops > 0, degree + self.self_loops, 1)
        if self.passing == "symmetric":
            return safe**-0.5, safe**-0.5
        return 1 / safe, jnp.ones_like(safe)

    def rate(self, weights: Float[Array, "*clients n"], others: Int[Array, "*clients"]) -> Float[Array, "*clients"]:
        """r_u, from the weights of u's links and how many others are no neighbors."""
        return self.negatives * jnp.sum(weights, axis=-1) / jnp.maximum(others, 1)

    def uniform(self, round: Int[Array, ""] | int) -> Float[Array, "n n"]:
        """U of every pair (u, v) in a round."""
        n = self.graph.clients
        drawn = words(jax.random.key(self.seed), round, jnp.arange(n * n, dtype=jnp.uint32).reshape(n, n))
        return (drawn >> 8).astype(jnp.zeros(()).dtype) * 2.0**-24

    def cost(self, shown: Float[Array, "n d"], round: Int[Array, ""] | int, expected: bool = False) -> Float[Array, ""]:
        """F of a round from what everybody shows; with `expected` on average over the negative samples."""
        weights, present = self.graph.at(round)
        strangers = find_strangers(weights, present)
        rates = self.rate(weights, jnp.sum(strangers, axis=1))[:, None]
        counts = rates if expected else jnp.floor(rates + self.uniform(round))
        left, right = self.scales(jnp.sum(weights, axis=1))
        loops = jnp.eye(len(weights)) * self.self_loops
        passed = left[:, None] * ((weights + loops) @ (right[:, None] * shown))
        each = jax.vmap(pair_cost, (0, None, 0, 0))(passed, passed, weights, counts * strangers)
        return jnp.sum(each) / jnp.sum(present)


def find_strangers(weights: Float[Array, "n n"], present: Bool[Array, " n"]) -> Bool[Array, "n n"]:
    """Who is present, somebody else and no neighbor."""
    return (weights == 0) & ~jnp.eye(len(weights), dtype=bool) & present[:, None] & present


def unit(vectors: Float[Array, "*clients d"]) -> Float[Array, "*clients d"]:
    """Vectors of length 1, or 0 where there is nothing."""
    square = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return jnp.where(square > 0, vectors * jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


def pair_cost(
    one: Float[Array, " d"], others: Float[Array, "n d"], alike: Float[Array, " n"], unlike: Float[Array, " n"]
) -> Float[Array, ""]:
    """Σ_v alike_v (1 − cos(one, v)) + unlike_v max(0, cos(one, v))."""
    cos = unit(others) @ unit(one)
    return jnp.sum(alike * (1 - cos) + unlike * jnp.maximum(cos, 0))
