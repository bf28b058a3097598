"""The command line: its output on stdout and stderr, and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
from tiny import TINY

import hyperpush
import hyperpush as hp
from hyperpush.cli import app as cli
from hyperpush.cli import index
from hyperpush.cli.index import load_index
from hyperpush.cli.output import refuse_failure
from hyperpush.spec import experiment as spec
from hyperpush.spec import studies
from hyperpush.spec.config import load_config


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run a command with `tiny` as the only experiment; return its exit code, stdout and stderr."""
    load_index()  # build the index for all tests before `tiny` hides the real experiments
    monkeypatch.setattr(studies, "experiments", lambda: {"tiny": TINY})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        return int(caught.value.code or 0), *capsys.readouterr()

    return call


def test_list_and_version(call):
    code, out, _ = call("list")
    assert code == 0
    assert re.search(r"spec .* A TOML file with \[task\], \[network\] and \[method\]", out)
    assert "random-directed" in out
    assert call("--version") == (0, f"hyperpush {hyperpush.__version__}\n", "")


def test_list_methods_prints_what_they_declare(call):
    code, out, _ = call("list", "--methods")
    assert code == 0
    assert all(text in out for text in ("HGP", "two-way", "through the steps of SGP", "Terashita"))


def test_json_is_all_that_stdout_holds(call, tmp_path):
    code, out, err = call("run", "tiny", "-s", "steps=1", "-s", "rate=0.25", "--out", "here", "--json")
    assert code == 0
    expected = {"experiment": "tiny", "steps": 1, "value": [0.25, 0.25], "dtype": "float32", "run": "here"}
    assert json.loads(out) == expected
    assert out.count("\n") == 1
    assert "figure: here/figures/errors.png" in err
    assert (tmp_path / "here" / "figures" / "errors.png").is_file()


def test_without_json_stdout_is_empty(call):
    code, out, err = call("run", "tiny")
    assert (code, out) == (0, "")
    assert "run: runs/tiny-" in err


