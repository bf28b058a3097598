"""Published files, downloaded on demand only and checked. The extra `studies` brings pooch."""

import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import pooch

from hyperpush.base.errors import InvalidInput, unknown
from hyperpush_papers.common.data import files, sources
from hyperpush_papers.common.data.catalog import KNOWN


def get(name: str, to: Path | None = None) -> list[Path]:
    """Put a data set's files where `sources.load` finds them, in `to` or in HYPERPUSH_DATA; return their paths.

    Files that are there and right are kept. All others are fetched and checked aside: all of them arrive, or none.
    """
    if name not in KNOWN:
        raise unknown("data", name, KNOWN)
    base = files.folder() if to is None else to
    if base is None:
        raise InvalidInput(files.FOLDER, None, "a folder to download into: set this environment variable, or --to")
    folder, wanted = base / name, sources.published_files()[name][1]
    try:
        # Beside the folder, so that files move into it at once.
        beside = next(each for each in folder.parents if each.exists())
        with TemporaryDirectory(prefix=".partial-", dir=beside) as temporary:
            aside = Path(temporary)
            for address, checksum in KNOWN[name].items():
                if not _is_there(folder, address, checksum, wanted):
                    _fetch(name, address, checksum, wanted, aside)
            folder.mkdir(parents=True, exist_ok=True)
            for each in aside.iterdir():
                each.replace(folder / each.name)
    except OSError as error:
        raise InvalidInput("--to", str(base), f"a folder that can be written ({error.strerror or error})") from None
    return [found for file in wanted if (found := files.find(folder / file))]


def _is_there(folder: Path, address: str, checksum: str, wanted: Sequence[str]) -> bool:
    """Return True if a file exists and is intact; of an archive, if all its files exist."""
    path = folder / _file(address)
    if _is_archive(path):
        return all(files.find(folder / file) for file in wanted)
    return path.is_file() and pooch.file_hash(str(path)) == checksum


def _fetch(name: str, address: str, checksum: str, wanted: Sequence[str], into: Path) -> None:
    """A file, or the wanted files of an archive, whatever folder they are in there."""
    try:
        path = Path(pooch.retrieve(address, checksum, _file(address), into))
    except Exception as error:  # pooch passes on errors of its transports
        raise InvalidInput("data", name, f"a download that can be completed: {address} ({error})") from None
    if not _is_archive(path):
        return
    names = {file + packing for file in wanted for packing in files.PACKINGS}
    for member, content in _members(path):
        if member in names:
            with content, (into / member).open("wb") as file:
                shutil.copyfileobj(content, file)
    path.unlink()


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names without folders, and contents."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            for name in zipped.namelist():
                yield Path(name).name, zipped.open(name)
        return
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if member.isfile() and (content := opened.extractfile(member)):
                yield Path(member.name).name, content


def _file(address: str) -> str:
    return address.rpartition("/")[2]


def _is_archive(path: Path) -> bool:
    return path.name.endswith((".tar.gz", ".zip"))
