"""Images of handwritten digits: MNIST where it is at hand, otherwise the small ones that come with scikit-learn."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from hyperpush.errors import InvalidInput, unknown

FOLDER = "HYPERPUSH_DATA"
SOURCES = ("auto", "mnist", "digits")
_MAGIC = {1: 0x801, 3: 0x803}  # IDX: bytes, in so many dimensions


class Digits(NamedTuple):
    """Grey images with the digit that each shows."""

    source: Literal["mnist", "digits"]
    images: UInt8[np.ndarray, "m height width"]
    labels: Int[np.ndarray, " m"]
    white: int  # the largest grey value: 255 or 16


def digits(source: str = "auto") -> Digits:
    """Training images of MNIST (60,000 of 28x28) or all of scikit-learn's digits (1,797 of 8x8).

    MNIST is read from the folder `mnist` in the folder that the environment variable HYPERPUSH_DATA names, in its
    original files (`train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`). `"auto"` takes MNIST if that folder is
    there.
    """
    if source not in SOURCES:
        raise unknown("data", source, SOURCES)
    folder = None if source == "digits" else _folder()
    if folder is not None and (source == "mnist" or folder.is_dir()):
        return _mnist(folder)
    if source == "mnist":
        raise InvalidInput(FOLDER, None, "a folder that holds mnist/: set this environment variable, or data=digits")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return Digits("digits", np.asarray(images, np.uint8).reshape(-1, 8, 8), np.asarray(labels, np.int64), 16)


def _folder() -> Path | None:
    """Where MNIST would be; None if the environment names no folder."""
    named = os.environ.get(FOLDER)
    if not named:
        return None
    if not Path(named).is_dir():
        raise InvalidInput(FOLDER, named, "a folder that exists, or unset")
    return Path(named, "mnist")


def _mnist(folder: Path) -> Digits:
    images = _idx(folder / "train-images-idx3-ubyte.gz", 3)
    labels = _idx(folder / "train-labels-idx1-ubyte.gz", 1)
    if len(images) != len(labels):
        raise InvalidInput(str(folder), f"{len(images)} images, {len(labels)} labels", "as many labels as images")
    if labels.size and labels.max() > 9:
        raise InvalidInput(str(folder), f"a label {labels.max()}", "labels from 0 to 9")
    return Digits("mnist", images, labels.astype(np.int64), 255)


def _idx(path: Path, dimensions: int) -> UInt8[np.ndarray, "..."]:
    """The array in a gzipped IDX file: magic number and sizes as big-endian 32-bit words, then one byte per entry."""
    try:
        with gzip.open(path) as file:
            raw = file.read()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(FOLDER, str(path), f"a gzipped file that can be read ({reason})") from None
    head = np.frombuffer(raw[: 4 * (1 + dimensions)], ">u4") if len(raw) >= 4 * (1 + dimensions) else np.zeros(1)
    body = len(raw) - 4 * (1 + dimensions)
    if head[0] != _MAGIC[dimensions] or body != np.prod(head[1:], dtype=np.int64):
        raise InvalidInput(FOLDER, str(path), f"an IDX file of bytes in {dimensions} dimensions, complete")
    return np.frombuffer(raw, np.uint8, offset=4 * (1 + dimensions)).reshape(head[1:].astype(np.int64))
