"""The folder of a run: of a study, a spec, a verb with `save=`, or a peer.

| file | content | of |
|---|---|---|
| `config.toml` | the options | studies, specs, peers |
| `call.json` | verb, method, network, key, digests of functions and data | verbs |
| `result.json` | the result; status, costs and the format version unless it is a study's | all |
| `metrics.jsonl` | events, see `hyperpush.runs.events` | studies, specs, peers |
| `history.safetensors` | cost and metrics by step | verbs, specs, peers |
| `models/<set>/<owner>.safetensors` | arrays by path, one file per owner | all |
| `links/<owner>.safetensors` | an owner's estimates of its links | verbs, specs, peers |
| `figures/*.png` | figures | studies |

The folder appears when the run has succeeded. Until then its files are in a hidden folder beside it, with
`checkpoints/` and a lock. A run leaves no files if it fails before its first checkpoint, if its input is invalid, or if
it diverges. Peers write into a visible folder from the start.
"""

import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from hyperpush.base import processes
from hyperpush.base.errors import Diverged, HyperpushError, InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import Journal
from hyperpush.runs.checkpoints.store import CheckpointFolder
from hyperpush.runs.events import read_events, write_events
from hyperpush.runs.locks import alone

CONFIG, CALL, RESULT, METRICS = "config.toml", "call.json", "result.json", "metrics.jsonl"
HISTORY, MODELS, LINKS, FIGURES = "history.safetensors", "models", "links", "figures"
CHECKPOINTS, LOCK = "checkpoints", "lock"


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes to.

    Of several processes the first one writes. Checkpoints and models are an exception: each process writes those of its
    clients.

    Attributes:
        path: The final folder.
        field: Its name in errors.
    """

    path: Path
    field: str = "run"

    @property
    def work(self) -> Path:
        """The hidden folder that is renamed at the end."""
        return self.path.with_name(f".{self.path.name}.partial")

    def lock(self) -> AbstractContextManager[None]:
        """Hold the folder in the block; raise InUse if another live process writes to it."""
        if not processes.first_process():
            return nullcontext()
        return alone(self.work / LOCK, self.field, self.path)

    def open_journal(self, policy: Policy, warn: Callable[[str], None] = lambda text: None) -> Journal:
        """Return the journal of checkpoints, with those found in the folder."""
        return Journal(CheckpointFolder(self.work / CHECKPOINTS, warn), policy)

    def clear_for_resume(self) -> None:
        """Remove everything from an interrupted run except complete events and checkpoints."""
        for name in (MODELS, FIGURES):
            shutil.rmtree(self.work / name, ignore_errors=True)
        if (self.work / METRICS).is_file():
            write_events(self.work / METRICS, read_events(self.work / METRICS))

    def complete(self, result: str) -> None:
        """Write the result and rename the hidden folder to the final one."""
        if processes.first_process():
            write_atomically(self.work / RESULT, result)
            if self.path.exists():
                self.path.rmdir()
            self.work.rename(self.path)  # before this, the run can continue from its checkpoints
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
            (self.path / LOCK).unlink(missing_ok=True)

    def give_up(self, error: BaseException, journal: Journal | None, resumed: bool = False) -> bool:
        """Save the state of an interrupted run, or remove its folder; return True if the run can be continued."""
        final = isinstance(error, InvalidInput | Diverged)  # the same run would end the same way again
        # Several processes write together at the end of a chunk, which is impossible after one has failed.
        if journal is not None and not isinstance(error, HyperpushError) and processes.count() == 1:
            try:
                journal.save()
            except HyperpushError as also:
                print("error:", also, file=sys.stderr)
        lost = final or not any((self.work / CHECKPOINTS).glob("[0-9]*"))
        if processes.first_process() and lost and not resumed:
            shutil.rmtree(self.work, ignore_errors=True)
        return self.work.is_dir() and not isinstance(error, Diverged)


def is_new(path: Path, field: str) -> bool:
    """True if a folder is missing or empty; raise InvalidInput if it can be neither."""
    try:
        return not any(path.iterdir())
    except FileNotFoundError:
        return True
    except OSError as error:  # a file, a name that is too long, no permission
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None


def make_folder(path: Path, field: str) -> None:
    """Make a folder and its parents if they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None


def reserve(name: str, out: Path | None) -> RunFolder:
    """Create a new run folder: `out`, by default one under `runs/`."""
    if out is None:
        stem = Path("runs", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
        candidates: Iterable[Path] = (stem.with_name(f"{stem.name}-{k}") if k else stem for k in count())
    else:
        candidates = [out if out.name else out.resolve()]
    for path in candidates:
        folder = RunFolder(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and (out is None or any(path.iterdir())):
                continue
            with suppress(FileExistsError):
                folder.work.mkdir()
                return folder
        except OSError as error:
            raise InvalidInput("--out", str(path), f"a folder that can be written ({error.strerror})") from None
    allowed = "a new or empty folder that no other run is writing to"
    if out is not None and (RunFolder(out).work / CONFIG).is_file():
        allowed += f"; a run into this one was interrupted or is under way: hyperpush resume {out} continues it"
    raise InvalidInput("--out", str(out), allowed)


def find_interrupted(folder: Path) -> RunFolder:
    """Return the folder of an interrupted run, from the path of its final folder or of the hidden one beside it."""
    folder = folder if folder.name else folder.resolve()
    hidden = folder.name.startswith(".") and folder.name.endswith(".partial")
    found = RunFolder(folder.with_name(folder.name[1 : -len(".partial")]) if hidden else folder)
    if not (found.work / CONFIG).is_file():
        given = f"{folder}, a finished run" if (found.path / RESULT).is_file() else str(folder)
        raise InvalidInput("run", given, "the folder of an interrupted run that has checkpoints")
    return found
