"""A TOML spec gives bit-identical results to a call in Python, and its errors name the dotted key."""

import copy
import json
import tomllib

import jax
import numpy as np
import pytest
import tomli_w

import hyperpush as hp
from hyperpush.base.config import as_table
from hyperpush.base.errors import InvalidInput
from hyperpush.cli.app import main
from hyperpush.spec.config import load_config
from hyperpush.spec.experiment import SPEC
from hyperpush.spec.objects import read

TEXT = """
key = 3
[task]
name = "logistic"
clients = 4
seed = 0
log_rates = true
[network]
name = "random-directed"
[method]
name = "PDBO"
steps = 2
inner = { name = "SGP", steps = 20, step_size = 0.5 }
hypergradient = { name = "HGP", steps = 5, pushes = 5, step_size = 0.5 }
outer = { name = "adam", learning_rate = 0.1 }
"""


def changed(key, value):
    values = copy.deepcopy(tomllib.loads(TEXT))
    *path, last = key.split(".")
    table = values
    for part in path:
        table = table.setdefault(part, {})
    table[last] = value
    return values


def test_the_file_gives_the_same_bits_as_the_call():
    task = hp.tasks.logistic(4, 0, log_rates=True)
    method = hp.PDBO(hp.SGP(20, 0.5), hp.HGP(5, 5, 0.5), hp.optimizer("adam", learning_rate=0.1), steps=2)
    called = hp.solve(task, method, hp.networks.RandomDirected(4), key=3)
    found = read(tomllib.loads(TEXT)).run()
    assert isinstance(found, hp.Solution)
    np.testing.assert_array_equal(found.hypers, called.hypers)
    np.testing.assert_array_equal(found.params, called.params)


def test_a_name_alone_stands_for_a_table(tmp_path):
    values = {**tomllib.loads(TEXT), "network": "ring", "engine": "Simulate"}
    found = read(values)
    assert isinstance(found.network, hp.networks.Ring)
    assert isinstance(found.engine, hp.Simulate)
    (tmp_path / "my.toml").write_text(tomli_w.dumps(values))
    _, config = load_config(str(tmp_path / "my.toml"), ["network=star"], {"spec": SPEC})
    assert as_table(config)["network"] == {"name": "star"}


