"""Published files, downloaded on demand only and checked. Needs pooch: `pip install hyperpush[download]`."""

import tarfile
from pathlib import Path

from hyperpush.data import files
from hyperpush.errors import InvalidInput, unknown

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
# Address and SHA-256, by data set.
KNOWN = {
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


def get(name: str) -> list[Path]:
    """Put a data set's files where `sources.load` finds them; gives their paths."""
    if name not in KNOWN:
        raise unknown("data", name, KNOWN)
    base = files.folder()
    if base is None:
        raise InvalidInput(files.FOLDER, None, "a folder to download into: set this environment variable")
    try:
        import pooch
    except ImportError:
        raise InvalidInput("pooch", "not installed", "pip install hyperpush[download]") from None
    found = []
    for address, checksum in KNOWN[name].items():
        try:
            path = pooch.retrieve(address, f"sha256:{checksum}", address.rpartition("/")[2], base / name)
        except Exception as error:  # pooch lets through what its transports raise
            raise InvalidInput("data", name, f"a download that can be completed: {address} ({error})") from None
        found += _members(Path(path)) if tarfile.is_tarfile(path) else [Path(path)]
    return found


def _members(archive: Path) -> list[Path]:
    """Take the binary files out of an archive, whatever folder they are in."""
    found = []
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if member.isfile() and member.name.endswith(".bin") and (content := opened.extractfile(member)):
                path = archive.parent / Path(member.name).name
                unfinished = path.with_suffix(".part")
                unfinished.write_bytes(content.read())
                found.append(unfinished.replace(path))
    return found
