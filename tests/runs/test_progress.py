"""Progress of a run: bars on a terminal, and otherwise an occasional line."""

import io

import pytest
from rich.console import Console

from hyperpush.runs import bars
from hyperpush.runs.run import StudyRun


def made(tmp_path, monkeypatch, **options):
    screen = io.StringIO()
    monkeypatch.setattr(bars, "SECONDS_PER_LINE", 0.0)
    return StudyRun(tmp_path / "out", tmp_path, Console(file=screen, width=200, **options)), screen


def test_off_a_terminal_every_bar_is_in_one_line(tmp_path, monkeypatch):
    run, screen = made(tmp_path, monkeypatch)
    with run.progress("methods", 6) as outer:
        outer.step(2)
        with run.progress("seeds", 3):
            run.bars.advance("SGP", 40, 1000)
            run.bars.advance("SGP", 50, 1000)
        run.bars.advance("HGP", 1, 10)
    lines = screen.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("methods 2 of 6")
    assert "seeds 0 of 3" in lines[2]
    assert "SGP 50 of 1,000 rounds" in lines[2]
    assert "MB, compiled" in lines[2]
    assert "left" in lines[2]
    assert "HGP 1 of 10 rounds" in lines[3]
    assert "SGP" not in lines[3]


def test_lines_are_rare(tmp_path, monkeypatch):
    run, screen = made(tmp_path, monkeypatch)
    monkeypatch.setattr(bars, "SECONDS_PER_LINE", 3600.0)
    for done in range(100):
        run.bars.advance("SGP", done, 100)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("nested", [False, True])
def test_bars_on_a_terminal_show_the_loop_and_go_in_the_end(tmp_path, monkeypatch, nested):
    run, screen = made(tmp_path, monkeypatch, force_terminal=True)
    if nested:
        run.bars.advance("SGP", 1, 10)  # a bar that exists before those of the experiment
        with run.progress("methods", 6):
            run.bars.advance("SGP", 2, 10)
            run.bars.rich.refresh()
            assert [task.description for task in run.bars.rich.tasks] == ["SGP", "methods"]
            assert run.bars.rich.tasks[1].completed == 0
    else:
        run.bars.advance("SGP", 2, 10)
        run.bars.rich.refresh()
        run.bars.remove()
    assert "2 of 10 rounds" in screen.getvalue()
    assert run.bars.rich.tasks == []
