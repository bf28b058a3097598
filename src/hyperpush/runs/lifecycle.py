"""The life of a run, the same for a study, a spec, a verb with `save=` and a peer.

1. Reserve: `hold` keeps other processes out of the folder. Everything else is inside `attempt`.
2. Begin: `begin` writes the file that says what runs in the folder.
3. Compute inside `checkpoints`: a run that was interrupted continues from its last checkpoint.
4. Keep: write the result's files into `folder.work`. Then `keep` completes the folder, which is finished from then on.
5. Fail: after an error, `attempt` saves the state of a run that can be continued. Other runs leave no files.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import final

from hyperpush.base import processes
from hyperpush.base.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.base.locks import alone
from hyperpush.engines.hooks import Hook
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import Journal
from hyperpush.runs.checkpoints.store import CheckpointFolder
from hyperpush.runs.folder import CHECKPOINTS, RunFolder


def _print_warning(text: str) -> None:
    print("warning:", text, file=sys.stderr)


@final
@dataclass
class Lifecycle:
    """One run in its folder.

    Attributes:
        folder: The folder.
        policy: Rule for the checkpoints of compiled engines. None: no such checkpoints (a peer writes its own).
        resumed: True if the run continues an interrupted one, whose files stay after any error.
        warn: Shows a warning of damaged checkpoints.
        interrupted: Called with the error of a run that failed and can be continued.
    """

    folder: RunFolder
    policy: Policy | None = None
    resumed: bool = False
    warn: Callable[[str], None] = _print_warning
    interrupted: Callable[[BaseException], None] = lambda error: None
    _journal: Journal | None = field(default=None, init=False)

    def hold(self) -> AbstractContextManager[None]:
        """Hold the folder in the block; raise InUse if another live process works in it."""
        if not processes.first_process():
            return nullcontext()
        return alone(self.folder.lock, self.folder.field, self.folder.path)

    def begin(self, name: str, text: str) -> None:
        """Write the file that identifies the run."""
        if processes.first_process():
            write_atomically(self.folder.work / name, text)

    @contextmanager
    def checkpoints(self, hooks: Sequence[Hook] = ()) -> Iterator[None]:
        """Save and continue the work of compiled engines in the block, which also call these hooks."""
        if self.policy is None:
            yield
            return
        self._journal = Journal(CheckpointFolder(self.folder.work / CHECKPOINTS, self.warn), self.policy)
        with self._journal.active(*hooks):
            yield

    def keep(self, result: str) -> None:
        """Complete the folder with `result.json`, give it its final name, and drop the checkpoints."""
        processes.barrier("all models are written")
        if processes.first_process():
            self.folder.complete(result)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Save the state of a run that fails in the block, or remove its hidden folder."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        work, final = self.folder.work, isinstance(error, InvalidInput | Diverged)  # it would end the same way again
        # Several processes write together at the end of a chunk, which is impossible after one has failed.
        if self._journal is not None and not isinstance(error, HyperpushError) and processes.count() == 1:
            try:
                self._journal.save()
            except HyperpushError as also:
                print("error:", also, file=sys.stderr)
        lost = final or not any((work / CHECKPOINTS).glob("[0-9]*"))
        if self.folder.hidden and lost and not self.resumed and processes.first_process():
            shutil.rmtree(work, ignore_errors=True)
        if work.is_dir() and not isinstance(error, Diverged) and processes.first_process():
            self.interrupted(error)
