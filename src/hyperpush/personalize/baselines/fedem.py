"""Mixtures by expectation and maximisation: shared models, own proportions."""

from dataclasses import replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import Ragged, everything
from hyperpush.inner.fedavg import averaged, check_averaging, local_epochs
from hyperpush.inner.step import Learner, Rate, check_steps, learning, optimizer
from hyperpush.personalize.recipe import Model, examples_of, half_square, losses, mean
from hyperpush.personalize.recipes.mtl import each
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence


class FedEM(eqx.Module):
    """Σ_k π_ik · softmax(logits_k): params are the models (on axis 0), the hyper log π_i, as of the recipe `MTL`.

    `rounds` times: q_sk ∝ π_ik exp(−loss_k(s)) for every own example s; π_ik = mean of q_sk; `epochs` passes of SGD of
    every model k on the losses weighted by q_sk; then the models are averaged, at a server, or with
    `averaging="gossip"` with neighbours. Marfoq, Neglia, Bellet, Kameni, Vidal 2021. With one model it is FedAvg.

    Takes a problem of `MTL` for its hypers' sake only: its costs are those of `model`, + ½·`l2`·‖params‖².
    """

    model: Model
    rounds: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    epochs: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)
    l2: float = eqx.field(static=True, converter=float, default=0.0)
    averaging: Literal["server", "gossip"] = eqx.field(static=True, default="server")

    def __check_init__(self):
        check_steps("FedEM.rounds", self.rounds, self.batch)
        optimizer(self.rate)
        whole("FedEM.epochs", self.epochs, least=1)
        check_averaging("FedEM.averaging", self.averaging)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def by_model(params: PyTree, inputs: Array, labels: Array) -> Float[Array, "k b"]:
            return jax.vmap(losses, in_axes=(0, None))(each(self.model, params, inputs), labels)

        def weighted(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
            inputs, labels, shares = examples_of(batch)
            values = jnp.sum(shares.T * by_model(params, inputs, labels), axis=0)
            return mean(batch, values) + half_square(self.l2, params)

        maximised = Problem(weighted, weighted)

        def train(state: Learner, ctx: Context):
            batch = everything(ctx.data.inner)
            inputs, labels = examples_of(batch)
            scores = jax.nn.log_softmax(state.hyper)[:, None] - by_model(state.params, inputs, labels)
            shares = jax.nn.softmax(scores, axis=0)  # q, [k, examples]
            proportions = jax.vmap(lambda own: mean(batch, own))(shares)
            examples = (inputs, labels, shares.T)
            if isinstance(ctx.data.inner, Ragged):
                examples = Ragged(examples, ctx.data.inner.counts)
            state = replace(state, hyper=jnp.log(jnp.maximum(proportions, jnp.finfo(shares.dtype).tiny)))
            return local_epochs(maximised, transform, state, ctx, examples, self.epochs, self.batch)

        body = Sequence(Local(train), averaged(self.averaging, weighted=True))
        return learning(Repeat(body, self.rounds, name="FedEM"), transform)
