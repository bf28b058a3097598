"""Bilevel runs from the command line: built-in problems, a user's own, and everything that can be asked for wrongly."""

import json
import subprocess
import sys

import pytest

FAST = ("-s", "inner.steps=60", "-s", "estimator.order=30", "-s", "estimator.pushes=3", "-s", "outer.steps=3")


def hyperpush(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-c", "from hyperpush.cli.app import main; main()", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


OWN = """
import jax.numpy as jnp
import hyperpush as hp


def inner(x, hyper, batch):
    return (x - batch) ** 2 / 2


def pull(x, hyper):
    return hyper * x


def outer(x, hyper, batch):
    return (x - batch) ** 2 / 2


def mine(clients, seed):
    rows = jnp.arange(clients * 4.0).reshape(clients, 4)
    return hp.Task(inner=inner, penalty=pull, outer=outer, params=0.0, hypers=0.0, train=rows, validation=rows + 1)


def wrong(clients, seed):
    return 3


def fails(clients, seed):
    raise KeyError("gone")
"""


def test_a_problem_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.toml").write_text(
        'experiment = "solve"\nproblem = "own:mine"\nclients = 3\nnetwork = "fully-connected"\n'
        "[outer]\nsteps = 40\nrate = 0.2\n[inner]\nsteps = 200\nrate = 0.3\n[estimator]\norder = 60\n"
    )
    code, out, err = hyperpush("run", "run.toml", "--json", "--out", "done", cwd=tmp_path)
    assert code == 0, err
    result = json.loads(out)
    # The mean of the inner data is 5.5, that of the outer data 6.5: x* = 5.5 − mean λ, and all λ go to −1.
    assert result["outer_costs"][0] - result["outer_costs"][-1] == pytest.approx(0.5, abs=0.02)
    assert result["hypergradient_error"] < 1e-4
    assert (tmp_path / "done" / "figures" / "outer-cost.png").exists()


def test_one_hyper_for_all_until_patience_ends(tmp_path, capsys, monkeypatch):
    """Everyone alone: x_i = b_i − λ, the outer data are 1 above the inner data, so the cost of λ is ½(λ + 1)² + c."""
    from hyperpush.cli import app as cli

    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    options = ("problem=own:mine", "clients=3", "inner.steps=60", "inner.rate=0.5", "outer.form=CDBO-Local")
    options += ("network=fully-connected", "outer.steps=30", "outer.rate=0.25", "stop.patience=2", "stop.rounds=1")
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "solve", "--json", "--out", "done", *(word for each in options for word in ("-s", each))])
    assert caught.value.code == 0
    result = json.loads(capsys.readouterr().out)
    costs, metric, best = result["outer_costs"], result["metric"], result["best_step"]
    assert metric == pytest.approx(costs, rel=1e-5)
    assert best == min(range(len(metric)), key=metric.__getitem__)
    assert len(metric) == best + 2 + 1 < 31
    # Adam's steps are of 0.25 at first: it passes −1 and turns back.
    assert costs[0] - costs[best] == pytest.approx(0.5, abs=0.02)
    assert result["hyper_spread"] == pytest.approx(0, abs=1e-5)
    assert result["hypergradient_error"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("network=trace", "network_options.steps=3"), ("steps", "3", "pairs")),
        (("network=k-out", "network_options.k=2", 'network_options.varying="no"'), ("varying", "no", "true or false")),
    ],
    ids=["trace", "k-out"],
)
def test_options_of_the_wrong_type(options, words, tmp_path):
    """In a process of its own: here the checks of signatures would be first."""
    arguments = [word for option in options for word in ("-s", option)]
    code, out, err = hyperpush("run", "solve", *arguments, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "error-studdy"), ("experiment", "error-studdy", "error-study")),
        (("run", "solve", "-s", "outter.steps=3"), ("outter", "outer")),
        (("run", "solve", "-s", "network=random-directd"), ("network", "random-directd", "random-directed")),
        (("run", "solve", "-s", "problem=logistc"), ("problem", "logistc", "logistic")),
        (("run", "solve", "-s", "estimator.method=HPG"), ("estimator.method", "HPG", "HGP")),
        (("run", "solve", "-s", "inner.steps=many"), ("inner.steps", "many")),
        (("run", "solve", "-s", "inner.rate=-1"), ("inner.rate", "-1", "greater than 0")),
        (("run", "solve", "-s", "network_options.probability=1.5"), ("probability", "1.5")),
        (("run", "solve", "-s", "network_options.probability=0"), ("probability", "1, 2, 3, 4", "reached")),
        (("run", "solve", "-s", "network_options.probabilty=0.5"), ("probabilty", "probability")),
        (("run", "solve", "-s", "inner.method=DSGD"), ("random-directed", "both ways", "DSGD", "FedAvg")),
        (("run", "solve", "-s", "problem=nowhere:f"), ("problem", "nowhere")),
        (("run", "solve", "-s", "problem=own:wrong"), ("problem", "own:wrong")),
        (("run", "solve", "-s", "problem=own:fails"), ("problem", "own:fails", "KeyError", "gone")),
        (
            ("run", "solve", "-s", "network=directed-ring", "-s", "estimator.method=VRHGP"),
            ("directed-ring", "VRHGP", "TrackedHGP"),
        ),
        (("run", "solve", "-s", "outer.form=CDBO-Locl"), ("outer.form", "CDBO-Locl", "CDBO-Local")),
        (
            ("run", "solve", "-s", "outer.form=CDBO-Local", "-s", "inner.method=DSGD"),
            ("inner.method", "DSGD", "LocalSGD", "CDBO-Local"),
        ),
        (("run", "solve", "-s", "stop.patience=0"), ("stop.patience", "0", "1")),
        (("run", "solve", "-s", "stop.metric=own:mine"), ("stop.patience", "None", "stop.metric")),
        (
            ("run", "solve", "-s", "stop.patience=2", "-s", "stop.metric=own:accuracy"),
            ("stop.metric", "own:accuracy", "own:outer"),
        ),
        (
            ("run", "solve", "-s", "stop.patience=2", "-s", "stop.data=own:fails"),
            ("stop.data", "own:fails", "KeyError", "gone"),
        ),
        (("run", "solve", "-s", "inner.rate=1e4"), ("SGP", "diverged", "round")),
        (("run", "solve", *FAST, "-s", "estimator.step=1e9"), ("HGP", "diverged", "round")),
        (("bench", "round"), ("round", "rounds")),
        (("run", "missing.toml"), ("missing.toml",)),
    ],
    ids=lambda value: " ".join(value[1:]) if value[0] in ("run", "bench") else "",
)
def test_mistakes_end_in_one_clear_line(arguments, words, tmp_path, capsys, monkeypatch):
    from hyperpush.cli import app as cli

    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["own.py"]