def test_a_sweep_of_a_file_says_what_it_needs(tmp_path, capsys):
    (tmp_path / "my.toml").write_text(TEXT)
    for arguments, message in (
        ([], "sweep.validation: got None; allowed: cost, or a metric of [metrics]; a spec names in [sweep] what to"),
        (
            ["-s", "sweep.validation=cost"],
            "sweep.test: got []; allowed: what to report beside 'cost', by which it",
        ),
        (["-s", "sweep.validation=cost", "-s", "sweep.test=['rounds']"], "--grid 'method.steps=[5, 10]'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["sweep", str(tmp_path / "my.toml"), *arguments])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert message in said


WRONG = {
    "network": (3, r"network: got 3; allowed: a table \[network\] with a name and options, or a name alone"),
    "method.inner.step_sise": (0.1, r"method\.inner\.step_sise.*did you mean 'step_size'"),
    "method.inner.step_size": (-1.0, r"method\.inner\.step_size: got -1\.0"),
    "method.inner.name": ("SPG", r"method\.inner\.name: got 'SPG'.*did you mean 'SGP'"),
    "method.hypergradient.pushes": (0, r"method\.hypergradient\.pushes: got 0"),
    "method.outer.learning_rat": (0.1, r"method\.outer\.learning_rat.*did you mean 'learning_rate'"),
    "method.name": ("PDBOO", r"method\.name: got 'PDBOO'.*did you mean 'PDBO'"),
    "network.clients": (5, r"network\.clients: got 5; allowed: no value, as the task has 4 clients already"),
    "network.name": ("no_such_module:Line", r"network\.name: got 'no_such_module:Line'.*imports"),
    "network.probability": (2.0, r"network\.probability: got 2\.0"),
    "task.name": ("logistik", r"task\.name: got 'logistik'.*did you mean 'logistic'"),
    "task.clients": (0, r"task\.clients: got 0; allowed: a whole number from 1"),
    "task.rate": ("high", r"task\.rate: got 'high'; allowed: a finite number"),
    "task.sed": (1, r"task\.sed.*did you mean 'seed'"),
    "engine.name": ("simulat", r"engine\.name: got 'simulat'.*did you mean 'Simulate'"),
    "hooks.log": ("json:JSONDecoder", r"hooks\.log\.name: got 'json:JSONDecoder'.*a hook"),
    "metrics.a": ("json:dumpz", r"metrics\.a: got 'json:dumpz'"),
    "verb": ("train", r"verb: got 'train'; allowed: solve for PDBO"),
    "verb.damping": (0.1, r"verb\.damping: got 0\.1; allowed: no options for solve here"),
    "start": ("no/such/run", r"start: got 'no/such/run'; allowed: the folder of a finished run that saved models"),
    "metod": ({}, r"metod: got 'metod'.*did you mean 'method'"),
    "key": (-1, r"key: got -1"),
    "task.private": ({"clip": 1.0, "delta": 1e-5}, r"task\.private\.epsilon: got None"),
}


@pytest.mark.parametrize(("key", "given", "message"), [(key, *each) for key, each in WRONG.items()], ids=WRONG)
def test_errors_name_the_dotted_key(key, given, message):
    with pytest.raises(InvalidInput, match=message):
        read(changed(key, given)).run()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (3, r"verb: got 3; allowed: one of train, hypergradient, solve, influence, or a table"),
        ("influenc", r"verb: got 'influenc'.*did you mean 'influence'"),
        ({"name": "influence", "dampin": 1}, r"verb\.dampin.*did you mean 'damping'"),
        ({"name": "influence", "damping": -1.0}, r"damping: got -1\.0"),
        ({"name": "influence", "validation": [["nobody", 0]]}, r"client: got 'nobody'"),
    ],
)
def test_what_cannot_be_scored_is_named(table, message):
    values = changed("method", {"name": "HGP", "steps": 2, "pushes": 2, "step_size": 0.1})
    with pytest.raises(InvalidInput, match=message):
        read({**values, "verb": table}).run()


def test_scores_need_an_estimator():
    with pytest.raises(InvalidInput, match="method: got 'SGP'; allowed: an estimator"):
        read({**changed("method", "SGP"), "verb": "influence"})


@pytest.mark.long
def test_a_file_scores_the_records_of_a_finished_run(tmp_path, capsys):
    values, folder = tomllib.loads(TEXT), tmp_path / "solved"
    solved = {**values, "precision": "float64"}
    asked = {"name": "influence", "damping": 0.01, "validation": [["2", 3], [0, 1]]}
    scored = {**solved, "start": str(folder), "verb": asked, "method": "automatic"}
    for tables, out in ((solved, folder), (scored, tmp_path / "scored")):
        (tmp_path / "my.toml").write_text(tomli_w.dumps(tables))
        with pytest.raises(SystemExit) as ended:
            main(["run", str(tmp_path / "my.toml"), "--out", str(out), "--json"])
        assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    with jax.enable_x64(True):
        task = read(values).task
        solution = hp.load(folder, task=task).result
        assert np.abs(solution.hypers - task.hypers).max() > 0.05  # the hypers have become personal
        network = hp.networks.RandomDirected(4)
        options = {"key": 3, "damping": 0.01, "validation": [(2, 3), (0, 1)]}
        found = hp.influence.scores(solution.task, hp.Automatic(), network, **options)
        before = hp.influence.scores(task.at(solution.params), hp.Automatic(), network, **options)
    assert printed["validation"] == [["2", 3], ["0", 1]]
    for client, name in enumerate(task.names):
        np.testing.assert_allclose(printed["scores"][name], found.examples[client], rtol=1e-9)
        np.testing.assert_allclose(printed["by_validation"][name], found.by_validation[client], rtol=1e-9)
    assert not np.allclose(found.examples[0], before.examples[0], rtol=1e-3)
    with pytest.raises(InvalidInput, match=r"run: got '.*scored, which saved no models'"):
        hp.load(tmp_path / "scored", task=task)
    with pytest.raises(InvalidInput, match=r"start: got '.*scored'; allowed: the folder of a finished run that saved"):
        read({**scored, "start": str(tmp_path / "scored")}).run()


