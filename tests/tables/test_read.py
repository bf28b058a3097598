"""Reading tables: kinds of columns, classes, missing values, and one-line errors for unusable tables."""

import numpy as np
import pytest

import hyperpush as hp

ROWS = np.arange(12.0).reshape(6, 2)
LABELS = np.array([0, 1, 0, 1, 1, 0])


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


A = "age,sex,dose,label\n50,f,1.5,yes\n60,m,,no\n\n70,f,2.5,yes\n"
B = "label,dose,sex,age\nno,3.5,m,40\nyes,1,NA,45\n"


def test_folder_of_files_matches_columns_by_name(tmp_path):
    found = hp.tables.read(write(tmp_path, north=A, south=B), label="label")
    assert found.names == ("north", "south")
    assert found.counts == (3, 2)
    assert found.schema.classes == ("no", "yes")
    assert found.schema.features == ("age", "sex=f", "sex=m", "sex is missing", "dose", "dose is missing")
    assert found.lines[0].tolist() == [2, 3, 5]  # line 4 is empty
    nan = np.nan
    np.testing.assert_array_equal(found.inputs[0][:2], [[50, 1, 0, 0, 1.5, 0], [60, 0, 1, 0, nan, 1]])
    np.testing.assert_array_equal(found.inputs[1], [[40, 0, 1, 0, 3.5, 0], [45, nan, nan, 1, 1, 0]])
    assert [own.tolist() for own in found.labels] == [[1, 0, 1], [0, 1]]


def test_one_file_with_a_party_column_equals_a_folder(tmp_path):
    together = "site," + A.splitlines()[0] + "\nnorth,50,f,1.5,yes\nsouth,40,m,3.5,no\nnorth,60,m,2,no\n"
    write(tmp_path, all=together)
    found = hp.tables.read(tmp_path / "all.csv", label="label", party="site")
    assert found.names == ("north", "south")
    assert found.lines[0].tolist() == [2, 4]
    assert found.sources == ("all.csv", "all.csv")


def test_whole_numbers_are_classes_up_to_ten_and_numbers_beyond():
    ten = hp.tables.read({"a": (np.ones((10, 1)), np.arange(10)), "b": (np.zeros((2, 1)), [0, 9])}, label="y")
    eleven = hp.tables.read({"a": (np.ones((10, 1)), np.arange(10)), "b": (np.zeros((1, 1)), [10])}, label="y")
    half = hp.tables.read({"a": (np.ones((2, 1)), [0.5, 1]), "b": (np.zeros((1, 1)), [1])}, label="y")
    assert ten.schema.classes == tuple(range(10))
    assert eleven.schema.kind == half.schema.kind == "numbers"


def test_numbers_are_categories_where_it_is_asked_for():
    given = {"a": (np.array([[1.0], [2.0]]), [0, 1]), "b": (np.array([[3.0]]), [1])}
    found = hp.tables.read(given, label="y", categories=["x0"])
    assert found.schema.features == ("x0=1", "x0=2", "x0=3")


def test_warnings_say_constant_columns_missing_values_and_classes_that_a_site_lacks():
    rows = np.c_[ROWS, np.ones(6)]
    rows[0, 0] = np.nan
    found = hp.tables.read({"a": (rows, LABELS), "b": (rows, np.zeros(6))}, label="y")
    assert found.warnings == (
        "Constant and therefore left out: x2.",
        "Missing values, filled with the shared mean: x0 17 %.",
        "b has no record of class 1.",
    )


def test_rows_without_a_label_are_left_out_and_said(tmp_path):
    found = hp.tables.read(write(tmp_path, a=A + "1,f,2,\n", b=B), label="label")
    assert found.counts == (3, 2)
    assert "a: 1 rows without a label are left out." in found.warnings


