"""Federated averaging: local epochs, then the mean of everyone's parameters at a server."""

import equinox as eqx
import jax
import jax.numpy as jnp

from hyperpush.checks import whole
from hyperpush.data.batches import count
from hyperpush.inner.step import Learner, Rate, check_steps, epoch, learning, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Local, Node, Repeat, Sequence, Server


class FedAvg(eqx.Module):
    """`rounds` times: `epochs` passes over the own examples, then the average of all clients' parameters.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017. Clients count by the size of their data, or all alike with
    `weighted=False`. `rate` as in `SGP` (a schedule counts mini-batches); `batch` None: one full-batch step per epoch.
    """

    rounds: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    epochs: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)
    weighted: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        check_steps("FedAvg.rounds", self.rounds, self.batch)
        optimizer(self.rate)
        whole("FedAvg.epochs", self.epochs, least=1)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def train(state: Learner, ctx):
            def one(number, state):
                key = jax.random.fold_in(ctx.key, number)
                return epoch(problem, transform, state, ctx.data.inner, self.batch, key)

            return jax.lax.fori_loop(0, self.epochs, one, state)

        def send(state: Learner, ctx):
            size = jnp.asarray(count(ctx.data.inner) if self.weighted else 1, jnp.zeros(()).dtype)
            return size, state.params

        def mean(messages, key):
            sizes, params = messages
            shares = sizes / jnp.sum(sizes)
            return jax.tree.map(lambda p: jnp.broadcast_to(jnp.tensordot(shares, p, 1), p.shape), params)

        average = Server(send, mean, receive=lambda state, params, ctx: state.moved(params, state.memory))
        return learning(Repeat(Sequence(Local(train), average), self.rounds, name="FedAvg"), transform)
