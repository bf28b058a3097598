"""Federated averaging: local epochs, then the mean of everyone's parameters at a server."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import whole
from hyperpush.data.batches import count
from hyperpush.errors import InvalidInput
from hyperpush.inner.step import Learner, Rate, check_steps, epoch, learning, optimizer
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Local, Node, Repeat, Sequence, Server


class FedAvg(eqx.Module):
    """`rounds` times: `epochs` passes over the own examples, then the average of all clients' parameters.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017. Clients count by the size of their data, or all alike with
    `weighted=False`. `rate` as in `SGP` (a schedule counts mini-batches); `batch` None: one full-batch step per epoch.
    `averaging="gossip"` does without a server, on undirected networks: x ← Wx with doubly stochastic W, all alike.
    """

    rounds: int = eqx.field(static=True)
    rate: Rate = eqx.field(static=True)
    epochs: int = eqx.field(static=True, default=1)
    batch: int | None = eqx.field(static=True, default=None)
    weighted: bool = eqx.field(static=True, default=True)
    averaging: Literal["server", "gossip"] = eqx.field(static=True, default="server")

    def __check_init__(self):
        check_steps("FedAvg.rounds", self.rounds, self.batch)
        optimizer(self.rate)
        whole("FedAvg.epochs", self.epochs, least=1)
        check_averaging("FedAvg.averaging", self.averaging)

    def program(self, problem: Problem) -> Node:
        transform = optimizer(self.rate)

        def train(state: Learner, ctx: Context):
            return local_epochs(problem, transform, state, ctx, ctx.data.inner, self.epochs, self.batch)

        average = averaged(self.averaging, self.weighted)
        return learning(Repeat(Sequence(Local(train), average), self.rounds, name="FedAvg"), transform)


def check_averaging(field: str, given: object) -> None:
    """Refuse a way of averaging that is not there."""
    if given not in ("server", "gossip"):
        raise InvalidInput(field, given, "'server' or 'gossip'")


def local_epochs(
    problem: Problem,
    transform: optax.GradientTransformation,
    state: Learner,
    ctx: Context,
    examples: PyTree,
    epochs: int,
    batch: int | None,
) -> Learner:
    """`epochs` passes over a client's examples."""

    def one(number, state):
        return epoch(problem, transform, state, examples, batch, jax.random.fold_in(ctx.key, number))

    return jax.lax.fori_loop(0, epochs, one, state)


def size(ctx: Context, weighted: bool) -> Float[Array, ""]:
    """How much a client counts in an average: its number of examples, or 1."""
    return jnp.asarray(count(ctx.data.inner) if weighted else 1, jnp.zeros(()).dtype)


def mean_by_size(sizes: Float[Array, " n"], values: PyTree) -> PyTree:
    """Everyone's answer: the mean of all values (clients on axis 0), weighted by size."""
    shares = sizes / jnp.sum(sizes)
    return jax.tree.map(lambda v: jnp.broadcast_to(jnp.tensordot(shares, v, 1), v.shape), values)


def averaged(by: Literal["server", "gossip"], weighted: bool) -> Node:
    """All clients' params become their mean, at a server, or mix with their neighbours'; on `Learner` states."""
    if by == "gossip":
        return Exchange(
            send=lambda state, ctx: state.params,
            receive=lambda state, inbox, ctx: state.moved(inbox.mix(state.params), state.memory),
            weights="gossip",
        )
    return Server(
        send=lambda state, ctx: (size(ctx, weighted), state.params),
        compute=lambda messages, key: mean_by_size(*messages),
        receive=lambda state, params, ctx: state.moved(params, state.memory),
    )
