"""Specs from the command line: a user's task, early stopping, and all kinds of invalid input."""

import json
import subprocess
import sys

import pytest

import hyperpush as hp
from hyperpush.cli import app as cli

LOGISTIC = """
[task]
name = "logistic"
clients = 5
seed = 0
log_rates = true
[network]
name = "random-directed"
[method]
name = "PDBO"
steps = 3
inner = { name = "SGP", steps = 60, step_size = 0.5 }
hypergradient = { name = "HGP", steps = 30, pushes = 3, step_size = 0.5 }
outer = { name = "adam", learning_rate = 0.1 }
"""

OWN = """
import jax.numpy as jnp
import hyperpush as hp


def inner(x, hyper, batch):
    return (x - batch) ** 2 / 2


def pull(x, hyper):
    return hyper * x


def outer(x, hyper, batch):
    return (x - batch) ** 2 / 2


def mine(clients, common=False):
    rows = jnp.arange(clients * 4.0).reshape(clients, 4)
    data = {"train": rows, "validation": rows + 1, "holdout": rows + 1}
    return hp.Task(inner=inner, penalty=pull, outer=outer, params=0.0, hypers=0.0, common=common, **data)


def wrong(clients):
    return 3


def fails(clients):
    raise KeyError("gone")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create a folder with a user's task and a spec."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "my.toml").write_text(LOGISTIC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return tmp_path


def run(folder, text, capsys):
    """Return the result of a spec."""
    (folder / "run.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "run.toml", "--json", "--out", "done"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    return json.loads(out)


def test_a_task_of_ones_own(folder, capsys):
    result = run(
        folder,
        "every = 1\n"
        '[task]\nname = "own:mine"\nclients = 3\n[network]\nname = "fully-connected"\n[method]\nname = "PDBO"\n'
        'steps = 40\ninner = { name = "SGP", steps = 200, step_size = 0.3 }\n'
        'hypergradient = { name = "HGP", steps = 60, pushes = 10, step_size = 0.5 }\n'
        'outer = { name = "adam", learning_rate = 0.2 }\n',
        capsys,
    )
    # The inner data have mean 5.5, the outer data 6.5: x* = 5.5 − mean λ, and all λ converge to −1.
    assert result["cost_before"] - result["cost_after"] == pytest.approx(0.5, abs=0.02)
    assert hp.load(folder / "done").params["hypers"].shape == (3,)


def test_one_hyper_for_all_until_patience_ends(folder, capsys):
    """Each client trains alone: x_i = b_i − λ, so the cost of λ is ½(λ + 1)² + c.

    The outer data are 1 above the inner data.
    """
    result = run(
        folder,
        "every = 1\n"
        '[task]\nname = "own:mine"\nclients = 3\ncommon = true\n[network]\nname = "fully-connected"\n'
        '[method]\nname = "CDBOLocal"\nsteps = 30\ninner = { name = "LocalSGD", steps = 60, step_size = 0.5 }\n'
        'hypergradient = { name = "LocalGradient" }\nouter = { name = "adam", learning_rate = 0.25 }\n'
        'stop = { metric = "cost", on = "holdout", patience = 2, pushes = 1 }\n',
        capsys,
    )
    costs, metric = result["history"]["cost"], result["history"]["watched"]
    assert metric == pytest.approx(costs, rel=1e-5)  # the holdout rows equal the validation rows
    best = min(range(len(metric)), key=metric.__getitem__)
    assert len(metric) == best + 2 + 1 < 31
    # Adam's first steps have length 0.25, so it passes −1 and turns back.
    assert costs[0] - costs[best] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("network.name=trace", "network.steps=3"), ("steps", "3", "pairs")),
        (("network.name=k-out", "network.k=2", 'network.varying="no"'), ("varying", "no", "true or false")),
    ],
    ids=["trace", "k-out"],
)
def test_options_of_the_wrong_type(options, words, folder):
    """Run a separate process, because type checks of signatures would come first in this one."""
    command = [sys.executable, "-m", "hyperpush", "run", "my.toml"]
    arguments = [word for option in options for word in ("-s", option)]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


STOP = "method.stop={on='validation',patience=2,"
MISTAKES = [  # overrides of my.toml, and the words of the error
    (("metod.steps=3",), ("metod", "method")),
    (("network.name=random-directd",), ("network.name", "random-directd", "random-directed")),
    (("network.probability=1.5",), ("network.probability", "1.5")),
    (("network.probability=0",), ("probability", "1, 2, 3, 4", "reached")),
    (("network.probabilty=0.5",), ("probabilty", "probability")),
    (("method.inner.steps=many",), ("method.inner.steps", "many")),
    (("method.inner={name='DSGD',steps=9,step_size=0.1}",), ("random-directed", "both ways", "DSGD", "FedAvg")),
    (
        ("network.name=directed-ring", "method.hypergradient={name='VRHGP',steps=9,step_size=0.1}"),
        ("directed-ring", "VRHGP", "TrackedHGP"),
    ),
    (("task={name='nowhere:f'}",), ("task.name", "nowhere")),
    (("task={name='own:wrong',clients=3}",), ("task.name", "own:wrong")),
    (("task={name='own:fails',clients=3}",), ("task.name", "own:fails", "KeyError", "gone")),
    ((f"{STOP}metric='cost',pushes=0}}",), ("method.stop.pushes", "0", "1")),
    ((f"{STOP}metric='own:accuracy'}}",), ("method.stop.metric", "own:accuracy", "own:outer")),
    (("method.inner.step_size=1e4",), ("SGP", "diverged", "round")),
    (("method.hypergradient.step_size=1e9",), ("HGP", "diverged", "round")),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES, ids=lambda value: value[0])
def test_mistakes_end_in_one_clear_line(options, words, folder, capsys):
    check_refusal(["run", "my.toml", *(word for option in options for word in ("-s", option))], words, folder, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "error-studdy"), ("experiment", "error-studdy", "error-study")),
        (("run", "missing.toml"), ("missing.toml",)),
        (("bench", "round"), ("bench", "see: hyperpush --help")),
    ],
    ids=["study", "file", "command"],
)
def test_unknown_names_end_in_one_clear_line(arguments, words, folder, capsys):
    check_refusal(arguments, words, folder, capsys)


def check_refusal(arguments, words, folder, capsys):
    """Check for exit code 2, or 3 after a divergence, one line with all the words, and no written files."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert caught.value.code == (3 if "diverged" in words else 2)
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["my.toml", "own.py"]
