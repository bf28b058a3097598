"""Studies and commands of installed distributions by entry points, and the one-line error of a broken one."""

import json
import signal
import sys

import pytest

from hyperpush.base.errors import HyperpushError
from hyperpush.base.extensions import distribution, extension_files, extensions
from hyperpush.cli import app as cli
from hyperpush.cli import commands, index
from hyperpush.methods.registry import extension_classes, registered
from hyperpush.spec import config
from hyperpush.spec.studies import experiments

CODE = '''
import sys

import typer

from hyperpush.base.config import Config
from hyperpush.runs.experiment import Experiment

class Options(Config):
    """Options."""

    steps: int = 3

STUDY = Experiment("theirs", "Their study.", Options, lambda options, run: {"steps": options.steps})
OTHER = Experiment("another name", "Their study.", Options, lambda options, run: {})
command = typer.Typer()

@command.command()
def anything(name: str, twice: bool = False) -> None:
    """Greet."""
    print("hello", name, *([name] if twice else []))
'''
NAMES = {
    "hyperpush.studies": {
        "theirs": "their_code:STUDY",
        "renamed": "their_code:OTHER",
        "no-study": "their_code:command",
        "missing": "their_missing_code:STUDY",
    },
    "hyperpush.commands": {
        "greet": "their_code:command",
        "no-command": "their_code:STUDY",
        "lost": "their_missing_code:app",
        "list": "their_code:command",
    },
}


def install(folder, name, groups):
    """Install a distribution with these entry points."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, own in groups.items() for line in (f"[{group}]", *(f"{key} = {own[key]}" for key in own))]
    (about / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command with the distribution `theirs` installed; return exit code, stdout and stderr."""
    code = tmp_path / "site"
    code.mkdir()
    (code / "their_code.py").write_text(CODE)
    install(code, "theirs", NAMES)
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("HYPERPUSH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_code", raising=False)  # other tests install such a module, too
    registered.cache_clear()
    extension_classes.cache_clear()

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        return int(caught.value.code or 0), *capsys.readouterr()

    yield call
    sys.modules.pop("their_code", None)


def test_a_study_is_run_by_name_and_imported_only_then(call):
    known = experiments()
    assert {"theirs", "renamed", "missing", "spec"} <= set(known)
    assert list(known) == sorted(known)
    assert "their_code" not in sys.modules
    code, out, _ = call("run", "theirs", "-s", "steps=5", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 5)
    assert call("run", "theirs", "-s", "stpes=5")[0] == 2


def test_a_command_is_mounted_and_takes_its_arguments(call):
    assert call("greet", "you", "--twice") == (0, "hello you you\n", "")
    code, _, err = call("greet")
    assert code == 2
    assert "Missing argument 'name'; see: hyperpush greet --help" in err
    code, out, _ = call("--help")
    assert code == 0
    assert "Greet." in out
    assert "Run a study or a TOML file" in out  # built-in names cannot be replaced


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "missing"),
            "missing of theirs 1.0 (hyperpush.studies, their_missing_code:STUDY) cannot be loaded: Mod",
        ),
        (("run", "no-study"), "cannot be used: it is of class Typer, not Experiment"),
        (("run", "renamed"), "renamed of theirs 1.0 cannot be used: the study calls itself another name"),
        (
            ("lost", "--any", "thing"),
            "lost of theirs 1.0 (hyperpush.commands, their_missing_code:app) cannot be loaded:",
        ),
        (("no-command",), "cannot be used: it is of class Experiment, not Typer"),
        (("show", "missing"), "their_missing_code:STUDY) cannot be loaded: ModuleNotFoundError: No module named"),
    ],
)
def test_what_is_broken_is_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_list_shows_what_works_warns_of_the_rest_and_is_not_kept(call, tmp_path):
    code, out, err = call("list")
    assert code == 0
    assert "Their study." in out
    told = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert len(told) == 3
    assert "renamed" not in out
    assert not (tmp_path / "cache" / index.FILE).exists()
    assert "steps = 3" in call("show", "theirs")[1]


def test_other_code_of_theirs_makes_another_index(call, tmp_path):
    code = tmp_path / "site" / "their_code.py"
    before = index.code_stamp()
    assert code in extension_files()
    code.write_text(CODE + "\n")
    assert index.code_stamp() != before


def test_of_two_with_one_name_the_first_in_the_alphabet_is_taken(call, tmp_path):
    install(tmp_path / "site", "a-theirs", {"hyperpush.studies": {"theirs": "their_missing_code:STUDY"}})
    point = extensions("hyperpush.studies")["theirs"]
    assert distribution(point) == "a-theirs 1.0"


def test_without_the_papers_a_line_says_how_to_get_them(call, monkeypatch):
    monkeypatch.setattr(config, "has_papers", lambda: False)
    monkeypatch.setattr(commands, "has_papers", lambda: False)
    for arguments in (("run", "nothing"), ("nothing",)):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "in a clone of hyperpush, pip install . ./papers adds the papers' studies and commands" in err
    with pytest.raises(HyperpushError):
        experiments()["missing"]
