"""Count the communication and computation of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from hyperpush.engines.result import RunResult
from hyperpush.programs.counting import accesses
from hyperpush.task.task import Task


@dataclass(frozen=True)
class Costs:
    """What each client communicated and computed during a run.

    Attributes:
        rounds: Communication rounds.
        floats: Numbers that each client sent. A message to several receivers counts once.
        bytes: Bytes that a client sent over its links, averaged over clients.
        largest_bytes: Bytes that the client with the most traffic sent.
        gradients: Gradients of the inner and the outer cost that each client computed.
        hessian_products: Products with the Hessian ∂²_xx f of the inner cost f, per client.
        jacobian_products: Products with the mixed derivative ∂²_λx f of the inner cost f, per client.
        accesses: For each data set, the number of these gradients and products that read the set.

    Example:
        >>> import hyperpush as hp
        >>> task = hp.tasks.quadratic(3, seed=0)  # 4 params each
        >>> costs = hp.train(task, hp.SGP(steps=10, step_size=0.1), hp.networks.Ring(3), key=0).costs
        >>> costs.rounds, costs.floats, costs.gradients  # 10 messages of 4 + 1 numbers
        (10, 50, 10)
    """

    rounds: int = 0
    floats: int = 0
    bytes: int = 0
    largest_bytes: int = 0
    gradients: int = 0
    hessian_products: int = 0
    jacobian_products: int = 0
    accesses: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunResult, task: Task | None = None) -> "Costs":
        """Return the costs of a run; with `task`, they include the accesses to its data sets."""
        used = {} if task is None else {name: run.work[accesses(name)] for name in task.data.sets}
        return cls(
            run.rounds,
            run.floats,
            round(float(np.mean(run.bytes))),
            int(np.max(run.bytes)),
            run.work["gradients"],
            run.work["hessian_products"],
            run.work["jacobian_products"],
            {name: count for name, count in used.items() if count},
        )

    def __add__(self, other: "Costs") -> "Costs":
        names = {*self.accesses, *other.accesses}
        total = {name: self.accesses.get(name, 0) + other.accesses.get(name, 0) for name in sorted(names)}
        numbers = [each.name for each in fields(self) if each.name != "accesses"]
        return Costs(**{name: getattr(self, name) + getattr(other, name) for name in numbers}, accesses=total)

    def __str__(self) -> str:
        return f"{self.rounds:,} rounds, {self.floats:,} floats sent per client"
