"""Federated averaging whose clients stay near the common model."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import NonNegative
from hyperpush.inner.base import Learner, solver_program
from hyperpush.inner.fedavg import average_params
from hyperpush.methods.base import MethodInfo
from hyperpush.personalize.baselines.base import LocalEpochs, Near
from hyperpush.programs import Context, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


class FedProx(LocalEpochs):
    """Federated averaging whose clients stay near the common model.

    It runs `FedAvg` on f_i(x) + ½·penalty·‖x − x_r‖², where x_r is the common model at the start of the round (Li et
    al., arXiv:1812.06127).

    **Use it** if clients with different data take many local steps. **Avoid it** without a server.

    Departures from the paper:

    1. Every client takes part in every round, and takes all its epochs.

    Args:
        steps: Rounds with the server, 0 or more. 0 leaves the params unchanged.
        step_size: η, above 0; a number or a schedule by mini-batches, for plain SGD. None needs an `optimizer`.
        epochs: Local passes over the own examples per round, at least 1.
        batch_size: Examples per mini-batch; None takes one step on all examples per epoch.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`. It keeps its memory between
            rounds.
        penalty: Strength of the pull to the common model, 0 or more. 0 is `FedAvg`; the paper uses 0.001 to 1.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs = jax.random.normal(jax.random.key(0), (4, 20, 2))
        >>> train = (inputs, (inputs[..., 0] > 0).astype(int))
        >>> model = (lambda key: jnp.zeros((2, 2)), lambda params, inputs: inputs @ params)
        >>> baseline = hp.personalize.FedProx(50, 0.5, penalty=0.1)
        >>> fitted = hp.personalize.fit(model, baseline, hp.networks.FullyConnected(4), train=train, key=0)
        >>> fitted.client(0).predict(jnp.array([[2.0, 0.0], [-2.0, 0.0]]))
        Array([1, 0], dtype=int32)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Li et al., Federated optimization in heterogeneous networks, arXiv:1812.06127",
        example={"steps": 3, "step_size": 0.1, "penalty": 0.1},
    )

    penalty: NonNegative = eqx.field(converter=as_number, kw_only=True)

    def program(self, problem: Problem) -> Node:
        def train(state: Learner, ctx: Context) -> Learner:
            near = replace(problem, penalty=Near(self.penalty, state.params, problem.penalty))
            return self.train(near, state, ctx, ctx.data.train)

        body = Sequence(Local(train), average_params("server", weighted=True))
        return solver_program(Repeat(body, self.steps, name="FedProx"), self.transformation)
