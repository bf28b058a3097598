"""Report the progress of an audit to hooks after each of its programs."""

from dataclasses import dataclass

import numpy as np

from hyperpush.verbs.costs import Costs
from hyperpush.verbs.hooks import Hook

LOOP = "audit"  # name of the loop that hooks see


@dataclass
class AuditWatch:
    """Counts of finished and expected programs, which are reported to hooks; each named party adds programs."""

    hooks: tuple[Hook, ...]
    done: int = 0
    total: int = 0

    def expect(self, programs: int) -> None:
        """Add this number of programs to the expected ones."""
        self.total += programs
        if programs:
            self._advance()

    def tell(self, costs: Costs) -> None:
        """Count a finished program, and report the costs of all programs so far: rounds, and bytes sent per party."""
        self.done += 1
        for hook in self.hooks:
            hook.row(LOOP, self.done, {"rounds": np.asarray(costs.rounds), "bytes": np.asarray(costs.bytes)})
        self._advance()

    def _advance(self) -> None:
        for hook in self.hooks:
            hook.advance(LOOP, self.done, max(self.total, self.done))

    def finish(self) -> None:
        """Tell all hooks that the audit has ended."""
        for hook in self.hooks:
            hook.finish()
