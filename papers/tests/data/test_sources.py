"""Published data sets: files in their formats written here, scikit-learn's digits, and the real files if present."""

import gzip
import lzma
import os
import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.data.sources import available, load

RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8)
DIGITS = np.array([7, 0, 9, 3], np.uint8)
COLOR = RNG.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
NAMES = {"images": "train-images-idx3-ubyte.gz", "labels": "train-labels-idx1-ubyte.gz"}


def idx(array, magic=0x800):
    return struct.pack(f">{1 + array.ndim}I", magic + array.ndim, *array.shape) + array.tobytes()


def cifar(images, *labels):
    """Build one CIFAR record: the labels, then one plane per color."""
    return b"".join(
        bytes(own) + image[..., 0].tobytes() + image[..., 1].tobytes() + image[..., 2].tobytes()
        for *own, image in zip(*labels, images, strict=True)
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    for name in ("mnist", "emnist", "cifar10", "cifar100", "a9a"):
        (tmp_path / name).mkdir()
    return tmp_path


def write_mnist(folder, images=GRAY, labels=DIGITS):
    for name, array in (("images", images), ("labels", labels)):
        (folder / "mnist" / NAMES[name]).write_bytes(gzip.compress(idx(array)))


def test_mnist_is_read_packed_or_plain_and_in_parts(folder):
    write_mnist(folder)
    (folder / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(255 - GRAY[:2]))
    (folder / "mnist" / "t10k-labels-idx1-ubyte.xz").write_bytes(lzma.compress(idx(DIGITS[:2])))
    train, test, both = (load("mnist", part) for part in ("train", "test", "all"))
    assert (train.name, train.classes, train.inputs.dtype, train.labels.dtype) == ("mnist", 10, "float32", "int64")
    np.testing.assert_allclose(train.inputs, GRAY / 255, rtol=1e-6)
    np.testing.assert_array_equal(train.labels, DIGITS)
    np.testing.assert_allclose(test.inputs, 1 - GRAY[:2] / 255, atol=1e-6)
    np.testing.assert_array_equal(both.labels, [*DIGITS, *DIGITS[:2]])
    np.testing.assert_array_equal(both.inputs, np.concatenate([train.inputs, test.inputs]))
    assert "4 of 70,000 examples (train-images-idx3-ubyte)" in train.note
    chosen = both.rows(np.array([5, 0]))
    np.testing.assert_array_equal(chosen.labels, [0, 7])
    np.testing.assert_array_equal(chosen.inputs, both.inputs[[5, 0]])


def test_emnist_is_turned_upright(folder):
    for part, images in (("images-idx3", GRAY), ("labels-idx1", np.array([61, 0, 10, 35], np.uint8))):
        (folder / "emnist" / f"emnist-byclass-test-{part}-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    found = load("emnist")
    assert (found.inputs.shape, found.classes) == ((4, 28, 28), 62)
    for image, stored in zip(found.inputs, GRAY, strict=True):
        np.testing.assert_allclose(image, stored.T / 255, rtol=1e-6)
    assert "4 of 814,255" in found.note
    assert (available("emnist", "test"), available("emnist", "train"), available("emnist")) == (True, False, True)
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: .*emnist-byclass-train-images-idx3-ubyte, plain"):
        load("emnist", "train")


def test_cifar_has_colors_last_and_coarse_labels(folder):
    (folder / "cifar10" / "data_batch_2.bin.xz").write_bytes(lzma.compress(cifar(COLOR, [3, 9, 0])))
    (folder / "cifar10" / "data_batch_5.bin").write_bytes(cifar(COLOR[:1], [8]))
    (folder / "cifar100" / "test.bin").write_bytes(cifar(COLOR, [19, 0, 7], [99, 0, 50]))
    ten, hundred = load("cifar10", "train"), load("cifar100")
    np.testing.assert_allclose(ten.inputs, np.concatenate([COLOR, COLOR[:1]]) / 255, rtol=1e-6)
    np.testing.assert_array_equal(ten.labels, [3, 9, 0, 8])
    assert "4 of 60,000 examples (data_batch_2.bin, data_batch_5.bin)" in ten.note
    assert ten.coarse is None
    np.testing.assert_array_equal(hundred.labels, [99, 0, 50])
    np.testing.assert_array_equal(hundred.coarse, [19, 0, 7])
    np.testing.assert_array_equal(hundred.rows(np.array([False, False, True])).coarse, [7])


def test_a9a_is_dense_with_labels_0_and_1(folder):
    (folder / "a9a" / "a9a").write_text("-1 3:1 123:0.5 \n+1 1:1 \n")
    found = load("a9a")
    expected = np.zeros((2, 123))
    expected[0, [2, 122]], expected[1, 0] = (1, 0.5), 1
    np.testing.assert_array_equal(found.inputs, expected)
    np.testing.assert_array_equal(found.labels, [0, 1])


def test_digits_need_no_folder(monkeypatch):
    images, labels = load_digits(return_X_y=True)
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    found = load("digits")
    np.testing.assert_allclose(found.inputs.reshape(1797, 64) * 16, images, rtol=1e-6)
    np.testing.assert_array_equal(found.labels, labels)
    train, test = load("digits", "train"), load("digits", "test")
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), labels)
    assert available("digits")
    assert not available("mnist")


