"""Published files, downloaded on demand only and checked. Needs pooch: `pip install hyperpush[download]`."""

import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hyperpush.errors import InvalidInput, unknown
from hyperpush.studies.data import files, sources

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_NIST = "https://biometrics.nist.gov/cs_links/EMNIST/"
# Address and checksum by data set: SHA-256 where no other is named.
KNOWN = {
    "emnist": {f"{_NIST}gzip.zip": "md5:58c8d27c78d21e728a6bc7b3cc06412e"},
    "mnist": {
        f"{_MNIST}train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        f"{_MNIST}train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        f"{_MNIST}t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        f"{_MNIST}t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "cifar10": {f"{_CIFAR}cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    "cifar100": {
        f"{_CIFAR}cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
    },
    "a9a": {
        f"{_LIBSVM}a9a": "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
        f"{_LIBSVM}a9a.t": "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
    },
}


def get(name: str, to: Path | None = None) -> list[Path]:
    """Put a data set's files where `sources.load` finds them, in `to` or what HYPERPUSH_DATA names; gives their paths.

    Files that are there and right are kept. All others are fetched and checked aside: all of them arrive, or none.
    """
    if name not in KNOWN:
        raise unknown("data", name, KNOWN)
    base = files.folder() if to is None else to
    if base is None:
        raise InvalidInput(files.FOLDER, None, "a folder to download into: set this environment variable, or --to")
    try:
        import pooch
    except ImportError:
        raise InvalidInput("pooch", "not installed", "pip install hyperpush[download]") from None
    folder, wanted = base / name, sources.wanted()[name][1]
    try:
        with _aside(folder) as aside:
            for address, checksum in KNOWN[name].items():
                if not _there(pooch, folder, address, checksum, wanted):
                    _fetch(pooch, name, address, checksum, wanted, aside)
            folder.mkdir(exist_ok=True)
            for each in aside.iterdir():
                each.replace(folder / each.name)
    except OSError as error:
        raise InvalidInput("--to", str(base), f"a folder that can be written ({error.strerror or error})") from None
    return [found for file in wanted if (found := files.find(folder / file))]


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder beside this one; in the end it is gone, with the folders above it that were made and are empty."""
    aside = folder.with_name(f".{folder.name}.partial")
    made = [each for each in (aside, *aside.parents) if not each.exists()]
    try:
        aside.mkdir(parents=True, exist_ok=True)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        for each in made[1:]:
            with suppress(OSError):  # something is in it
                each.rmdir()


def _there(pooch: Any, folder: Path, address: str, checksum: str, wanted: Sequence[str]) -> bool:
    """Whether a file is there and right; of an archive, whether all that was in it is there."""
    path = folder / _file(address)
    if _is_archive(path):
        return all(files.find(folder / file) for file in wanted)
    return path.is_file() and pooch.file_hash(str(path)) == checksum


def _fetch(pooch: Any, name: str, address: str, checksum: str, wanted: Sequence[str], into: Path) -> None:
    """A file, or the wanted files of an archive, whatever folder they are in there."""
    try:
        path = Path(pooch.retrieve(address, checksum, _file(address), into))
    except Exception as error:  # pooch lets through what its transports raise
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
