"""Published data sets, read from their own files; scikit-learn's digits where there are none."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Shaped
from sklearn.datasets import load_digits, load_svmlight_file

from hyperpush.base.errors import unknown
from hyperpush_papers.common.data import files

PARTS = ("train", "test", "all")
FEATURES = 123  # of a9a
_SIZE = (28, 28)  # of the images of MNIST and EMNIST


class Dataset(NamedTuple):
    """Examples with their labels."""

    name: str
    inputs: Shaped[np.ndarray, "m ..."]  # float32: images in [0, 1], features; text: numbers of characters
    labels: Int64[np.ndarray, " m"]
    classes: int
    note: str = ""  # the part of the published data
    coarse: Int64[np.ndarray, " m"] | None = None  # labels of groups of classes, where there are any

    def rows(self, chosen: Shaped[np.ndarray, " k"]) -> "Dataset":
        """The examples at these numbers, or with True at their place."""
        coarse = None if self.coarse is None else self.coarse[chosen]
        return self._replace(inputs=self.inputs[chosen], labels=self.labels[chosen], coarse=coarse)


class _Read(NamedTuple):
    inputs: Float32[np.ndarray, "m ..."]
    labels: Int64[np.ndarray, " m"]
    coarse: Int64[np.ndarray, " m"] | None = None


class _Source(NamedTuple):
    title: str
    published: int  # examples in all parts together
    classes: int
    read: Callable[[Sequence[Path]], _Read]
    files: dict[str, tuple[tuple[str, ...], ...]]  # by part: those that are read together


def load(name: str, part: str = "all") -> Dataset:
    """A data set by its name: its training or test part, or all of it that is at hand.

    Files are looked for in the folder `name` in the folder that the environment variable HYPERPUSH_DATA names, as
    published, plain or packed by gzip or xz. Where only some of the files of a part are there, these are the part; the
    dataset's note says so. scikit-learn's digits need no files; they were published without parts, and here the last
    360 are for testing.
    """
    source = _source_of(name, part)
    if source is None:
        return _digits(part)
    base = files.required_folder(f"{name}/")
    asked = _files_of(source, part)
    groups = [group for group in asked if files.find(base / name / group[0])]
    if not groups:
        names = " or ".join(group[0] for group in asked)
        raise files.file_error(
            base / name, f"a folder with {source.title}: {names}, plain, .gz or .xz", "nothing of it"
        )
    read = [_read_labeled(source, [_file(base / name / each) for each in group]) for group in groups]
    inputs, labels = (_join([each[place] for each in read]) for place in (0, 1))
    coarse = None if read[0].coarse is None else _join([each.coarse for each in read])
    return Dataset(name, inputs, labels, source.classes, _note(source, groups, len(labels)), coarse)


def available(name: str, part: str = "all") -> bool:
    """Return True if `load` finds the files of this part, or needs none."""
    source, base = _source_of(name, part), files.folder()
    if source is None:
        return True
    return base is not None and any(files.find(base / name / group[0]) for group in _files_of(source, part))


def published_files() -> dict[str, tuple[str, list[str]]]:
    """The title and the files of every data set that has files, in the folder of its name."""
    return {
        name: (source.title, [file for group in _files_of(source, "all") for file in group])
        for name, source in _SOURCES.items()
    }


def _source_of(name: str, part: str) -> _Source | None:
    if name != "digits" and name not in _SOURCES:
        raise unknown("data", name, ("digits", *_SOURCES))
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    return _SOURCES.get(name)


def _files_of(source: _Source, part: str) -> list[tuple[str, ...]]:
    return [group for own, groups in source.files.items() if part in (own, "all") for group in groups]


def _file(path: Path) -> Path:
    found = files.find(path)
    if found is None:
        raise files.file_error(path, "this file, plain, .gz or .xz", "no such file")
    return found


def _read_labeled(source: _Source, paths: Sequence[Path]) -> _Read:
    """Read files together; the last one has the labels."""
    read = source.read(paths)
    if read.labels.max() >= source.classes:
        raise files.file_error(paths[-1], f"labels from 0 to {source.classes - 1}", f"a label {read.labels.max()}")
    return read


def _join(arrays: list) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _note(source: _Source, groups: Sequence[tuple[str, ...]], examples: int) -> str:
    if examples == source.published:
        return f"{source.title}: all {examples:,} examples"
    names = ", ".join(group[0] for group in groups)
    return f"{source.title}: {examples:,} of {source.published:,} examples ({names})"


def _digits(part: str) -> Dataset:
    images, labels = load_digits(return_X_y=True)
    inputs, labels = (np.asarray(images) / 16).astype(np.float32).reshape(-1, 8, 8), np.asarray(labels, np.int64)
    test = len(labels) // 5 + 1
    chosen = {"all": slice(None), "train": slice(-test), "test": slice(-test, None)}[part]
    note = "scikit-learn's digits: "
    note += "all 1,797 examples" if part == "all" else f"{len(labels[chosen]):,} of 1,797 examples ({part})"
    return Dataset("digits", inputs[chosen], labels[chosen], 10, note)


def _gray(bytes_: np.ndarray) -> Float32[np.ndarray, "..."]:
    return np.divide(bytes_, 255, dtype=np.float32)


def _images(paths: Sequence[Path]) -> _Read:
    images, labels = files.idx(paths[0], 3), files.idx(paths[1], 1)
    if images.shape[1:] != _SIZE:
        given, allowed = ("images of {}×{}".format(*shape) for shape in (images.shape[1:], _SIZE))
        raise files.file_error(paths[0], allowed, given)
    if len(images) != len(labels):
        raise files.file_error(paths[1], "as many labels as images", f"{len(images)} images, {len(labels)} labels")
    return _Read(_gray(images), labels.astype(np.int64))


def _upright_images(paths: Sequence[Path]) -> _Read:
    """EMNIST's files hold every image with its rows as columns."""
    read = _images(paths)
    return read._replace(inputs=np.ascontiguousarray(read.inputs.swapaxes(1, 2)))