def test_what_is_missing_is_named(folder, monkeypatch):
    assert not available("mnist")
    with pytest.raises(
        InvalidInput, match=r"HYPERPUSH_DATA: got '.*mnist: nothing.*; allowed: a folder with MNIST: tr"
    ):
        load("mnist")
    write_mnist(folder)
    (folder / "mnist" / NAMES["labels"]).unlink()
    with pytest.raises(InvalidInput, match=r"train-labels-idx1-ubyte: no such file'"):
        load("mnist")
    monkeypatch.setenv("HYPERPUSH_DATA", str(folder / "nowhere"))
    for call in (load, available):
        with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got '.*nowhere'; allowed: a folder that exists"):
            call("mnist")
    monkeypatch.setenv("HYPERPUSH_DATA", "")
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got None; allowed: a folder that holds mnist/"):
        load("mnist")
    with pytest.raises(InvalidInput, match=r"data: got 'minst'; allowed: .*\(did you mean 'mnist'"):
        load("minst")
    with pytest.raises(InvalidInput, match=r"part: got 'valid'; allowed: all, test, train"):
        available("digits", "valid")


WHOLE = gzip.compress(idx(GRAY))
HUGE = struct.pack(">4I", 0x803, 2**31, 2**31, 4)  # 2⁶⁴ entries, a product that overflows to 0 in 64 bits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzipped", r"'; allowed: a gzipped file"),
        (WHOLE[:-12], r"'; allowed: a gzipped file"),
        (WHOLE[:15] + b"\xff\xff" + WHOLE[17:], r"'; allowed: a gzipped file"),
        (gzip.compress(b""), r": 0 bytes'; allowed: an IDX file of bytes in 3 dimensions"),
        (gzip.compress(idx(GRAY)[:-1]), r": 3151 bytes'; allowed: an IDX file .*: 3152 bytes, 4×28×28 of them"),
        (gzip.compress(idx(GRAY) + b"\0"), r": 3153 bytes'; allowed: an IDX file .*: 3152 bytes"),
        (gzip.compress(idx(GRAY, magic=0xD00)), r": magic number 0xd03'; allowed: an IDX file .*: magic number 0x803"),
        (gzip.compress(idx(DIGITS)), r": 12 bytes'; allowed: an IDX file"),
        (gzip.compress(idx(GRAY[:0])), r": 16 bytes'; allowed: an IDX file .*at least 1"),
        (gzip.compress(HUGE), r": 16 bytes'; allowed: an IDX file .*: 18446744073709551632 bytes, 2147483648×21"),
        (gzip.compress(idx(GRAY[:, :10, :9])), r": images of 10×9'; allowed: images of 28×28"),
    ],
    ids=["plain", "cut", "corrupt", "empty", "short", "long", "floats", "labels", "none", "huge", "small"],
)
def test_broken_idx_files_are_refused(folder, content, message):
    write_mnist(folder)
    (folder / "mnist" / NAMES["images"]).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"HYPERPUSH_DATA: got '.*train-images-idx3-ubyte\.gz{message}"):
        load("mnist")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("cifar10/test_batch.bin", cifar(COLOR, [0, 1, 2])[:-1], r"9218 bytes'; allowed: complete records of 3073"),
        ("cifar10/test_batch.bin", b"", r"0 bytes"),
        (
            "cifar10/test_batch.bin",
            cifar(COLOR, [0, 10, 2]),
            r"test_batch\.bin: a label 10'; allowed: labels from 0 to 9",
        ),
        ("cifar10/test_batch.bin.xz", lzma.compress(cifar(COLOR, [0, 1, 2]))[:-9], r"packed by xz that can be read"),
        ("cifar10/test_batch.bin.xz", b"plain", r"packed by xz that can be read"),
        ("cifar100/test.bin", cifar(COLOR, [0, 20, 2], [0, 1, 2]), r"a label 20'; allowed: coarse labels"),
        (
            "cifar100/test.bin",
            cifar(COLOR, [0, 1, 2], [0, 100, 2]),
            r"test\.bin: a label 100'; allowed: labels from 0 to 99",
        ),
        ("a9a/a9a", b"-1 124:1\n", r"allowed: lines .* from 1 to 123"),
        ("a9a/a9a", b"-1 3=1\n", r"allowed: lines "),
        ("a9a/a9a", b"-1 0:1\n", r"allowed: lines "),
        ("a9a/a9a", b"2 3:1\n", r"a label 2'; allowed: labels -1 and \+1"),
        ("a9a/a9a", b"-1 3:nan\n", r"finite numbers only"),
        ("a9a/a9a", b"-1 3:1\n+1 5:1e39\n", r"a9a: feature 5 of example 2'; allowed: finite numbers only"),
        ("a9a/a9a", b"", r"at least one line"),
    ],
)
def test_broken_files_are_refused(folder, file, content, message):
    (folder / file).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"^HYPERPUSH_DATA: got .*{message}"):
        load(file.partition("/")[0])


