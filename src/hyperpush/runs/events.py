"""Read and write the events of runs, sweeps, hooks and peers: files with one JSON object per line.

Every event begins with those of these fields that apply:

| field | meaning |
|---|---|
| `time` | time of writing, in seconds since 1970 (UTC) |
| `kind` | one of the kinds in the next table |
| `client` | name or number of the client |
| `loop` | name of the program's loop |
| `step` | number of iterations of that loop so far |

| kind | written by | to | further fields |
|---|---|---|---|
| `record` | a study | `metrics.jsonl` | fields of the study |
| `row` | a spec, a peer, the hook `JSONLines` | `metrics.jsonl`, the hook's file | measured values, by name |
| `cell` | a sweep | `metrics.jsonl` | `phase, method, setting, seed, state, reason, cell`, scores |
| `state` | a peer | `status.json`, the latest only | `pid, round, total, late, rejected, links`, bytes |
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import write_atomically

Kind = Literal["record", "row", "cell", "state"]
FIRST = ("time", "kind", "client", "loop", "step")


def event(kind: Kind, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event with the current time and these values; the fields of `FIRST` come first, in this order."""
    for name in ("time", "kind"):
        if name in values:
            raise InvalidInput(name, values[name], "another name: every event has this field already")
    whole = {"time": round(time.time(), 3), "kind": kind, **values}
    return {name: whole.pop(name) for name in FIRST if name in whole} | whole


def append_event(path: Path, new: Mapping[str, Any]) -> None:
    """Append one event as a line to a file; other processes can read it at once."""
    line = to_json(new) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def write_events(path: Path, events: Iterable[Mapping[str, Any]], durable: bool = True) -> None:
    """Replace the content of a file by these events atomically: readers find either the old or the new content."""
    write_atomically(path, "".join(to_json(each) + "\n" for each in events), durable)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a file, without an incomplete last line.

    Args:
        path: A file of events, such as `metrics.jsonl` of a run folder.

    Raises:
        OSError: The file cannot be read.
    """
    found = []
    for line in Path(path).read_bytes().splitlines(keepends=True):
        try:
            found.append(json.loads(line))
        except ValueError:
            break
        if not line.endswith(b"\n"):
            found.pop()
    return found


def to_json(value: object) -> str:
    """Return a value as strict JSON. Arrays become lists; NaN and infinity raise InvalidInput with the field's name."""
    return json.dumps(_plain(value, ""), allow_nan=False)


def _plain(value: Any, where: str) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}.{key}" if where else str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{place}]") for place, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(where, value, "a finite number or null")
    return str(value) if isinstance(value, Path) else value
