"""A user's own data: files per client, and tables."""

import io
import warnings
import zipfile

import numpy as np
import pytest

from hyperpush.errors import InvalidInput
from hyperpush.studies.data import own
from hyperpush.studies.data.partition import by_owner

ANN = {"inputs": np.arange(12.0).reshape(3, 2, 2), "labels": np.array([0, 2, 1])}
BOB = {"inputs": np.ones((1, 2, 2), np.uint8), "labels": np.array([1], np.uint8)}
WIDE = {**ANN, "inputs": np.where(ANN["inputs"] == 5, -1e39, ANN["inputs"])}  # more than float32 holds
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


def test_more_classes_are_allowed_when_they_are_given(tmp_path):
    (tmp_path / "table.csv").write_text("client,label,x\na,99999,1\n")
    assert own.from_csv(tmp_path / "table.csv").classes == 100_000
    (tmp_path / "table.csv").write_text("client,label,x\na,100000,1\n")
    assert own.from_csv(tmp_path / "table.csv", classes=200_000).classes == 200_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"inputs": np.array([[{}]], object), "labels": np.array([0])}, r"ann\.npz: .*without objects"),
        ({"inputs": ANN["inputs"]}, r"ann\.npz: got \['inputs'\]; allowed: arrays inputs and labels"),
        ({**ANN, "labels": np.array([0, 1])}, r"labels \(2,\)'; allowed: inputs \[m, …\] and labels \[m\]"),
        ({**ANN, "labels": np.array([0.0, 1, 1])}, r"labels float64 \(3,\)'; allowed: one whole number"),
        (
            {**ANN, "labels": np.array([0, 1, 1], "m8[s]")},
            r"labels timedelta64\[s\] \(3,\)'; allowed: one whole number",
        ),
        ({**ANN, "labels": np.array([0, -1, 1])}, r"ann\.npz: got 'a label -1'; allowed: labels, whole numbers from 0"),
        ({**ANN, "labels": np.array([0, 10**11, 1])}, r"a label 100000000000'; .* to 99999 unless classes is given"),
        ({**ANN, "labels": np.array([0, 2**63, 1], np.uint64)}, r"a label 9223372036854775808'; allowed: labels"),
        ({**ANN, "inputs": np.full((3, 2, 2), np.nan)}, r"ann\.npz: got 'inputs with nan, of client ann'.* finite"),
        (WIDE, r"ann\.npz: got 'inputs with -1e\+39, of client ann'; allowed: finite numbers, .*float32"),
        ({**ANN, "inputs": np.full((3, 2, 2), "a")}, r"inputs <U1'; allowed: real numbers"),
        ({**ANN, "inputs": np.zeros((3, 5))}, r"bob\.npz: got 'inputs \(2, 2\)'; allowed: inputs \(5,\)"),
        ({"inputs": np.zeros((0, 2, 2)), "labels": np.zeros(0, int)}, r"m at least 1"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    np.savez(tmp_path / "ann.npz", **content)
    np.savez(tmp_path / "bob.npz", **BOB)
    with warnings.catch_warnings(action="error"), pytest.raises(InvalidInput, match=message):
        own.from_folder(tmp_path)


def claim(shape):
    """A file whose inputs have this shape by their header, whatever it is."""
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("inputs.npy", b"\x93NUMPY\x01\0" + len(head).to_bytes(2, "little") + head + bytes(64))
        file.writestr("labels.npy", b"")
    return made.getvalue()


def test_files_that_are_no_archives_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"folder: got .*; allowed: a folder with a \.npz file for each client"):
        own.from_folder(tmp_path)
    np.savez(tmp_path / "ann.npz", **ANN)
    whole = (tmp_path / "ann.npz").read_bytes()
    np.savez_compressed(tmp_path / "ann.npz", **ANN)
    packed = (tmp_path / "ann.npz").read_bytes()
    alone = io.BytesIO()
    np.save(alone, ANN["inputs"])
    wrong = (b"", b"text", whole[: len(whole) // 2], packed[:90] + b"\xff" * 9 + packed[99:], alone.getvalue())
    for content in (*wrong, claim(f"({2**44}, 4)"), claim(f"({10**26}, 1)"), claim(f"({2**63}, 2)"), claim("(2")):
        (tmp_path / "ann.npz").write_bytes(content)
        with (
            warnings.catch_warnings(action="error"),
            pytest.raises(InvalidInput, match=r"ann\.npz: got 'a file that cannot be read'"),
        ):
            own.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (TABLE, {"client": "owner"}, r"client: got 'owner'; allowed: one of the columns client, x, label, y"),
        (TABLE, {"label": "class"}, r"label: got 'class'; allowed: one of the columns"),
        (TABLE, {"classes": 2}, r"row 3, column label: got '2'; allowed: labels, whole numbers from 0 to 1$"),
        (TABLE, {"classes": 0}, r"classes: got 0; allowed: a whole number from 1 to 2147483648"),
        (TABLE, {"label": "client"}, r"label: got 'client'; allowed: another column"),
        ("client,label,x\na,0,one\n", {}, r"row 2, column x: got 'one'; allowed: a number"),
        ("client,label,x\na,0,1\na,0\n", {}, r"row 3: got '2 entries'; allowed: 3, one per column"),
        ("client,label,x\n\n\na,0,one\n", {}, r"row 4, column x: got 'one'"),
        ("client,label,x\na,0.5,1\n", {}, r"row 2, column label: got '0\.5'; allowed: labels, whole numbers"),
        ("client,label,x\na,-1,1\n", {}, r"row 2, column label: got '-1'; allowed: labels"),
        (f"client,label,x\na,0,1\na,{'9' * 23},1\n", {}, r"table\.csv, row 3, column label: got '9{23}'"),
        (f"client,label,x\na,{'9' * 23},1\n", {"classes": 2**31}, r"column label: got '9{23}'; .*to 2147483647$"),
        ("client,label,x\na,100000,1\n", {}, r"'100000'; allowed: .* 0 to 99999 unless classes is given"),
        ("client,label,x\na,0,nan\n", {}, r"row 2, column x: got 'nan of client a'; allowed: finite"),
        ("client,label,y,x\na,0,0,1\nb,0,0,1e39\n", {}, r"row 3, column x: got '1e39 of client b'; .*float32"),
        ("client,x,x,label\na,1,2,0\n", {}, r"column x: got '2 columns of this name'; allowed: a name of its own"),
        ("client,label,x\na,0,1\n ,0,1\n", {}, r"row 3, column client: got ' '; allowed: the name of a client"),
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
    with warnings.catch_warnings(action="error"), pytest.raises(InvalidInput, match=message):
        own.from_csv(path, **options)
