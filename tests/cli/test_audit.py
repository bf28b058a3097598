"""`hyperpush audit` turns files into tables, JSON and a page, and reports each problem in one line."""

import json
import tomllib

import numpy as np
import pytest

from hyperpush.cli.app import main


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for name, count in (("a", 40), ("b", 45), ("c", 50)):
        rows = draw.normal(size=(count, 2))
        labels = np.where(rows.sum(1) + draw.normal(size=count) > 0, "yes", "no")
        lines = [f"{x:.4f},{y:.4f},{label}" for (x, y), label in zip(rows, labels, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y,label", *lines]) + "\n")
    return tmp_path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_toml_written_by_schema_runs_and_gives_json_and_page(folder, capsys):
    code, text, _ = run(capsys, "audit", folder, "--label", "label", "--schema")
    assert code == 0
    written = tomllib.loads(text)
    assert written["tables"]["columns"] == {"x": "number", "y": "number"}
    changed = text.replace("folds = 5", "folds = 2\nl2 = 0.01") + '\n[network]\nname = "ring"\n'
    (folder / "audit.toml").write_text(changed)
    page = folder / "page.html"
    code, out, _ = run(capsys, "audit", folder / "audit.toml", "--json", "--records", "--page", page)
    assert code == 0
    found = json.loads(out)
    assert [row["party"] for row in found["join"]] == ["a", "b", "c"]
    assert found["network"] == "Ring(3)"
    assert len(found["records"]) == 135
    assert page.exists()
    code, _, err = run(capsys, "audit", folder / "audit.toml", "--page", page)
    assert code == 2
    assert "a new file" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--label"),
        (("--label", "target"), "a.csv, label: got 'target'"),
        (("--label", "label", "--page", "nowhere/page.html"), "a file in a folder that exists"),
        (("--label", "label", "--party", "x"), "party: got 'x'"),
    ],
)
def test_errors_are_one_line(folder, capsys, arguments, says):
    code, out, err = run(capsys, "audit", folder, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tables", "a TOML file"),
        ("[table]\n", "'table'"),
        ("[tables]\nlabel = 'label'\n", "at least files and label"),
        ("[tables]\nfiles = '.'\nlabel = 'label'\n[tables.columns]\nx = 'number'\n", "tables.columns.y"),
        ("[tables]\nfiles = '.'\nlabel = 'label'\n[tables.columns]\nx = 'text'\n", "tables.columns.x: got 'text'"),
        ("[tables]\nfiles = '.'\nlabel = 'label'\n[audit]\nfold = 3\n", "'fold'"),
        ("[tables]\nfiles = '.'\nlabel = 'label'\n[network]\nk = 3\n", "a name"),
    ],
)
def test_a_bad_file_is_one_line(folder, capsys, text, says):
    (folder / "audit.toml").write_text(text)
    code, _, err = run(capsys, "audit", folder / "audit.toml")
    assert code == 2
    assert says in err
    assert err.count("\n") == 1
