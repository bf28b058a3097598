"""Check the hooks of a call, and pass them at the end any recorded rows that the engine did not pass on."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hyperpush.base.errors import InvalidInput
from hyperpush.engines.hooks import Hook, tell_rows
from hyperpush.engines.result import Recorder, RunResult


def as_hooks(given: Any) -> tuple[Hook, ...]:
    """Return the hooks that a verb was given; raise InvalidInput unless they are a list of hooks."""
    if isinstance(given, Hook) or not isinstance(given, Sequence):
        raise InvalidInput("hooks", type(given).__name__, "a list of hooks: hooks=[…]")
    for hook in given:
        if not isinstance(hook, Hook):
            allowed = "objects of classes derived from hp.hooks.Hook"
            raise InvalidInput("hooks", hook.__name__ if isinstance(hook, type) else hook, allowed)
    return tuple(given)


class Told(Hook):
    """Hook that notes which loops passed their rows to hooks during the run, as compiled engines do."""

    def __init__(self):
        self.loops: set[str] = set()

    def row(self, loop: str, step: int, values: Mapping[str, Any]) -> None:
        self.loops.add(loop)

    def tell_others(self, hooks: Sequence[Hook], run: RunResult, recorders: Mapping[str, Recorder], every: int) -> None:
        """Pass rows that the engine returned only at the end to the hooks, then call `finish` on every hook."""
        for loop in run.history.keys() - self.loops:
            leaves = jax.tree.leaves(run.history[loop])
            iterations = [recorders[loop].iteration(row, every) for row in range(len(leaves[0]) if leaves else 0)]
            tell_rows(hooks, loop, iterations, run.history[loop])
        for hook in hooks:
            hook.finish()
