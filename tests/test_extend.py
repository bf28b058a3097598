"""The extensions in examples/extend work in Python, on the command line, in sweeps and on peers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import hyperpush as hp

FOLDER = Path(__file__).parents[1] / "examples" / "extend"
PARTS = ("line", "one_term", "alternating", "watching")


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: __import__(name) for name in PARTS}


def command(*arguments, timeout=300):
    code = "import sys; from hyperpush.cli.app import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=FOLDER, capture_output=True, text=True, timeout=timeout
    )


def test_each_part_is_under_sixty_lines():
    assert all(len((FOLDER / f"{name}.py").read_text().splitlines()) < 60 for name in PARTS)


def test_in_python_and_as_a_file(parts, tmp_path):
    task, network = parts["watching"].ridge(4), parts["line"].Line(4)
    keep = parts["watching"].Keep()
    method = hp.PDBO(hp.SGP(40, 0.05), parts["one_term"].OneTerm(12, 0.3), hp.optimizer("sgd", learning_rate=0.5), 3)
    metrics = {"error": parts["watching"].absolute_error}
    found = hp.solve(task, method, network, key=0, metrics=metrics, hooks=[keep])
    assert keep.steps == [0, 1, 2, 3]
    assert found.history.cost.mean(axis=1)[-1] < found.history.cost.mean(axis=1)[0]
    done = command("run", "nested.toml", "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    history = json.loads(done.stdout)["history"]
    np.testing.assert_allclose(history["cost"], found.history.cost.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(history["error"], found.history.metrics["error"].mean(axis=1), rtol=1e-5)


def test_the_estimator_is_its_equation(parts):
    task, network = parts["watching"].ridge(4), parts["line"].Line(4)
    estimate = hp.hypergradient(task, parts["one_term"].OneTerm(200, 0.3), network, key=0).value
    problem, n = task.problem, 4
    slopes = [
        problem.outer_gradients(task.params[i], task.hypers[i], tuple(part[i] for part in task.validation))
        for i in range(n)
    ]
    mean = np.mean([slope[0] for slope in slopes], axis=0) / n
    for i in range(n):
        train = tuple(part[i] for part in task.train)
        product = problem.jacobian_product(task.params[i], task.hypers[i], train, mean)
        np.testing.assert_allclose(estimate[i], slopes[i][1] / n - 0.3 * product, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_sweep_tunes_the_algorithm(tmp_path):
    scores = ("-s", 'sweep.validation="error"', "-s", 'sweep.test=["cost"]', "-s", 'sweep.better="lower"')
    grid = ("--grid", "method.outer_step_size=[0.1, 0.2]", "--seeds", "1", "-s", "method.steps=20")
    done = command("sweep", "single.toml", *grid, *scores, "--out", tmp_path / "sweep", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["grid"]) == 2


@pytest.mark.parametrize("name", ["nested", pytest.param("single", marks=pytest.mark.faults)])
@pytest.mark.faults
def test_four_peers_end_where_the_simulator_does(parts, tmp_path, name):
    done = command("swarm", f"{name}.toml", "-n", "4", "--plain", "--out", tmp_path / "swarm", "--seconds", "240")
    assert done.returncode == 0, done.stderr
    ran = command("run", f"{name}.toml", "--out", tmp_path / "run")
    assert ran.returncode == 0, ran.stderr
    for client in range(4):
        for file in ("params", "hypers"):
            mine = load_file(tmp_path / "swarm" / f"peer-{client}" / "models" / file / f"peer-{client}.safetensors")
            simulated = load_file(tmp_path / "run" / "models" / file / "all.safetensors")
            np.testing.assert_allclose(mine[""], simulated[""][client], rtol=1e-5, atol=1e-6)
