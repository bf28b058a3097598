"""Mixtures by expectation and maximization: shared models, own proportions."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from hyperpush.checks import check_integer
from hyperpush.data.batches import Ragged, everything, open_batch
from hyperpush.errors import InvalidInput
from hyperpush.inner.base import InnerSolver, Learner, learning
from hyperpush.inner.fedavg import averaged, local_epochs
from hyperpush.method import MethodInfo, as_number
from hyperpush.optimizers import Optimizer, StepSize, build, check_optimizer
from hyperpush.personalize.recipe import Losses, Recipe, losses
from hyperpush.personalize.recipes.mtl import MTL, each
from hyperpush.problem import Problem
from hyperpush.programs import Context, Local, Node, Repeat, Sequence


class FedEM(InnerSolver):
    """Federated expectation and maximization: a mixture of shared models with own proportions.

    Client i says Σ_k π_ik · softmax(logits_k). Params are the models, on axis 0; the hyper is log π_i, as in the recipe
    `MTL`. A round is (Marfoq, Neglia, Bellet, Kameni and Vidal, arXiv:2108.10252)

        q_sk ∝ π_ik exp(−loss_k(s)) for every own example s,   π_ik = mean of q_sk
        `epochs` passes of SGD of every model k on the losses weighted by q_sk
        models ← their mean

    **Use it** where clients draw from a few common distributions. **Avoid it** where messages must be small or hypers
    follow an outer cost: it sends all models and sets the hypers itself.

    It takes a task of the recipe `MTL`, of which it uses the model, the penalty and what the hypers mean.

    Args:
        steps: Rounds. With 0 nothing moves.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        averaging: `"server"`, or `"gossip"` with neighbors on an undirected network.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="the params of all models",
        paper="Marfoq et al., Federated multi-task learning under a mixture of distributions, arXiv:2108.10252",
        note="sets hypers, too; averaging='gossip' runs on undirected networks",
        example={"steps": 3, "step_size": 0.1},
    )
    recipe: ClassVar[Recipe] = MTL()  # whose task it takes

    steps: int = eqx.field(static=True)
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    epochs: int = eqx.field(static=True, default=1)
    batch_size: int | None = eqx.field(static=True, default=None)
    averaging: Literal["server", "gossip"] = eqx.field(static=True, default="server")
    optimizer: Optimizer | optax.GradientTransformation | None = None

    def __check_init__(self):
        check_integer("FedEM.steps", self.steps, minimum=0)
        check_optimizer("FedEM", self.step_size, self.optimizer)
        check_integer("FedEM.epochs", self.epochs, minimum=1)
        check_integer("FedEM.batch_size", self.batch_size, minimum=1, optional=True)

    def check_task(self, task: Any) -> None:
        super().check_task(task)
        if not isinstance(task.inner, Losses) or not isinstance(task.inner.recipe, MTL):
            given = type(getattr(task.inner, "recipe", task.inner)).__name__
            raise InvalidInput("task", f"a task of {given}", "hp.personalize.MTL().task(…) for FedEM")

    def program(self, problem: Problem) -> Node:
        assert isinstance(problem.inner, Losses)  # see `check_task`
        transform, model = build(self.step_size, self.optimizer), problem.inner.model

        def by_model(params: PyTree, inputs: Array, labels: Array) -> Float[Array, "k b"]:
            return jax.vmap(losses, in_axes=(0, None))(each(model, params, inputs), labels)

        def weighted(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
            inputs, labels, shares = batch
            return jnp.sum(shares.T * by_model(params, inputs, labels), axis=0)

        maximized = replace(problem, inner=weighted)

        def train(state: Learner, ctx: Context):
            batch = everything(ctx.data.train)
            (inputs, labels), mask, _ = open_batch(batch)
            scores = jax.nn.log_softmax(state.hyper)[:, None] - by_model(state.params, inputs, labels)
            shares = jax.nn.softmax(scores, axis=0)  # q, [k, examples]
            proportions = jnp.average(shares, axis=1, weights=mask)
            examples = (inputs, labels, shares.T)
            if isinstance(ctx.data.train, Ragged):
                examples = Ragged(examples, ctx.data.train.counts)
            state = replace(state, hyper=jnp.log(jnp.maximum(proportions, jnp.finfo(shares.dtype).tiny)))
            return local_epochs(maximized, transform, state, ctx, examples, self.epochs, self.batch_size)

        body = Sequence(Local(train), averaged(self.averaging, weighted=True))
        return learning(Repeat(body, self.steps, name="FedEM"), transform)