def test_frames_are_read_like_files(tmp_path):
    import pandas

    write(tmp_path, north=A, south=B)
    frames = {name: pandas.read_csv(tmp_path / f"{name}.csv") for name in ("north", "south")}
    files, found = hp.tables.read(tmp_path, label="label"), hp.tables.read(frames, label="label")
    for mine, theirs in zip(found.inputs, files.inputs, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_npz_features(tmp_path):
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", X=ROWS, y=LABELS)
    assert hp.tables.read(tmp_path, label="y").counts == (6, 6)


HEAD = "x,z,label\n"
GOOD = HEAD + "".join(f"{n},{n},{n % 2}\n" for n in range(20))


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ({"a": "", "b": GOOD}, {}, "a.csv"),
        ({"a": HEAD, "b": GOOD}, {}, "a.csv: got 'no rows'"),
        ({"a": GOOD}, {}, "one party, 'a'"),
        ({}, {}, "a folder with one CSV or NPZ file per party"),
        ({"a": HEAD + "1,2,1\n", "b": HEAD + "1,2,1\n"}, {}, "label 'label': got '1 classes in all files'"),
        ({"a": HEAD + "1,2,1\n", "b": HEAD + "1,2,1\n"}, {"kind": "numbers"}, "got '1 values in all files'"),
        ({"a": GOOD, "b": "x,label\n1,0\n2,1\n"}, {}, "b.csv, column 'z': got 'missing'"),
        ({"a": GOOD, "b": "x,z,q,label\n1,2,3,0\n2,1,3,1\n"}, {}, "b.csv, column 'q': got 'a column of its own'"),
        ({"a": GOOD, "b": GOOD + "high,1,0\n"}, {}, "b.csv, line 22, column 'x': got 'high'"),
        ({"a": GOOD, "b": GOOD + "inf,1,0\n"}, {}, "b.csv, line 22, column 'x': got 'inf'; allowed: a finite number"),
        ({"a": GOOD, "b": GOOD}, {"label": "target"}, "a.csv, label: got 'target'"),
        ({"a": GOOD, "b": GOOD}, {"party": "x"}, "party: got 'x'"),
        ({"a": GOOD, "b": GOOD}, {"kind": "ranks"}, "kind: got 'ranks'"),
        ({"a": GOOD, "b": GOOD}, {"categories": ["w"]}, "categories: got 'w'"),
        ({"a": GOOD, "b": "x,x,label\n1,2,0\n"}, {}, "b.csv, line 1: got \"'x' twice\""),
        (
            {"a": GOOD, "b": HEAD + "1,2,0\n1,2,0,4\n"},
            {},
            "b.csv, line 3: got '4 fields'; allowed: 3, as in the header",
        ),
        ({"a": GOOD, "b": HEAD + '"1\n",2,0\n1,2\n'}, {}, "b.csv, line 4: got '2 fields'"),
        ({"a": GOOD, "b": ",z,label\n1,2,0\n"}, {}, "b.csv, line 1: got 'no name for column 1'"),
        ({"a": GOOD, "b": GOOD.replace(",", ";")}, {}, "b.csv, line 1: got \"fields separated by ';'\""),
        ({"a": GOOD, "b": HEAD + '1,"1,5",0\n' * 9}, {}, "b.csv, line 2, column 'z': got '1,5'; allowed: numbers with"),
        (
            {"a": GOOD, "b": HEAD + "1,2,inf\n"},
            {},
            "b.csv, line 2, column 'label': got 'inf'; allowed: a finite number",
        ),
        ({"a": GOOD, "b": HEAD + "1,2,\n"}, {}, "b.csv, column 'label': got 'no labels'"),
        (
            {"a": GOOD, "b": HEAD + "".join(f"v{n},1,1\n" for n in range(60))},
            {},
            "b.csv, line 32, column 'x': got \"value number 51, 'v30'\"",
        ),
    ],
)
def test_one_line_names_file_row_and_column(tmp_path, files, options, says):
    with pytest.raises(hp.InvalidInput) as error:
        hp.tables.read(write(tmp_path, **files), **({"label": "label"} | options))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere", "an existing path"),
        (5, "a folder or file"),
        ({}, "a folder or file"),
        ({"a": (ROWS, LABELS), "b": (ROWS, LABELS[:2])}, "b, y: got 'shape (2,)'"),
        ({"a": (ROWS, LABELS), "b": (ROWS[0], LABELS)}, "b, X: got 'shape (2,)'"),
        ({"a": (ROWS, LABELS), "b": 7}, "tables['b']: got 'int'"),
        ({1: (ROWS, LABELS), "1": (ROWS, LABELS)}, "tables: got \"'1' twice\""),
    ],
)
def test_refuses_what_is_no_table(given, says):
    with pytest.raises(hp.InvalidInput) as error:
        hp.tables.read(given, label="y")
    assert says in str(error.value)


def test_a_file_without_party_column_is_refused(tmp_path):
    write(tmp_path, a=GOOD)
    with pytest.raises(hp.InvalidInput, match=r"party: got None; allowed: the column of a\.csv"):
        hp.tables.read(tmp_path / "a.csv", label="label")


def test_names_and_values_that_only_look_like_numbers_stay_apart(tmp_path):
    """The texts 01 and 1 are two sites and two categories, but the numbers 1.0 and 1 are equal."""
    write(tmp_path, all="site,code,y\n01,007,0\n1,7,1\n01,7.0,1\n01,b,0\n1,0123456789012345678,0\n")
    found = hp.tables.read(tmp_path / "all.csv", label="y", party="site")
    assert found.names == ("01", "1")
    assert found.schema.columns[0].values == ("007", "7", "0123456789012345678", "b")


