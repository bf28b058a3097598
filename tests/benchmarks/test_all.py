"""The tables of benchmarks: methods that cannot run are marked, and the page depends only on stored lines."""

import json
import sys
from types import SimpleNamespace

import all as tables  # benchmarks/all.py
import pytest


def missing():
    raise ModuleNotFoundError("No module named 'jaxopt'", name="jaxopt")


def test_a_library_that_is_not_installed_is_a_row_that_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "warm", SimpleNamespace(CASES={"a": missing}))
    tables.run_case("warm", "a")
    assert json.loads(capsys.readouterr().out) == {"note": "jaxopt is not installed"}


@pytest.mark.parametrize(
    ("results", "row"),
    [
        ([{"s": 3.0}, {"s": 1.0}, {"s": 2.0}], {"s": 2.0}),
        ([{"s": 1.0}, {"note": "no end in 9 s"}], {"note": "no end in 9 s"}),
    ],
)
def test_a_row_has_medians_over_processes_or_a_note(monkeypatch, results, row):
    monkeypatch.setitem(sys.modules, "many", SimpleNamespace(PROCESSES=3, FROM_DISK=False))
    each = iter(results)
    monkeypatch.setattr(tables, "run_once", lambda *_: next(each))
    assert tables.measure("many", "a", 9) == row


def test_the_page_is_a_function_of_the_lines(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(tables, "PAGE", page)
    monkeypatch.setitem(sys.modules, "warm", SimpleNamespace(TITLE="Later calls"))
    rows = [{"ms": 4.56789, "rounds": 1200}, {"note": "no end"}]
    lines = [{"table": "warm", "case": name, "row": row} for name, row in zip("ab", rows, strict=True)]
    for _ in range(2):
        tables.write(lines)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| case | ms | rounds | note |",
        "| --- | ---: | ---: | --- |",
        "| a | 4.57 | 1,200 |  |",
        "| b |  |  | no end |",
    ]
