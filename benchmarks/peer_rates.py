"""Rounds per second and bytes per message of peers in step, beside older code in the same run.

    python benchmarks/peer_rates.py --revision 02a1685

Parties are threads of one process that communicate over loopback. Blocks of both codes take turns, each in a new
process, so that other work on the machine affects both alike. Seconds of CPU are compared, too: they hardly depend on
other work.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from script import main, option, show
from timing import machine

from hyperpush.base.errors import HyperpushError

HERE, BLOCK = Path(__file__).parents[1] / "src", Path(__file__).with_name("peer_block.py")
ALLOWED = 0.05  # largest allowed loss of speed, as a share


@dataclass(frozen=True)
class Rates:
    """Peers of this code against peers of older code."""

    revision: str = option("", "git revision of the older code; left out: none")
    peers: tuple[int, ...] = option((4, 8, 16), "numbers of peers", 2)
    rounds: int = option(200, "rounds in a block", 2)
    blocks: int = option(3, "blocks of each code, of which the median is taken", 1)
    secure: bool = option(True, "use mutual TLS on links")


def run(config: Rates) -> dict[str, Any]:
    """Measure both codes in turns."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(
            config, {"new": HERE, **({"old": checked_out(config.revision, folder)} if config.revision else {})}
        )


def checked_out(revision: str, folder: str) -> Path:
    """Write the sources of a revision to a folder, and return them."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=HERE.parent, capture_output=True)
    if archive.returncode:
        raise HyperpushError(f"git does not have sources of {revision}: {archive.stderr.decode()[-200:]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return Path(folder) / "src"


def compare(config: Rates, codes: dict[str, Path]) -> dict[str, Any]:
    """Let blocks of all codes take turns, and compare their medians."""
    rows = []
    for peers in config.peers:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in codes}
        for _ in range(config.blocks):
            for name, source in codes.items():
                found[name].append(_block(source, peers, config))
        middle = {
            name: {key: float(np.median([each[key] for each in blocks])) for key in blocks[0]}
            for name, blocks in found.items()
        }
        rows += [{"peers": peers, "code": name, **values} for name, values in middle.items()]
    columns = ("peers", "code", "rounds/s", "CPU ms per round and peer", "bytes per message")
    show("peers in step", columns, [tuple(row.values()) for row in rows])
    return {"rows": rows, "allowed": ALLOWED, "machine": machine()}


def _block(source: Path, peers: int, config: Rates) -> dict[str, float]:
    """Run one block in a separate process."""
    command = [sys.executable, str(BLOCK), str(peers), str(config.rounds), str(int(config.secure))]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise HyperpushError(f"a block of {source} failed: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(Rates, run)
