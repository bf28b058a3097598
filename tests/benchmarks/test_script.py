"""Benchmark results that are kept in a file."""

import json

from script import resume


def test_finished_cells_are_not_measured_again(tmp_path):
    file, measured = str(tmp_path / "cells.jsonl"), []

    def measure(cell):
        measured.append(cell["seed"])
        return {"square": cell["seed"] ** 2, "parts": [{"third": 1 / 3}]}

    cells = [{"part": "a", "seed": seed} for seed in range(3)]
    assert resume(file, cells, measure, seconds=-1) == ([], 3)
    resume(file, cells[1:2], measure)
    rows, left = resume(file, cells, measure)
    assert (measured, left) == ([1, 0, 2], 0)
    assert [row["square"] for row in rows] == [0, 1, 4]
    assert rows[0]["parts"] == [{"third": 0.3333}]
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [line["cell"]["seed"] for line in lines] == [1, 0, 2]
    assert all({"commit", "cpu_seconds"} < set(line) for line in lines)
    assert resume(file, cells[:1], measure)[0] == [lines[1]]
