"""The folder of a run: of a study, a spec, a verb with `save=`, or a peer.

| file | content | of |
|---|---|---|
| `config.toml` | the options | studies, specs, peers |
| `call.json` | verb, method, network, key, digests of functions and data | verbs |
| `result.json` | the result; status, costs and the format version unless it is a study's | all |
| `metrics.jsonl` | events, see `hyperpush.runs.events` | studies, specs, peers |
| `history.safetensors` | cost and metrics by step | verbs, specs, peers |
| `models/<set>/all.safetensors` | arrays by path, clients on axis 0; of a peer `<owner>.safetensors` | all |
| `links/all.safetensors` | clients' counts of their links; of a peer `<owner>.safetensors` | verbs, specs, peers |
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

    Of several processes the first one writes. Checkpoints and models are an exception: each process writes those of its
    clients.

    Attributes:
        path: The final folder.
        field: Its name in errors.
        hidden: True if its files are in a hidden folder until the run has succeeded.
        saved: Names of the checkpoints in it.
    """

    path: Path
    field: str = "run"
    hidden: bool = True
    saved: tuple[str, ...] = (CHECKPOINTS,)

    @property
    def work(self) -> Path:
        """The folder to write to: a hidden one that is renamed at the end, or the final one."""
        return self.path.parent / f".{self.path.name}.partial" if self.hidden else self.path

    @property
    def lock(self) -> Path:
        """The lock of the process that works in it."""
        return self.work / (LOCK if self.hidden else f".{LOCK}")

    @property
    def finished(self) -> bool:
        """True if it holds a result."""
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
        for name in self.saved:  # until here, the run can continue from them
            shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / name).unlink(missing_ok=True)


def is_new(path: Path, field: str) -> bool:
    """True if a folder is missing or empty; raise InvalidInput if it can be neither."""
    try:
        return not any(path.iterdir())
    except FileNotFoundError:
        return True
    except OSError as error:  # a file, a name that is too long, no permission
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None


def make_folder(path: Path, field: str, mode: int = 0o777) -> None:
    """Make a folder and its parents if they are missing."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None


def reserve(name: str, out: Path | None) -> RunFolder:
    """Create a new run folder: `out`, by default one under `runs/`."""
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
    """Return the folder of an interrupted run, from the path of its final folder or of the hidden one beside it."""
    folder = as_path("run", folder)
    hidden = folder.name.startswith(".") and folder.name.endswith(".partial")
    found = RunFolder(folder.with_name(folder.name[1 : -len(".partial")]) if hidden else folder)
    if not (found.work / CONFIG).is_file():
        given = f"{folder}, a finished run" if found.finished else str(folder)
        raise InvalidInput("run", given, "the folder of an interrupted run that has checkpoints")
    return found
