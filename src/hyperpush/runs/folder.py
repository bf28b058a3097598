"""Create and complete the folder of a run, which may be a study, a spec, a verb with `save=`, or a peer.

| file | content | written by |
|---|---|---|
| `config.toml` | the options | studies, specs, peers |
| `call.json` | verb, method, network, key, digests of functions and data | verbs |
| `result.json` | the result; except for studies with status, costs and format version | all |
| `metrics.jsonl` | events, see `hyperpush.runs.events` | studies, specs, peers |
| `history.safetensors` | cost and metrics by step | verbs, specs, peers |
| `models/<set>/all.safetensors` | arrays by path, clients on axis 0; for a peer `<owner>.safetensors` | all |
| `links/all.safetensors` | clients' counts of their links; for a peer `<owner>.safetensors` | verbs, specs, peers |
| `figures/*.png` | figures | studies |

The folder appears when the run has succeeded. Until then its files are in a hidden folder beside it, with
`checkpoints/` and a lock. A run leaves no files if it fails before its first checkpoint, if its input is invalid, or if
it diverges. Peers write into a visible folder from the start.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import as_path, write_atomically
from hyperpush.base.locks import in_use, is_held
from hyperpush.runs.events import read_events, write_events

CONFIG, CALL, RESULT, METRICS = "config.toml", "call.json", "result.json", "metrics.jsonl"
HISTORY, MODELS, LINKS, FIGURES = "history.safetensors", "models", "links", "figures"
CHECKPOINTS, LOCK = "checkpoints", "lock"


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes to.

    If a run has several processes, the first process writes. Checkpoints and models are an exception: each process
    writes those of its clients.

    Attributes:
        path: The final folder.
        field: Name of the argument in error messages about this folder.
        hidden: True if the files are in a hidden folder until the run has succeeded.
        saved: Names of the files and folders that hold checkpoints.
    """

    path: Path
    field: str = "run"
    hidden: bool = True
    saved: tuple[str, ...] = (CHECKPOINTS,)

    @property
    def work(self) -> Path:
        """The folder to write to: a hidden folder that is renamed at the end, or the final folder."""
        return self.path.parent / f".{self.path.name}.partial" if self.hidden else self.path

    @property
    def lock(self) -> Path:
        """The lock file of the process that writes to the folder."""
        return self.work / (LOCK if self.hidden else f".{LOCK}")

    @property
    def finished(self) -> bool:
        """True if the final folder holds a result."""
        return (self.path / RESULT).is_file()

    def clear_for_resume(self) -> None:
        """Remove everything from an interrupted run except complete events and checkpoints."""
        for name in (MODELS, FIGURES):
            shutil.rmtree(self.work / name, ignore_errors=True)
        if (self.work / METRICS).is_file():
            write_events(self.work / METRICS, read_events(self.work / METRICS))

    def complete(self, result: str) -> None:
        """Write the result, give a hidden folder its final name, and drop the checkpoints."""
        write_atomically(self.work / RESULT, result)
        if self.hidden:
            if self.path.exists():
                self.path.rmdir()
            self.work.rename(self.path)
            (self.path / self.lock.name).unlink(missing_ok=True)
        for name in self.saved:  # checkpoints are needed up to here, in case the run is interrupted
            shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / name).unlink(missing_ok=True)


def is_new(path: Path, field: str) -> bool:
    """Return True if a folder is missing or empty; raise InvalidInput if the path cannot be a folder."""
    try:
        return not any(path.iterdir())
    except FileNotFoundError:
        return True
    except OSError as error:  # a file, a name that is too long, no permission
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None


def make_folder(path: Path, field: str, mode: int = 0o777) -> None:
    """Create a folder and its parents if they are missing; raise InvalidInput if that fails."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None


def reserve(name: str, out: Path | None) -> RunFolder:
    """Create the folder of a new run: `out`, or with None a folder under `runs/` named after the run and the time."""
    if out is None:
        stem = Path("runs", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
        candidates: Iterable[Path] = (stem.with_name(f"{stem.name}-{k}") if k else stem for k in count())
    else:
        out = as_path("--out", out)
        candidates = [out]
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
    assert out is not None  # all other names were tried
    if is_held(RunFolder(out).lock):
        raise in_use("--out", out)
    allowed = "a new or empty folder that no other run is writing to"
    if (RunFolder(out).work / CONFIG).is_file():
        allowed += f"; a run into this one was interrupted: hyperpush resume {out} continues it"
    raise InvalidInput("--out", str(out), allowed)


def find_interrupted(folder: Path) -> RunFolder:
    """Return the folder of an interrupted run; `folder` is its final folder or the hidden folder beside it."""
    folder = as_path("run", folder)
    hidden = folder.name.startswith(".") and folder.name.endswith(".partial")
    found = RunFolder(folder.with_name(folder.name[1 : -len(".partial")]) if hidden else folder)
    if not (found.work / CONFIG).is_file():
        given = f"{folder}, a finished run" if found.finished else str(folder)
        raise InvalidInput("run", given, "the folder of an interrupted run that has checkpoints")
    return found
