"""Measure the tables of first calls, users' models and many clients: `python benchmarks/all.py [TABLE …]`.

Each case runs in processes of its own. Finished cases are JSON lines in docs/results/data/benchmarks.jsonl and are not
run again; `--again` replaces those of the named tables. `--write` only puts the tables into docs/results/benchmarks.md.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
LINES, PAGE = ROOT / "docs/results/data/benchmarks.jsonl", ROOT / "docs/results/benchmarks.md"
TABLES = {
    "first": "firsts",
    "models": "heavy",
    "turns": "turns",
    "torch": "beside_torch",
    "many": "many",
    "warm": "warm",
}
BEGIN, END = "<!-- tables of benchmarks/all.py -->", "<!-- end of tables -->"
NAMES = {
    "cpu_seconds": "CPU s",
    "seconds": "s",
    "peak_megabytes": "peak MB",
    "disk_cpu_seconds": "CPU s from disk",
    "lines": "StableHLO lines",
}


def measure(table: str, case: str, limit: float) -> Row:
    """Return the medians of a case over its processes; a note in place of numbers if it cannot run."""
    module = importlib.import_module(TABLES[table])
    cold, warm = [], []
    for _ in range(module.PROCESSES):
        with tempfile.TemporaryDirectory() as cache:
            found = run_once(table, case, cache, limit)
            if "note" in found:
                return found
            cold.append(found)
            if module.FROM_DISK:
                warm.append(run_once(table, case, cache, limit))
    row = {name: middle([each.get(name) for each in cold]) for name in cold[0]}
    if warm:
        row["disk_cpu_seconds"] = middle([each.get("cpu_seconds") for each in warm])
    return row


def middle(values: list[Any]) -> Any:
    return median(values) if all(isinstance(each, int | float) for each in values) else values[0]


def run_once(table: str, case: str, cache: str, limit: float) -> Row:
    """Run a case in a new process, whose compiled code goes to the folder `cache`."""
    environment = {**os.environ, "HYPERPUSH_CACHE": cache}
    command = [sys.executable, __file__, "--case", table, case]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"note": f"no end in {limit:g} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"note": last[0][:120]}
    row = json.loads(done.stdout.splitlines()[-1])
    if "slow_operation_alarm" in done.stderr:
        row["note"] = "XLA's slow_operation_alarm on stderr"
    return row


def run_case(table: str, case: str) -> None:
    """Run a case in this process; print its row."""
    try:
        row = importlib.import_module(TABLES[table]).CASES[case]()
    except ModuleNotFoundError as error:
        row = {"note": f"{error.name} is not installed"}
    print(json.dumps(row))


def write(lines: list[Row]) -> None:
    """Write the tables into the results page, between its two marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    parts = [markdown(name, [each for each in lines if each["table"] == name]) for name in TABLES]
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(filter(None, parts)) + "\n" + END + after, encoding="utf-8")


def markdown(table: str, lines: list[Row]) -> str:
    if not lines:
        return ""
    rows = [each["row"] for each in lines]
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "note"))
    columns += ["note"] if any("note" in row for row in rows) else []
    title = importlib.import_module(TABLES[table]).TITLE
    head = ["case", *(NAMES.get(name, name.replace("_", " ")) for name in columns)]
    body = [[each["case"], *(cell(each["row"].get(name)) for name in columns)] for each in lines]
    rule = ["---"] + ["---" if name == "note" else "---:" for name in columns]
    return f"### {title}\n" + "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body]) + "\n"


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def read_lines() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; none: all of them")
    parser.add_argument("--case", nargs=2, metavar=("TABLE", "CASE"), help="run one case here and print its row")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--again", action="store_true", help="measure finished cases again")
    parser.add_argument("--write", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which a process is ended")
    asked = parser.parse_args()
    if asked.case:
        run_case(*asked.case)
        return
    wanted = asked.tables or list(TABLES)
    if unknown := set(wanted) - set(TABLES):
        parser.error(f"TABLE: got {', '.join(unknown)}; allowed: {', '.join(TABLES)}")
    lines = read_lines()
    for table in [] if asked.write else wanted:
        for case in importlib.import_module(TABLES[table]).CASES:
            done = [each for each in lines if (each["table"], each["case"]) == (table, case)]
            if asked.only not in case or (done and not asked.again):
                continue
            line = {"table": table, "case": case, "row": measure(table, case, asked.limit)}
            line["load"] = round(os.getloadavg()[0], 1)
            lines = [each for each in lines if each not in done] + [line]
            LINES.write_text("".join(json.dumps(each) + "\n" for each in lines))
            print(json.dumps(line), flush=True)
    write(lines)


if __name__ == "__main__":
    main()
