"""The progress of an audit, told to hooks after each of its programs."""

from dataclasses import dataclass

import numpy as np

from hyperpush.verbs.costs import Costs
from hyperpush.verbs.hooks import Listeners

LOOP = "audit"  # name of the loop that hooks see


@dataclass
class Watch:
    """Programs done and expected. More are expected when a party is named."""

    listeners: Listeners
    done: int = 0
    total: int = 0

    def expect(self, programs: int) -> None:
        """Add programs to come."""
        self.total += programs
        if programs:
            self.listeners(LOOP, self.done, self.total)

    def tell(self, costs: Costs) -> None:
        """Count a program, and tell the costs of all so far: rounds, and the bytes that a party sends."""
        self.done += 1
        for hook in self.listeners.hooks:
            hook.row(LOOP, self.done, {"rounds": np.asarray(costs.rounds), "bytes": np.asarray(costs.bytes)})
        self.listeners(LOOP, self.done, max(self.total, self.done))

    def finish(self) -> None:
        """End all hooks."""
        self.listeners.finish({}, {})
