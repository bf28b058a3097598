"""Lifecycle of a run in its folder, which is the same for a study, a spec, a verb with `save=` and a peer.

1. Reserve: `hold` keeps other processes out of the folder. All further steps happen inside `attempt`.
2. Begin: `begin` writes the file that says what runs in the folder.
3. Compute inside `checkpoints`: a run that was interrupted continues from its last checkpoint.
4. Keep: write the result's files into `folder.work`. Then `keep` completes the folder, and the run is finished.
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
    """Steps of one run in its folder.

    Attributes:
        folder: The folder that the run writes to.
        policy: Rule for the checkpoints of compiled engines. None writes no such checkpoints; a peer writes its own.
        resumed: True if the run continues an interrupted run. Then the files stay after any error.
        warn: Function that shows a warning about damaged checkpoints.
        interrupted: Function that is called with the error of a run that failed and can be continued.
    """

    folder: RunFolder
    policy: Policy | None = None
    resumed: bool = False
    warn: Callable[[str], None] = _print_warning
    interrupted: Callable[[BaseException], None] = lambda error: None
    _journal: Journal | None = field(default=None, init=False)

    def hold(self) -> AbstractContextManager[None]:
        """Lock the folder for the block; raise InUse if another live process works in the folder."""
        if not processes.first_process():
            return nullcontext()
        return alone(self.folder.lock, self.folder.field, self.folder.path)

    def begin(self, name: str, text: str) -> None:
        """Write the file that identifies the run, such as `config.toml`."""
        if processes.first_process():
            write_atomically(self.folder.work / name, text)

    @contextmanager
    def checkpoints(self, hooks: Sequence[Hook] = ()) -> Iterator[None]:
        """Write checkpoints of compiled engines in the block, and continue from earlier ones.

        The engines also call `hooks`.
        """
        if self.policy is None:
            yield
            return
        self._journal = Journal(CheckpointFolder(self.folder.work / CHECKPOINTS, self.warn), self.policy)
        with self._journal.active(*hooks):
            yield

    def keep(self, result: str) -> None:
        """Write `result.json`, give the folder its final name, and delete the checkpoints."""
        processes.barrier("all models are written")
        if processes.first_process():
            self.folder.complete(result)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """If the block raises an error, save the state of the run, or remove its hidden folder.

        The folder is removed if the run cannot be continued.
        """
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        # A run with an invalid input or a divergence would end the same way again.
        work, final = self.folder.work, isinstance(error, InvalidInput | Diverged)
        # Several processes write a checkpoint together, which is impossible after one of them has failed.
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