@pytest.mark.parametrize(
    ("labels", "message"),
    [(DIGITS[:3], r"4 images, 3 labels.*as many labels"), (DIGITS + 1, r"train-labels.*: a label 10'.*from 0 to 9")],
    ids=["fewer", "ten"],
)
def test_labels_that_do_not_fit_are_refused(folder, labels, message):
    write_mnist(folder, labels=labels)
    with pytest.raises(InvalidInput, match=message):
        load("mnist")


@pytest.mark.skipif(not os.environ.get("HYPERPUSH_DATA"), reason="HYPERPUSH_DATA is not set")
def test_the_real_files_are_what_was_published():
    if available("mnist", "test"):
        # The number of images of each digit is that of MNIST's published test set.
        counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        np.testing.assert_array_equal(np.bincount(load("mnist", "test").labels), counts)
    if available("cifar100", "test"):
        found = load("cifar100", "test")
        np.testing.assert_array_equal(np.bincount(found.labels), np.full(100, 100))
        assert found.coarse is not None
        np.testing.assert_array_equal(np.bincount(found.coarse), np.full(20, 500))
    if available("a9a"):
        assert load("a9a", "train").inputs.shape == (32_561, 123)
    if available("emnist", "test"):
        found = load("emnist", "test")
        assert found.inputs.shape == (116_323, 28, 28)
        # A letter L is a vertical bar at the left with a foot at the bottom: upright, not transposed.
        letter = found.inputs[found.labels == 10 + ord("L") - ord("A")].mean(0)
        assert letter[:14, :14].mean() > 2 * letter[:14, 14:].mean()
        assert letter[18:, 14:].mean() > 2 * letter[:10, 14:].mean()