def test_show_prints_a_file_that_runs(call, tmp_path):
    code, out, _ = call("show", "spec")
    assert code == 0
    (tmp_path / "mine.toml").write_text(out)
    experiment, config = load_config("mine.toml", [], {"spec": spec.SPEC})
    assert config == experiment.config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "tinny"], "experiment: got 'tinny'; allowed: tiny (did you mean 'tiny'?)"),
        (["show", "TrakedHGP"], "did you mean 'TrackedHGP'?"),
        (["run", "tiny", "-s", "stpes=3"], "did you mean 'steps'?"),
        (["run", "tiny", "-s", "steps=many"], "steps: got 'many'; allowed: a whole number"),
        (["run", "tiny", "-s", "steps=101"], "steps: got 101; allowed: a whole number from 1 to 100"),
        (["run", "none.toml"], "none.toml"),
        (["run", "bad.toml"], "well-formed TOML"),
        (["run", "tiny", "--out", "full"], "a new or empty folder"),
        (["run", "tiny", "-s", "fail=clear"], "diverged (NaN or infinity) in round 3"),
        (["run", "tiny", "-s", "fail=not-finite"], "value: got nan"),
    ],
)
def test_bad_input_and_divergence_are_one_line_and_an_exit_code(call, tmp_path, arguments, message):
    (tmp_path / "bad.toml").write_text("steps 3\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    code, out, err = call(*arguments)
    assert (code, out) == (3 if "diverged" in message else 2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert files - {"runs"} == {"bad.toml", "full", "full/kept"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Missing argument 'NAME|FILE.toml'; see: hyperpush run --help"),
        (["nothing"], "No such command 'nothing'; see: hyperpush --help"),
        (["run", "tiny", "--josn"], "No such option: --josn"),
        (["swarm", "my.toml", "-n", "many"], "Invalid value for '-n'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_without_arguments_it_helps(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    assert "Usage" in out
    assert "StudyRun" not in out


LIGHT = """
import sys
from dataclasses import asdict
from hyperpush.cli.app import main
try:
    main()
finally:
    print([name for name in ("jax", "equinox", "numpy") if name in sys.modules])
"""


def test_help_list_show_and_completion_load_no_jax(tmp_path):
    environment = {**os.environ, "HYPERPUSH_CACHE": str(tmp_path)}

    def run(*arguments: str, **more: str) -> list[str]:
        command = [sys.executable, "-c", LIGHT, *arguments]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False, timeout=120)
        return done.stdout.splitlines()

    assert run("--help")[-1] == "[]"
    assert "jax" in run("list")[-1]  # the first call builds the index
    assert run("list")[-1] == run("list", "--methods")[-1] == run("show", "HGP")[-1] == "[]"
    completing = {"_HYPERPUSH_COMPLETE": "complete_bash", "COMP_WORDS": "hyperpush show TrackedH", "COMP_CWORD": "2"}
    assert run(**completing) == ["TrackedHGP", "[]"]


def test_an_index_of_other_code_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPUSH_CACHE", str(tmp_path))
    made = load_index()
    (tmp_path / index.FILE).write_text(json.dumps({**made, "networks": []}))
    assert load_index()["networks"] == []
    monkeypatch.setattr(index, "code_stamp", lambda: "another")
    assert load_index() == {**made, "stamp": "another"}
    monkeypatch.setenv("HYPERPUSH_CACHE", str(tmp_path / index.FILE / "no folder"))
    assert load_index()["names"] == made["names"]


def test_an_interrupt_is_exit_code_130_and_leaves_nothing(call, tmp_path):
    code, out, err = call("run", "tiny", "-s", "fail=interrupt")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_unexpected_error_keeps_its_traceback(call, tmp_path):
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["run", "tiny", "-s", "fail=bug"])
    assert list((tmp_path / "runs").iterdir()) == []


def test_termination_leaves_nothing(tmp_path):
    program = (
        "import time, sys; from hyperpush.cli import app as cli; from hyperpush.spec import studies\n"
        "from hyperpush.spec.config import Config; from hyperpush.runs.experiment import Experiment\n"
        "def wait(config, run): print('ready', flush=True); time.sleep(600)\n"
        "studies.experiments = lambda: {'wait': Experiment('wait', '', Config, wait)}\n"
        "cli.main(['run', 'wait', '--out', 'here'])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert [path.name for path in tmp_path.iterdir()] == [".here.partial"]
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


SPEC = """
[task]
name = "logistic"
clients = 4
seed = 0
[network]
name = "random-directed"
[method]
name = "HGP"
steps = 5
pushes = 3
step_size = 0.5
"""
TRAIN = """
[train]
name = "TreeNewton"
"""


@pytest.mark.parametrize(("text", "ends"), [(SPEC, 3), (SPEC + TRAIN, 0)], ids=["untrained", "trained"])
def test_strict_ends_with_code_3_where_a_result_did_not_converge(text, ends, monkeypatch, tmp_path, capsys):
    """A method of fixed length is not marked, but an estimate at params far from the inner solution is marked."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "my.toml").write_text(text)

    def call(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["run", str(tmp_path / "my.toml"), "--out", str(tmp_path / f"run{len(more)}"), *more])
        return int(caught.value.code or 0), capsys.readouterr().err

    assert call("--strict")[0] == ends
    code, table = call()
    assert code == 0
    assert ("! not converged (unsolved" in table) == (ends == 3)


def test_strict_stationary_asks_for_both():
    """A result may have converged without being stationary; `--strict` alone accepts it."""
    moving, arrived, wrong = (
        {"status": asdict(hp.Status(converged, reason, gradient=gradient, stationary=gradient <= 0.01))}
        for converged, reason, gradient in [
            (True, "tolerance", 0.4),
            (True, "tolerance", 0.001),
            (False, "limit", 0.001),
        ]
    )
    refuse_failure(moving, strict=True)
    refuse_failure(arrived, strict=True, stationary=True)
    for result in (moving, wrong):
        with pytest.raises(SystemExit) as caught:
            refuse_failure(result, strict=False, stationary=True)
        assert caught.value.code == 3


def test_a_peer_whose_params_grow_ends_with_the_code_of_a_divergence(capsys):
    from hyperpush.cli.output import refuse_growth

    refuse_growth({"status": {"reason": "limit", "converged": False}})
    refuse_growth({"left": True})
    with pytest.raises(SystemExit) as ended:
        refuse_growth({"status": {"reason": "growing", "converged": False}})
    assert ended.value.code == 3
    assert "growing" in capsys.readouterr().err


def test_output_in_ascii_replaces_letters_that_it_lacks():
    command = [sys.executable, "-m", "hyperpush", "show", "SGP"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step_size" in done.stdout


def test_with_standard_error_closed_only_json_is_printed(tmp_path):
    (tmp_path / "spec.toml").write_text(
        'network = "ring"\n[task]\nname = "quadratic"\nclients = 3\nseed = 0\n'
        '[method]\nname = "SGP"\nsteps = 2\nstep_size = 0.1\n'
    )
    command = f"{sys.executable} -m hyperpush run spec.toml --out run --json 2>&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout)["verb"] == "train"