def test_large_labels_are_classes_that_can_be_predicted():
    labels = [10**15, 2, 2]
    found = hp.tables.read({"a": {"x": [1, 2, 3], "y": labels}, "b": {"x": [1, 2, 3], "y": labels}}, label="y")
    assert found.schema.classes == (2, 10**15)
    assert found.labels[0].tolist() == [1, 0, 0]


def test_two_files_of_one_name_are_refused_and_others_are_told(tmp_path):
    write(tmp_path, a=GOOD)
    (tmp_path / "B.CSV").write_text(GOOD)
    (tmp_path / "c.xlsx").write_text("")
    found = hp.tables.read(tmp_path, label="label")
    assert found.names == ("B", "a")
    assert found.warnings == ("These files are not tables and are left out: c.xlsx.",)
    np.savez(tmp_path / "a.npz", X=ROWS, y=LABELS)
    with pytest.raises(hp.InvalidInput, match=r"'a' twice.*one file per party"):
        hp.tables.read(tmp_path, label="label")


def test_frames_keep_names_and_refuse_repeated_ones_and_dates():
    import pandas

    frame = pandas.DataFrame({"u": ROWS[:, 0], "v": ROWS[:, 1]})
    turned = frame[["v", "u"]]
    found = hp.tables.read({"a": (frame, LABELS), "b": (turned, LABELS)}, label="y")
    np.testing.assert_array_equal(found.inputs[0], found.inputs[1])
    twice = frame.set_axis(["u", "u"], axis=1)
    with pytest.raises(hp.InvalidInput, match="b: got \"'u' twice\""):
        hp.tables.read({"a": (frame, LABELS), "b": (twice, LABELS)}, label="y")
    dated = frame.assign(u=pandas.to_datetime(["2020-01-01"] * 6))
    with pytest.raises(hp.InvalidInput, match="b, column 'u': got 'dates or times'"):
        hp.tables.read({"a": (frame, LABELS), "b": (dated, LABELS)}, label="y")


def test_masked_values_are_missing():
    rows, labels = np.ma.masked_equal(ROWS, 3.0), np.ma.masked_array(LABELS, mask=np.arange(6) == 5)
    found = hp.tables.read({"a": (rows, labels), "b": (ROWS, LABELS)}, label="y")
    assert found.counts == (5, 6)
    assert np.isnan(found.inputs[0][1, 1])
    assert "Missing values, filled with the shared mean: x1 9 %." in found.warnings


def test_values_far_from_all_others_are_named_with_file_and_line(tmp_path):
    write(tmp_path, a=GOOD + "-9999,3,1\n", b=GOOD + "3,1e9,1\n")
    assert hp.tables.read(tmp_path, label="label").warnings == (
        "x is -9999 in 1 rows (first: a.csv, line 22), far from all others, 0 to 19: empty the field if it stands for "
        "missing.",
        "z is 1e+09 in 1 rows (first: b.csv, line 22), far from all others, 0 to 19: empty the field if it stands for "
        "missing.",
    )


def test_far_labels_are_named_too():
    labels = np.array([1.5, 2, 3, 4, 5, 6e6])
    found = hp.tables.read({"a": (ROWS, labels), "b": (ROWS + 1, [*labels[:-1], 0])}, label="y")
    assert found.warnings == (
        "y is 6e+06 in 1 rows (first: a, row 5), far from all others, 0 to 5: empty the field if it stands for "
        "missing.",
    )


def test_categories_are_listed_and_values_that_differ_in_capitals_are_told():
    given = {"a": {"x": ["M\u00fcnchen", "bonn"], "y": [0, 1]}, "b": {"x": ["Mu\u0308nchen", "Bonn"], "y": [0, 1]}}
    found = hp.tables.read(given, label="y")
    assert "\n  categories: x (Bonn, M\u00fcnchen, bonn)\n" in str(found)
    assert found.warnings == ("x: 'Bonn' and 'bonn' differ.",)


def test_a_site_with_other_values_of_a_category_is_told():
    sites = {"a": ["yes", "no", "yes"], "b": ["no", "no", "yes"], "c": ["1", "0", "0"]}
    found = hp.tables.read({name: {"x": own, "y": [0, 1, 1]} for name, own in sites.items()}, label="y")
    assert found.warnings == ("x: c shares no value with the others (0, 1).",)
