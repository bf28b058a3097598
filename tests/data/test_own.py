"""A user's own data: files per client, and tables."""

import numpy as np
import pytest

from hyperpush.data import own
from hyperpush.data.partition import by_owner
from hyperpush.errors import InvalidInput

ANN = {"inputs": np.arange(12.0).reshape(3, 2, 2), "labels": np.array([0, 2, 1])}
BOB = {"inputs": np.ones((1, 2, 2), np.uint8), "labels": np.array([1], np.uint8)}
TABLE = "client,x,label,y\nbob,1,0,2\nann,-3e2,2,4.5\nbob,5,1,6\n"


def test_a_folder_has_a_file_for_each_client(tmp_path):
    np.savez(tmp_path / "bob.npz", **BOB)
    np.savez_compressed(tmp_path / "ann.npz", **ANN)
    (tmp_path / "notes.txt").write_text("not data")
    found = own.from_folder(tmp_path)
    assert (found.classes, found.owner_names, found.inputs.dtype) == (3, ("ann", "bob"), "float32")
    np.testing.assert_array_equal(found.inputs, np.concatenate([ANN["inputs"], BOB["inputs"]]))
    np.testing.assert_array_equal(found.labels, [0, 2, 1, 1])
    owned, _ = by_owner(found, np.random.default_rng(0))
    assert [list(each) for each in owned] == [[0, 1, 2], [3]]
    assert "4 examples of 2 clients" in found.note


def test_a_table_has_a_column_of_clients(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    found = own.from_csv(tmp_path / "table.csv", classes=4)
    assert (found.name, found.classes, found.owner_names) == ("table", 4, ("ann", "bob"))
    np.testing.assert_array_equal(found.inputs, [[1, 2], [-300, 4.5], [5, 6]])
    np.testing.assert_array_equal(found.labels, [0, 2, 1])
    np.testing.assert_array_equal(found.owners, [1, 0, 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"inputs": np.array([[{}]], object), "labels": np.array([0])}, r"ann\.npz: .*without objects"),
        ({"inputs": ANN["inputs"]}, r"ann\.npz: got \['inputs'\]; allowed: arrays inputs and labels"),
        ({**ANN, "labels": np.array([0, 1])}, r"labels \(2,\)'; allowed: inputs \[m, …\] and labels \[m\]"),
        ({**ANN, "labels": np.array([0.0, 1, 1])}, r"labels float64 \(3,\)'; allowed: one whole number"),
        ({**ANN, "labels": np.array([0, -1, 1])}, r"a label -1'; allowed: labels from 0 to 1"),
        ({**ANN, "inputs": np.full((3, 2, 2), np.nan)}, r"not finite, of client ann'"),
        ({**ANN, "inputs": np.full((3, 2, 2), "a")}, r"inputs <U1'; allowed: real numbers"),
        ({**ANN, "inputs": np.zeros((3, 5))}, r"bob\.npz: got 'inputs \(2, 2\)'; allowed: inputs \(5,\)"),
        ({"inputs": np.zeros((0, 2, 2)), "labels": np.zeros(0, int)}, r"m at least 1"),
    ],
    ids=["objects", "no labels", "fewer", "floats", "negative", "nan", "text", "shape", "empty"],
)
def test_bad_files_are_refused(tmp_path, content, message):
    np.savez(tmp_path / "ann.npz", **content)
    np.savez(tmp_path / "bob.npz", **BOB)
    with pytest.raises(InvalidInput, match=message):
        own.from_folder(tmp_path)


def test_files_that_are_no_archives_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"folder: got .*; allowed: a folder with a \.npz file for each client"):
        own.from_folder(tmp_path)
    np.savez(tmp_path / "ann.npz", **ANN)
    whole = (tmp_path / "ann.npz").read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "ann.npz").write_bytes(content)
        with pytest.raises(InvalidInput, match=r"ann\.npz: got 'a file that cannot be read'"):
            own.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (TABLE, {"client": "owner"}, r"client: got 'owner'; allowed: one of the columns client, x, label, y"),
        (TABLE, {"label": "class"}, r"label: got 'class'; allowed: one of the columns"),
        (TABLE, {"classes": 2}, r"a label 2'; allowed: labels from 0 to 1"),
        ("client,label,x\na,0,one\n", {}, r"row 2: got .*one.*; allowed: numbers"),
        ("client,label,x\na,0,1\na,0\n", {}, r"row 3: got '2 entries'; allowed: 3, one per column"),
        ("client,label,x\na,0.5,1\n", {}, r"column label: got .*0\.5.*; allowed: whole numbers"),
        ("client,label,x\na,0,nan\n", {}, r"not finite, of client a'"),
        ("client,label,x\n", {}, r"at least one row"),
        ("client,label\na,0\n", {}, r"one column of inputs"),
        ("", {}, r"client: got 'client'; allowed: .*there are none"),
        ("client,label,label,x\na,0,1,1\n", {}, r"label: got 'label'"),
        (b"client,label,x\n\xff,0,1\n", {}, r"a CSV file in UTF-8"),
        (None, {}, r"path: got .*No such file"),
    ],
)
def test_bad_tables_are_refused(tmp_path, content, options, message):
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=message):
        own.from_csv(path, **options)