def _cifar10(paths: Sequence[Path]) -> _Read:
    labels, images = files.records(paths[0], 1)
    return _Read(_gray(images), labels[:, 0])


def _cifar100(paths: Sequence[Path]) -> _Read:
    labels, images = files.records(paths[0], 2)
    if labels[:, 0].max() > 19:
        raise files.file_error(paths[0], "coarse labels from 0 to 19", f"a label {labels[:, 0].max()}")
    return _Read(_gray(images), labels[:, 1], labels[:, 0])


def _a9a(paths: Sequence[Path]) -> _Read:
    """Dense inputs and labels 0/1 of a LIBSVM file with labels −1/+1 and features numbered from 1."""
    (path,) = paths
    try:
        # scikit-learn's own annotations are of the defaults only.
        options: Any = {"n_features": FEATURES, "dtype": np.float32, "zero_based": False}
        found = load_svmlight_file(BytesIO(files.unpack(path)), **options)
    except (ValueError, OverflowError) as error:
        allowed = f"lines `label number:value …` with features from 1 to {FEATURES} ({error})"
        raise files.file_error(path, allowed) from None
    inputs, signs = np.asarray(found[0].todense(), np.float32), np.asarray(found[1])
    if not len(signs):
        raise files.file_error(path, "at least one line", "no lines")
    if not np.all(np.isfinite(inputs)):
        example, feature = np.argwhere(~np.isfinite(inputs))[0] + 1
        allowed = "finite numbers only, at most 3.4e38 in size (float32)"
        raise files.file_error(path, allowed, f"feature {feature} of example {example}")
    if not np.all(np.abs(signs) == 1):
        raise files.file_error(path, "labels -1 and +1", f"a label {signs[np.abs(signs) != 1][0]:g}")
    return _Read(inputs, (signs > 0).astype(np.int64))


def _pair(stem: str) -> tuple[tuple[str, str]]:
    return ((f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"),)


_SOURCES = {
    "mnist": _Source("MNIST", 70_000, 10, _images, {"train": _pair("train"), "test": _pair("t10k")}),
    "emnist": _Source(
        "EMNIST ByClass",
        814_255,
        62,
        _upright_images,
        {"train": _pair("emnist-byclass-train"), "test": _pair("emnist-byclass-test")},
    ),
    "cifar10": _Source(
        "CIFAR-10",
        60_000,
        10,
        _cifar10,
        {"train": tuple((f"data_batch_{i}.bin",) for i in range(1, 6)), "test": (("test_batch.bin",),)},
    ),
    "cifar100": _Source("CIFAR-100", 60_000, 100, _cifar100, {"train": (("train.bin",),), "test": (("test.bin",),)}),
    "a9a": _Source("a9a (Adult)", 48_842, 2, _a9a, {"train": (("a9a",),), "test": (("a9a.t",),)}),
}
