"""Mixtures of shared models with personal proportions, fitted by expectation and maximization."""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.data.batches import Ragged, full_batch, open_batch
from hyperpush.inner.base import Learner, solver_program
from hyperpush.inner.fedavg import Averaging, average_params
from hyperpush.methods.base import MethodInfo
from hyperpush.personalize.baselines.base import LocalEpochs
from hyperpush.personalize.recipe import ModelLosses, Recipe, losses
from hyperpush.personalize.recipes.mtl import MTL, log_probs_by_model
from hyperpush.programs import Context, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class FedEM(LocalEpochs):
    """Federated expectation and maximization: a mixture of shared models with personal proportions.

    Client i predicts Σ_k π_ik · softmax(logits_k) with the proportions π_ik of the models k. Params are the models, on
    axis 0; the hyper is log π_i, as in the recipe `MTL`. Each round has three steps (Marfoq, Neglia, Bellet, Kameni and
    Vidal, arXiv:2108.10252):

        q_sk ∝ π_ik exp(−loss_k(s)) for every own example s,   π_ik = mean of q_sk
        `epochs` passes of SGD of every model k on the losses weighted by q_sk
        models ← their mean over clients

    **Use it** if clients draw from a few common distributions. **Avoid it** if messages must be small, because it sends
    all models. Avoid it also if hypers should minimize an outer cost, because it sets the hypers itself.

    It requires a task of the recipe `MTL`, and uses its model, its penalty and the meaning of its hypers.

    Args:
        steps: Number of rounds, 0 or more. 0 leaves the params unchanged.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        averaging: `"server"`, `"tree"` on any network, or `"gossip"` with neighbors on an undirected one.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs = jax.random.normal(jax.random.key(0), (4, 20, 2))
        >>> train = (inputs, (inputs[..., 0] > 0).astype(int))
        >>> model = (lambda key: jnp.zeros((2, 2)), lambda params, inputs: inputs @ params)
        >>> baseline = hp.personalize.FedEM(50, 0.5)
        >>> fitted = hp.personalize.fit(model, baseline, hp.networks.FullyConnected(4), train=train, key=0)
        >>> fitted.client(0).predict(jnp.array([[2.0, 0.0], [-2.0, 0.0]]))
        Array([1, 0], dtype=int32)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="the params of all models",
        paper="Marfoq et al., Federated multi-task learning under a mixture of distributions, arXiv:2108.10252",
        note="sets hypers, too; averaging='gossip' runs on undirected networks",
        example={"steps": 3, "step_size": 0.1},
    )
    recipe: ClassVar[Recipe] = MTL()  # the recipe of its task

    averaging: Averaging = eqx.field(static=True, default="server")

    def check(self, task: Any, network: Any = None) -> None:
        super().check(task, network)
        product = getattr(task.inner, "product", None)
        if product is None or [type(each) for each in product.recipes] != [MTL]:
            given = type(task.inner).__name__ if product is None else product.title
            raise InvalidInput("task", f"a task of {given}", "hp.personalize.MTL().task(…) for FedEM")

    def program(self, problem: Problem) -> Node:
        assert isinstance(problem.inner, ModelLosses)  # see `check`
        model = problem.inner.model

        def by_model(params: PyTree, inputs: Array, labels: Array) -> Float[Array, "k b"]:
            return jax.vmap(losses, in_axes=(0, None))(log_probs_by_model(model.apply, params, inputs), labels)

        def weighted_losses(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, " b"]:
            inputs, labels, shares = batch
            return jnp.sum(shares.T * by_model(params, inputs, labels), axis=0)

        maximized = replace(problem, inner=weighted_losses)

        def train(state: Learner, ctx: Context) -> Learner:
            batch = full_batch(ctx.data.train)
            (inputs, labels), mask, _ = open_batch(batch)
            scores = jax.nn.log_softmax(state.hyper["mtl"])[:, None] - by_model(state.params, inputs, labels)
            shares = jax.nn.softmax(scores, axis=0)  # q, [k, examples]
            proportions = jnp.average(shares, axis=1, weights=mask)
            examples = (inputs, labels, shares.T)
            if isinstance(ctx.data.train, Ragged):
                examples = Ragged(examples, ctx.data.train.counts)
            scores = jnp.log(jnp.maximum(proportions, jnp.finfo(shares.dtype).tiny))
            state = replace(state, hyper={"mtl": scores})
            return self.train(maximized, state, ctx, examples)

        body = Sequence(Local(train), average_params(self.averaging, weighted=True))
        return solver_program(Repeat(body, self.steps, name="FedEM"), self.transformation)
