"""Federated averaging (FedAvg): local epochs, then the mean of all clients' params at a server."""

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.base.ranges import Count, OptionalCount
from hyperpush.data.batches import count
from hyperpush.inner.base import GradientSolver, Learner, epoch, solver_program
from hyperpush.methods.base import MethodInfo
from hyperpush.programs import Average, Context, Exchange, Local, Node, Repeat, Sequence, Server
from hyperpush.task.problem import Problem

Averaging = Literal["server", "tree", "gossip"]


class FedAvg(GradientSolver):
    """Federated averaging: local epochs of SGD, then the mean of all clients' params.

    In each of `steps` rounds client i starts from the mean and takes `epochs` passes over its examples. A server
    averages the results, weighted by the sizes N_i of the clients' data (McMahan et al., arXiv:1602.05629):

        x_i = SGD from x on f_i,   x ← Σ_i N_i x_i / Σ_i N_i

    **It stops near the solution** with several steps between averages and a constant η: clients with different data
    pull the result away from the common solution. With one step on all examples it converges as slowly as gradient
    descent. The status says how close the result is. `TreeNewton` solves the problem without settings to choose.

    **Use it** if there is a server. Without one, `averaging="tree"` gives the same numbers on any network, for members
    that trust each other. With one step on all examples per round, `FedAvg` is gradient descent on the mean cost,
    without the bias of `SGP`. **Avoid it** without a server if members distrust each other, or if links are too rare
    for a tree.

    Departures from the paper:

    1. Every client takes part in every round; the paper samples some.
    2. `averaging="tree"` and `averaging="gossip"` are not in the paper.

    Args:
        steps: Rounds of local training and averaging; 0 returns the params as they are.
        step_size: η: a number, or `hp.schedule(…)`, which counts mini-batches.
        epochs: Passes over a client's examples per round, at least 1.
        batch_size: Training examples per mini-batch; None takes one step with all of them per epoch.
        weighted: True weights clients by the size of their data; False weights all clients equally.
        averaging: `"server"` averages at a server. `"tree"` takes the same mean along a tree of the network's own
            links. `"gossip"` takes x ← Wx on undirected networks, with doubly stochastic W, which weights all clients
            equally.
        optimizer: Instead of `step_size`: `hp.optimizer(…)`, or any Optax transformation. Its memory stays local.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        The mean of 1, 2 and 6 minimizes the mean inner cost.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, hyper, a: (x - a) ** 2 / 2, outer=lambda x, hyper, b: (x - b) ** 2,
        ...     params=0.0, hypers=0.0, train=jnp.array([[1.0], [2.0], [6.0]]), validation=jnp.zeros((3, 1)),
        ... )
        >>> solver = hp.FedAvg(steps=30, step_size=0.5)
        >>> print(hp.train(task, solver, hp.networks.FullyConnected(3), key=0).params.round(2))
        [3. 3. 3.]
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="one vector of the size of the params per round",
        paper="McMahan et al., arXiv:1602.05629",
        note='any network with averaging="tree", undirected with averaging="gossip"',
        example={"steps": 5, "step_size": 0.1},
    )

    epochs: Count = eqx.field(static=True, default=1)
    batch_size: OptionalCount = eqx.field(static=True, default=None)
    weighted: bool = eqx.field(static=True, default=True)
    averaging: Averaging = eqx.field(static=True, default="server")

    def program(self, problem: Problem) -> Node:
        transform = self.transformation

        def train(state: Learner, ctx: Context) -> Learner:
            return local_epochs(problem, transform, state, ctx, ctx.data.train, self.epochs, self.batch_size)

        round_ = Sequence(Local(train), average_params(self.averaging, self.weighted))
        return solver_program(Repeat(round_, self.steps, name="FedAvg"), transform)


def local_epochs(
    problem: Problem,
    transform: optax.GradientTransformation,
    state: Learner,
    ctx: Context,
    examples: PyTree,
    epochs: int,
    batch: int | None,
) -> Learner:
    """Return the state after `epochs` passes over a client's examples."""

    def one(number, state):
        return epoch(problem, transform, state, examples, batch, jax.random.fold_in(ctx.key, number))

    return jax.lax.fori_loop(0, epochs, one, state)


def size(ctx: Context, weighted: bool) -> Float[Array, ""]:
    """Return a client's weight in an average: its number of examples, or 1."""
    return jnp.asarray(count(ctx.data.train) if weighted else 1, jnp.zeros(()).dtype)


def mean_by_size(sizes: Float[Array, " n"], values: PyTree) -> PyTree:
    """Return to every client the mean of all values (clients on axis 0), weighted by size."""
    shares = sizes / jnp.sum(sizes)
    return jax.tree.map(lambda v: jnp.broadcast_to(jnp.tensordot(shares, v, 1), v.shape), values)


def average_params(by: Averaging, weighted: bool) -> Node:
    """Return a program on `Learner` states that averages params at a server or along a tree, or by gossip."""
    if by == "gossip":
        return Exchange(
            send=lambda state, ctx: state.params,
            receive=lambda state, inbox, ctx: state.at(inbox.mix(state.params), state.memory),
            weights="gossip",
        )
    if by == "tree":

        def weigh(state: Learner, ctx: Context) -> tuple[tuple[PyTree, Array], Array]:
            own = size(ctx, weighted)
            return (optax.tree.scale(own, state.params), own), jnp.ones(())

        def take(
            state: Learner, means: tuple[PyTree, Float[Array, ""]], mass: Float[Array, ""], ctx: Context
        ) -> Learner:
            return state.at(optax.tree.scale(1 / means[1], means[0]), state.memory)

        return Average(weigh, take, rounds=1, by="tree")
    return Server(
        send=lambda state, ctx: (size(ctx, weighted), state.params),
        compute=lambda messages, key: mean_by_size(*messages),
        receive=lambda state, params, ctx: state.at(params, state.memory),
    )
