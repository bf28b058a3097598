"""The data sets, with the folders and the presence of their files."""

import tomllib
from pathlib import Path
from typing import NamedTuple

from hyperpush_papers.common.data import files, shakespeare, sources

# What can be downloaded: checksums by data set and address.
KNOWN = tomllib.loads(Path(__file__).with_name("downloads.toml").read_text(encoding="utf-8"))


class Entry(NamedTuple):
    """A data set as a line of a table."""

    name: str
    title: str
    files: str  # under the folder that HYPERPUSH_DATA names
    here: str  # yes, some or no
    download: str


def entries() -> list[Entry]:
    """Every data set that experiments know by name."""
    base = files.folder()
    found = [Entry("digits", "scikit-learn's digits", "none needed", "yes", "not needed")]
    for name, (title, wanted) in sources.published_files().items():
        here = [base is not None and files.find(base / name / each) is not None for each in wanted]
        shown = ", ".join(f"{name}/{each}" for each in wanted)
        offered = f"hyperpush data get {name}" if name in KNOWN else "by hand"
        found.append(Entry(name, title, shown, _how_many(here), offered))
    plays = "yes" if base is not None and shakespeare.available() else "no"
    found.append(Entry("shakespeare", "Shakespeare's plays", "shakespeare/plays/*.txt", plays, "by hand"))
    roads = ["traffic/los-loop/los_speed.csv", "traffic/los-loop/los_adj.csv"]
    here = [base is not None and Path(base / each).is_file() for each in roads]
    found.append(Entry("los-loop", "traffic of Los Angeles", ", ".join(roads), _how_many(here), "by hand"))
    return found


def _how_many(here: list[bool]) -> str:
    return "yes" if all(here) else f"{sum(here)} of {len(here)} files" if any(here) else "no"
