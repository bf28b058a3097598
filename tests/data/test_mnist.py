"""Images of digits: MNIST's own files written here byte by byte, and scikit-learn's digits."""

import gzip
import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hyperpush.data.mnist import digits
from hyperpush.errors import InvalidInput

IMAGES = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
LABELS = np.array([7, 0, 9, 3], np.uint8)
NAMES = {"images": "train-images-idx3-ubyte.gz", "labels": "train-labels-idx1-ubyte.gz"}


def idx(array, magic=0x800):
    head = struct.pack(f">{1 + array.ndim}I", magic + array.ndim, *array.shape)
    return head + array.tobytes()


def write(folder, images=IMAGES, labels=LABELS):
    (folder / "mnist").mkdir()
    for name, array in (("images", images), ("labels", labels)):
        (folder / "mnist" / NAMES[name]).write_bytes(gzip.compress(idx(array)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("source", ["auto", "mnist"])
def test_mnist_is_read_from_the_folder(folder, source):
    write(folder)
    found = digits(source)
    assert (found.source, found.white) == ("mnist", 255)
    np.testing.assert_array_equal(found.images, IMAGES)
    np.testing.assert_array_equal(found.labels, LABELS)


def test_without_a_folder_scikit_learn_serves(monkeypatch, tmp_path):
    images, labels = load_digits(return_X_y=True)
    for setting in (None, "", str(tmp_path)):  # not set, empty, a folder with other data
        if setting is None:
            monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
        else:
            monkeypatch.setenv("HYPERPUSH_DATA", setting)
        found = digits()
        assert (found.source, found.white) == ("digits", 16)
        np.testing.assert_array_equal(found.images.reshape(1797, 64), images)
        np.testing.assert_array_equal(found.labels, labels)


def test_digits_can_be_asked_for_where_mnist_is(folder):
    write(folder)
    assert digits("digits").source == "digits"


def test_what_is_missing_is_named(folder, monkeypatch):
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got '.*train-images-idx3-ubyte\.gz'.*No such file"):
        digits("mnist")
    write(folder)
    (folder / "mnist" / NAMES["labels"]).unlink()
    with pytest.raises(InvalidInput, match=r"train-labels-idx1-ubyte\.gz'.*No such file"):
        digits()
    monkeypatch.setenv("HYPERPUSH_DATA", str(folder / "nowhere"))
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got '.*nowhere'; allowed: a folder that exists"):
        digits()
    monkeypatch.delenv("HYPERPUSH_DATA")
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got None; allowed: a folder that holds mnist/"):
        digits("mnist")
    with pytest.raises(InvalidInput, match=r"data: got 'minst'; allowed: auto, digits, mnist \(did you mean 'mnist'"):
        digits("minst")


WHOLE = gzip.compress(idx(IMAGES))


@pytest.mark.parametrize(
    "content",
    [
        b"not gzipped",
        WHOLE[:-12],
        WHOLE[:15] + b"\xff\xff" + WHOLE[17:],
        gzip.compress(b""),
        gzip.compress(idx(IMAGES)[:-1]),
        gzip.compress(idx(IMAGES) + b"\0"),
        gzip.compress(idx(IMAGES, magic=0xD00)),
        gzip.compress(idx(LABELS)),
    ],
    ids=["plain", "cut", "corrupt", "empty", "short", "long", "floats", "labels"],
)
def test_broken_files_are_refused(folder, content):
    write(folder)
    (folder / "mnist" / NAMES["images"]).write_bytes(content)
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got '.*train-images-idx3-ubyte\.gz'; allowed: an? "):
        digits("mnist")


@pytest.mark.parametrize(
    ("labels", "message"),
    [(LABELS[:3], r"4 images, 3 labels.*as many labels"), (LABELS + 1, r"a label 10.*from 0 to 9")],
    ids=["fewer", "ten"],
)
def test_labels_that_do_not_fit_are_refused(folder, labels, message):
    write(folder, labels=labels)
    with pytest.raises(InvalidInput, match=message):
        digits("mnist")
