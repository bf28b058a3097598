"""Federated averaging, then a short local training."""

from typing import ClassVar

import equinox as eqx
import optax

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Whole
from hyperpush.base.schedules import StepSize
from hyperpush.inner.base import InnerSolver, Learner, solver_program
from hyperpush.inner.fedavg import FedAvg, local_epochs
from hyperpush.methods.base import MethodInfo
from hyperpush.methods.optimizers import Optimizer, build, check_optimizer
from hyperpush.programs import Context, Local, Node, Sequence
from hyperpush.task.problem import Problem


class FedAvgPlus(InnerSolver):
    """Federated averaging of a common model, then a short local training by each client.

    First `FedAvg` runs. Then each client passes `epochs` times over its own examples, with a fresh optimizer (Jiang,
    Konečný, Rush and Kannan, arXiv:1909.12488).

    **Use it** as the simplest way to personal models. **Avoid it** where clients have few examples: they overfit.

    Args:
        first: The federated averaging. The local training uses its batch size.
        step_size: Step size of the local training, above 0: a number or a schedule by mini-batches, for plain SGD. None
            needs an `optimizer`.
        epochs: Local passes over the client's examples, 0 or more. 0 runs `first` alone.
        optimizer: `hp.optimizer(…)` or an Optax transformation instead of `step_size`.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs = jax.random.normal(jax.random.key(0), (4, 20, 2))
        >>> train = (inputs, (inputs[..., 0] > 0).astype(int))
        >>> model = (lambda key: jnp.zeros((2, 2)), lambda params, inputs: inputs @ params)
        >>> baseline = hp.personalize.FedAvgPlus(hp.FedAvg(50, 0.5), 0.05)
        >>> fitted = hp.personalize.fit(model, baseline, hp.networks.FullyConnected(4), train=train, key=0)
        >>> fitted.client(0).predict(jnp.array([[2.0, 0.0], [-2.0, 0.0]]))
        Array([1, 0], dtype=int32)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Jiang et al., Improving federated learning personalization via model agnostic meta learning, "
        "arXiv:1909.12488",
        note="params end as the client's own",
        example={"first": FedAvg(3, 0.1), "step_size": 0.1},
    )

    first: FedAvg
    step_size: StepSize | None = eqx.field(converter=as_number, default=None)
    epochs: Whole = eqx.field(static=True, default=1)
    optimizer: Optimizer | optax.GradientTransformation | None = None

    def __check_init__(self):
        check_optimizer("FedAvgPlus", self.step_size, self.optimizer)

    def program(self, problem: Problem) -> Node:
        transform = build(self.step_size, self.optimizer)

        def tune(state: Learner, ctx: Context):
            return local_epochs(problem, transform, state, ctx, ctx.data.train, self.epochs, self.first.batch_size)

        return Sequence(self.first.program(problem), solver_program(Local(tune), transform))
