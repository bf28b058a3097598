"""What a run leaves behind, and what it tells while it goes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import PyTree

from hyperpush.engine import lossy
from hyperpush.program import Context, Path, State

Record = Callable[[State, Context], PyTree]
Progress = Callable[[str, int, int], None]  # a loop's name, iterations done, iterations at most
OUTSIDE = "program"  # where numbers go wrong outside of loops


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    states: PyTree  # every client's state, clients on axis 0
    step: int  # network time after the run: the next run starts here
    rounds: int  # exchanges that took place
    floats: int  # numbers each client sent (a message to several receivers counts once)
    hessian_products: int  # with ∂²_xx f, that each client computed (a server's are nobody's)
    jacobian_products: int  # with ∂²_λx f
    gradients: int  # gradients of f and F
    history: dict[str, PyTree]  # by loop: what its record function returned, leaves [records, clients, …]
    late: int = 0  # messages that missed their round and were dropped (the simulator counts those under way at the end)
    rejected: dict[str, int] = field(default_factory=dict)  # messages refused by peers, by reason
    totals: dict[Path, lossy.Totals] = field(default_factory=dict)  # running sums of the links on a faulty network
    moved: int = 0  # bytes that devices sent to each other, where clients are spread over several

    @property
    def costs(self) -> dict[str, int]:
        """What every result says of its run, by the names of its fields."""
        names = ("step", "rounds", "floats", "hessian_products", "jacobian_products", "gradients")
        return {name: getattr(self, name) for name in names}
