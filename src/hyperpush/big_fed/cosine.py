"""The outer cost of BiG-Fed: it pulls neighbors on a graph together and pushes others apart."""

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
    """A joint outer cost that pulls neighbors on a graph together and pushes other clients apart.

        F = (1/n) Σ_u [ Σ_v a_uv (1 − cos(H_u, H_v)) + Σ_v c_uv max(0, cos(H_u, H_v)) ],   H = M p

    p_u is the vector that client u shows of its model, and a has the weights of the graph. M passes messages between
    neighbors (Xing, Lu, Wu and Yu 2021, equations 3 to 5).

    c_uv counts how often u draws v, a client that is not its neighbor, as a negative sample. It is floor(r_u + U) with
    a uniform number U in [0, 1). On average u draws `negatives` samples for each of its links, spread evenly over all
    clients that are not neighbors. Draws follow from (`seed`, round, u, v) alone. So any client that knows r_u can
    compute u's draws, and a server draws the same as peers.

    **Use it** as the `outer` of a task for `BiGFed`. **Avoid it** with methods for separate costs per client, which
    refuse it. It does not use examples.

    Args:
        graph: The graph of neighbors.
        negatives: Negative samples per link, 0 or more. With 0 there is only attraction, and F is least where all
            clients are alike.
        passing: Form of M: the mean over neighbors (`"mean"`, D⁻¹a) or D^−½ a D^−½ (`"symmetric"`), where the diagonal
            matrix D has the row sums of a. A sum over neighbors would give the same F as the mean.
        self_loops: True passes messages with a + I instead of a.
        seed: Seed of the draws, 0 or more.
        represent: `represent(params, hyper)`, the vector p that a client shows of its model.
        own: A separate outer cost per client, `own(params, hyper, batch)`, as `hp.Task` takes it. Its mean over the
            clients that are present is added to F. None: the graph's cost alone counts.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Two neighbors pass on orthogonal vectors, so the cost of each is 1 − cos 90°.

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
        """Return the factors (l, r) of M_uv = l_u (a + loops)_uv r_v, from the sum of each client's weights."""
        safe = jnp.where(degree + self.self_loops > 0, degree + self.self_loops, 1)
        if self.passing == "symmetric":
            return safe**-0.5, safe**-0.5
        return 1 / safe, jnp.ones_like(safe)

    def rate(self, weights: Float[Array, "*clients n"], others: Int[Array, "*clients"]) -> Float[Array, "*clients"]:
        """Return r_u, the mean number of draws per stranger, from u's weights and the number of its strangers."""
        return self.negatives * jnp.sum(weights, axis=-1) / jnp.maximum(others, 1)

    def uniform(self, round: Int[Array, ""] | int) -> Float[Array, "n n"]:
        """Return the uniform number U of each pair (u, v) in a round."""
        n = self.graph.clients
        drawn = words(jax.random.key(self.seed), round, jnp.arange(n * n, dtype=jnp.uint32).reshape(n, n))
        return (drawn >> 8).astype(jnp.zeros(()).dtype) * 2.0**-24

    def cost(self, shown: Float[Array, "n d"], round: Int[Array, ""] | int, expected: bool = False) -> Float[Array, ""]:
        """Return F of a round from the shown vectors; with `expected`, its mean over negative samples."""
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
    """Return the pairs of different clients that are present and not neighbors."""
    return (weights == 0) & ~jnp.eye(len(weights), dtype=bool) & present[:, None] & present


def unit(vectors: Float[Array, "*clients d"]) -> Float[Array, "*clients d"]:
    """Scale vectors to length 1; zero vectors stay zero."""
    square = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return jnp.where(square > 0, vectors * jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


def pair_cost(
    one: Float[Array, " d"], others: Float[Array, "n d"], alike: Float[Array, " n"], unlike: Float[Array, " n"]
) -> Float[Array, ""]:
    """Return one client's terms of F: Σ_v alike_v (1 − cos(one, v)) + unlike_v max(0, cos(one, v))."""
    cos = unit(others) @ unit(one)
    return jnp.sum(alike * (1 - cos) + unlike * jnp.maximum(cos, 0))
