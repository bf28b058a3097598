"""The commands that this package adds, none of which imports JAX at its start."""

import os
import re
import signal
import subprocess
import sys

import pytest

from hyperpush.cli import app as cli
from hyperpush.spec.config import load_config
from hyperpush.spec.studies import experiments


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run a command and return its exit code, stdout and stderr."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        return int(caught.value.code or 0), *capsys.readouterr()

    return call


def test_list_has_every_study(call):
    code, out, err = call("list")
    assert (code, err) == (0, "")
    assert re.search(r"error-study .* Error of hypergradient push against the closed form\.", out)
    assert all(f" {name} " in out for name in experiments())


def test_papers_prints_commands_and_numbers_side_by_side(call):
    code, out, _ = call("papers")
    assert code == 0
    assert re.search(r"E\.table1 .* personalize ", out)
    assert re.search(r"C\.figure2 .* not reproduced: an illustration", out)
    code, out, _ = call("papers", "B.table4")
    assert code == 0
    assert "\n    hyperpush run influence\n" in out
    assert re.search(r"logistic +│ 0.99 +│ 0.998 +│ 1.00 +│ 1.00", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("papers", "E.tabel4"), "did you mean 'E.table4'?"),
        (("data", "gte"), "data: got 'gte'; allowed: get"),
        (("run", "quikstart"), "did you mean 'quickstart'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_show_prints_a_file_that_runs(call, tmp_path):
    code, out, _ = call("show", "quickstart")
    assert code == 0
    (tmp_path / "mine.toml").write_text(out)
    experiment, config = load_config("mine.toml", [], experiments())
    assert (experiment.name, config) == ("quickstart", experiment.config())


LIGHT = """
import sys
from hyperpush.cli.app import main
try:
    main()
finally:
    print([name for name in ("jax", "equinox", "numpy") if name in sys.modules])
"""


@pytest.mark.parametrize("arguments", [("--help",), ("papers",), ("sweep", "--help"), ("data", "--help")], ids=" ".join)
def test_no_jax_is_loaded(arguments):
    command = [sys.executable, "-c", LIGHT, *arguments]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_options_of_every_study_load_no_jax():
    code = (
        "import sys; from hyperpush.spec.studies import experiments; found = experiments(); "
        "assert {'quickstart', 'tune', 'spec'} <= set(found); [each.config() for each in found.values()]; "
        "print([name for name in ('jax', 'matplotlib', 'equinox') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
