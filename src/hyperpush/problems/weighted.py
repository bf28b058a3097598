"""Problems in which every training example and every client has a weight: their hyper-gradient is influence."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from hyperpush.data.batches import Batch, Data, Ragged
from hyperpush.errors import InvalidInput
from hyperpush.problem import Problem, check
from hyperpush.problems.instance import Instance

Losses = Callable[[PyTree, PyTree], Float[Array, " b"]]  # (params, examples) -> the loss of each example


class Weights(eqx.Module):
    """How much each of a client's examples counts, and how much the client; 1 is as given, 0 is removed."""

    examples: Float[Array, "*clients m"]
    client: Float[Array, "*clients"]


class Numbered(eqx.Module):
    """Examples that know their place among their client's, so that a mini-batch finds their weights."""

    number: Int[Array, "*clients m"]
    examples: PyTree


class _Inner(eqx.Module):
    losses: Losses = eqx.field(static=True)
    l2: float = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: Weights, batch: Batch | Numbered) -> Float[Array, ""]:
        drawn: Any = batch.examples if isinstance(batch, Batch) else batch
        weights = jax.lax.optimization_barrier(hyper.examples[drawn.number])
        losses = weights * self.losses(params, drawn.examples)
        penalty = 0.5 * self.l2 * optax.tree.norm(params, squared=True)
        return hyper.client * (_mean(batch, losses) + penalty)


class _Outer(eqx.Module):
    losses: Losses = eqx.field(static=True)

    def __call__(self, params: PyTree, hyper: Weights, batch: PyTree) -> Float[Array, ""]:
        examples = batch.examples if isinstance(batch, Batch) else batch
        return _mean(batch, self.losses(params, examples))


def _mean(batch: PyTree, values: Float[Array, " b"]) -> Float[Array, ""]:
    return batch.mean(values) if isinstance(batch, Batch) else jnp.mean(values)


def weighted(losses: Losses, params: PyTree, train: PyTree, validation: PyTree, *, l2: float = 0.0) -> Instance:
    """f_i(x, (w, c)) = c ((1/N_i) Σ_j w_j ℓ(x; z_ij) + ½ l2 ‖x‖²), F_i(x) the mean loss of the validation examples.

    `losses(params, examples)` gives one ℓ per example. `params`, `train` and `validation` have the clients on axis 0;
    examples are pytrees, or `Ragged` where clients own different numbers. All weights are 1 and N_i stays as it is when
    they change. Equation 12 of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying directed
    networks", with a weight for each client besides.
    """
    if not 0 <= l2 < float("inf"):
        raise InvalidInput("l2", l2, "a finite number, 0 or more")
    arrays = train.examples if isinstance(train, Ragged) else train
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
    if not shapes or any(len(shape) < 2 or shape[:2] != shapes[0][:2] for shape in shapes):
        raise InvalidInput("train", shapes, "arrays with clients on axis 0 and as many examples on axis 1 in each")
    n, m = shapes[0][:2]
    numbered = Numbered(jnp.broadcast_to(jnp.arange(m), (n, m)), jax.tree.map(jnp.asarray, arrays))
    inner_data = Ragged(numbered, jnp.asarray(train.counts)) if isinstance(train, Ragged) else numbered
    problem = Problem(_Inner(losses, float(l2)), _Outer(losses))
    params, outer_data = jax.tree.map(jnp.asarray, (params, validation))
    wrong = None
    made = Instance(problem, params, Weights(jnp.ones((n, m)), jnp.ones(n)), inner_data, outer_data)
    with suppress(Exception):  # what fails altogether is for `check` to explain
        found = jax.eval_shape(jax.vmap(losses), params, numbered.examples).shape
        wrong = None if found == (n, m) else found[1:]
    if wrong is not None:  # a single number would pass for the loss of each
        raise InvalidInput("losses", f"numbers of shape {wrong} for {m} examples", "one loss per example")
    check(problem, params, made.hypers, Data(inner_data, outer_data), n)
    return made