@pytest.mark.long
def test_a_start_knows_the_links_that_its_run_saw(tmp_path):
    """After `start =` an estimate equals that of two verbs: it uses observed links and the network's time."""
    trains = {**tomllib.loads(TEXT), "method": {"name": "SGP", "steps": 20, "step_size": 0.5}}
    (tmp_path / "my.toml").write_text(tomli_w.dumps(trains))
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "my.toml"), "--out", str(tmp_path / "trained"), "--json"])
    backward = {"name": "DirectedRB", "steps": 10, "step_size": 0.5}
    found = read({**trains, "method": backward, "start": str(tmp_path / "trained")}).run()
    network = hp.networks.RandomDirected(4)
    trained = hp.train(hp.tasks.logistic(4, 0, log_rates=True), hp.SGP(20, 0.5), network, key=3)
    truth = hp.hypergradient(trained.task, hp.hypergradients.DirectedRB(10, 0.5), network, key=3)
    assert isinstance(found, hp.Estimate)
    np.testing.assert_allclose(found.value, truth.value, rtol=1e-5)


def test_a_module_that_raises_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("def make(clients):\n    raise RuntimeError('no disk')\n")
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"task\.name.*broken_task:make, which fails with RuntimeError: no disk"):
        read({**tomllib.loads(TEXT), "task": {"name": "broken_task:make", "clients": 4}})
    with pytest.raises(InvalidInput, match=r"task\.name.*ZeroDivisionError"):
        read({**tomllib.loads(TEXT), "task": {"name": "broken_module:make"}})


def test_noise_is_found_for_an_epsilon_before_the_run():
    private = {"epsilon": 2.0, "delta": 1e-5, "clip": 1.0, "curvature": 0.35, "coupling": 0.3}
    spec = read(changed("task.private", private))
    assert hp.budget(spec.task, spec.method).epsilon(1e-5) == pytest.approx(2.0, rel=1e-2)


def test_the_command_runs_and_keeps_what_hp_load_reads(tmp_path, capsys):
    (tmp_path / "my.toml").write_text(TEXT)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "my.toml"), "--out", str(tmp_path / "run"), "--json"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["costs"]["rounds"] == 20 + 2 * (25 + 20)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["method"]["name"] == "PDBO"
    assert hp.load(tmp_path / "run").params["hypers"].shape == (4, 6)
    spec = read(tomllib.loads(TEXT))
    found, solution = hp.load(tmp_path / "run", task=spec.task), spec.run()
    assert isinstance(solution, hp.Solution)
    np.testing.assert_array_equal(found.result.hypers, solution.hypers)
    np.testing.assert_array_equal(found.result.history.cost, solution.history.cost)
    assert (found.result.costs, found.result.status) == (solution.costs, solution.status)
    assert {each["kind"] for each in found.events} == {"row"}


@pytest.mark.parametrize("given", ["0", "nan", "inf"])
def test_bad_input_is_one_line_and_leaves_nothing(given, tmp_path, capsys):
    (tmp_path / "my.toml").write_text(TEXT)
    with pytest.raises(SystemExit) as ended:
        main(
            ["run", str(tmp_path / "my.toml"), "-s", f"method.inner.step_size={given}", "--out", str(tmp_path / "run")]
        )
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.toml"]
