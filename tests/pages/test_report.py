"""Pages of results: one file without external resources, its numbers beside it, and no silent overwriting."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base import panels
from hyperpush.cli.app import main
from hyperpush.pages.report import as_table, cell, check_path

PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")


class Shown:
    """An object that has panels but is no result class."""

    def panels(self):
        return [
            panels.text("Words & <tags>", "Less < more.", tone="good"),
            panels.table("Counts", ("name", "count"), [("a<b", 12345), ("none", None)]),
            panels.bars("Bars", ["x", "y"], {"value": [1.0, 2.0]}, note="A note."),
        ]


class Reader(HTMLParser):
    """HTML parser that collects open tags and everything that a page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:")):
                self.loads.append(value)
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "link", "img"):
            assert self.open.pop() == tag


def test_a_page_is_one_file_without_scripts_and_with_all_numbers(tmp_path):
    page = hp.report(Shown(), tmp_path / "page.html", title="A <title>", about=["First sentence."])
    text, reader = page.read_text(encoding="utf-8"), Reader()
    reader.feed(text)
    assert (reader.open, reader.loads) == ([], [])
    assert "script" not in reader.tags
    assert reader.tags.count("svg") == 1
    assert "http" not in re.sub(r'(xmlns(:\w+)?|rdf:resource)="[^"]*"', "", text)
    for shown in ("A &lt;title&gt;", "First sentence.", "Less &lt; more.", "a&lt;b", "12,345", "A note."):
        assert shown in text
    kept = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert [panel["title"] for panel in kept["panels"]] == ["Words & <tags>", "Counts", "Bars"]


def test_existing_files_stay_unless_told(tmp_path):
    beside = tmp_path / "page.json"
    beside.write_text("mine")
    with pytest.raises(hp.InvalidInput, match=r"page\.json.*overwrite"):
        hp.report(Shown(), tmp_path / "page.html")
    assert [each.name for each in tmp_path.iterdir()] == ["page.json"]
    assert hp.report(Shown(), tmp_path / "page.html", overwrite=True).is_file()
    assert json.loads(beside.read_text())["title"] == "Shown"


@pytest.mark.parametrize(
    ("result", "name", "field"),
    [
        (Shown(), "page.txt", "path"),
        (Shown(), "none/page.html", "path"),
        (3, "page.html", "result"),
        (Shown, "p.html", "result"),
    ],
)
def test_what_cannot_be_written_is_one_line(result, name, field, tmp_path):
    with pytest.raises(hp.InvalidInput, match=f"^{field}: ") as error:
        hp.report(result, tmp_path / name)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_half_written_and_what_would_fail_later_fails_first(tmp_path, monkeypatch):
    (tmp_path / ".page.json.new").mkdir()  # blocks the writing of the second file
    with pytest.raises(hp.InvalidInput, match="a file that can be written"):
        hp.report(Shown(), tmp_path / "page.html")
    assert [each.name for each in tmp_path.iterdir()] == [".page.json.new"]
    with pytest.raises(hp.InvalidInput, match="folder"):
        check_path("/proc/page.html")  # a folder in which even an administrator cannot write
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(hp.InvalidInput, match=r"jinja2: got 'not installed'.*hyperpush\[pages\]"):
        check_path(tmp_path / "page.html")


def test_a_saved_run_shows_what_its_result_showed(tmp_path):
    task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
    trained = hp.train(task, hp.SGP(steps=4, step_size=0.1), network, key=0, every=2, save=tmp_path / "run")
    (tmp_path / "run" / "figures").mkdir()
    (tmp_path / "run" / "figures" / "one.png").write_bytes(PIXEL)
    saved = hp.load(tmp_path / "run").panels()
    assert [panel.title for panel in saved if panel.kind == "image"] == ["one"]
    found = {panel.title: panel for panel in trained.panels()}
    for panel in saved:
        if panel.kind in ("text", "table", "lines", "network"):
            assert panel == found[panel.title]
    assert hp.report(hp.load(tmp_path / "run"), tmp_path / "run.html").is_file()


def test_cells_and_tables_read_as_numbers():
    assert [cell(each) for each in (None, 0.123456, 12345, "x", True)] == ["–", "0.1235", "12,345", "x", "True"]
    columns, rows = as_table(
        panels.lines("Cost", [0, 1], {"mean": [1.0, np.nan]}, low={"mean": [0, 1]}, high={"mean": [2, 3]})
    )
    assert columns == ["step", "mean", "mean low", "mean high"]
    assert rows == [[0, 1.0, 0, 2], [1, None, 1, 3]]


def test_the_command_writes_the_page_of_a_study_and_refuses_to_write_it_twice(tmp_path, capsys):
    rows = [{"method": "A", "score": 1.5}, {"method": "B", "score": 2}]
    (tmp_path / "result.json").write_text(json.dumps({"experiment": "tiny", "rows": rows}))
    for code in (0, 2):
        with pytest.raises(SystemExit) as end:
            main(["report", str(tmp_path)])
        assert end.value.code == code
    assert "report.html" in capsys.readouterr().out
    (panel,) = json.loads((tmp_path / "report.json").read_text())["panels"]
    assert panel["numbers"] == {"columns": ["method", "score"], "rows": [["A", 1.5], ["B", 2]]}
