"""A run kept in a folder resumes, returns its result or is refused; a new process predicts with the saved models."""

import functools
import json
import re
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import hyperpush as hp

GENERATOR = np.random.default_rng(0)
DATA = (GENERATOR.normal(size=(3, 12, 2)).astype(np.float32), GENERATOR.normal(size=(3, 12)).astype(np.float32))
NETWORK = hp.networks.RandomDirected(3)
NAMES = ["ada", "bob", "eve"]


def loss(model, hyper, batch):
    return (jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2


def l2(model, hyper):
    return jnp.exp(hyper) * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def make_task(names=NAMES):
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    options = {"params": model, "hypers": -3.0, "train": DATA, "validation": DATA, "names": names}
    return hp.Task(inner=loss, penalty=l2, outer=loss, **options)


def method(step_size=0.05):
    estimator = hp.HGP(steps=3, pushes=3, step_size=0.1)
    return hp.PDBO(hp.SGP(30, step_size), estimator, hp.optimizer("sgd", learning_rate=0.1), 2)


def same(one, other):
    arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (one, other)]
    return all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))


def test_the_same_call_returns_what_was_saved(tmp_path):
    task = make_task()
    first = hp.solve(task, method(), NETWORK, key=0, save=tmp_path / "run")
    again = hp.solve(make_task(), method(), NETWORK, key=0, save=tmp_path / "run")
    assert same((first.params, first.hypers), (again.params, again.hypers))
    assert again.costs == first.costs
    assert again.status == first.status
    np.testing.assert_array_equal(again.history.cost, first.history.cost)
    assert [file.name for file in (tmp_path / "run" / "models" / "params").iterdir()] == ["all.safetensors"]


def test_models_are_not_handed_to_other_clients(tmp_path):
    hp.train(make_task(), hp.SGP(2, 0.05), NETWORK, key=0, save=tmp_path / "run")
    for names in (NAMES[::-1], ("a", "b", "c")):
        with pytest.raises(hp.InvalidInput, match=rf"task\.names: got '?{names[0]}.*allowed: {NAMES[0]}, {NAMES[1]}"):
            hp.load(tmp_path / "run", task=make_task(names))


def test_params_of_another_run_among_the_files_are_refused(tmp_path):
    hp.train(make_task(), hp.SGP(2, 0.05), NETWORK, key=0, save=tmp_path / "run")
    file = tmp_path / "run" / "models" / "params" / "all.safetensors"
    save_file({name: each[:1] for name, each in load_file(file).items()}, file)
    with pytest.raises(hp.InvalidInput, match="files of one run"):
        hp.load(tmp_path / "run").arrays("params")


@pytest.mark.long
def test_what_was_read_back_leads_on_as_what_was_saved(tmp_path):
    """On a random network a later estimate needs the observed links and the network's time."""
    task, network = make_task(), hp.networks.RandomDirected(len(NAMES))

    def estimate():
        trained = hp.train(task, hp.SGP(30, 0.05), network, key=0, save=tmp_path / "run")
        return hp.hypergradient(trained.task, hp.hypergradients.VRHGP(5, 0.05), network, key=0).value

    np.testing.assert_array_equal(estimate(), estimate())
    loaded = hp.load(tmp_path / "run", task=task).result
    assert (loaded.task.point.step, loaded.links.heard.shape) == (30, (3, 3))
    assert loaded.task.point.iteration == {"weights": "push", "variant": "gradient-first", "step_size": 0.05}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": method(0.06)}, r"method\.inner\.step_size was 0.05"),
        ({"key": 1}, "key was"),
        ({"every": 2}, "every was"),
    ],
    ids=["method", "key", "every"],
)
def test_another_call_is_refused_and_says_what_differs(tmp_path, change, said):
    call = {"task": make_task(), "method": method(), "network": NETWORK, "key": 0, "save": tmp_path / "run"}
    hp.solve(**call)
    with pytest.raises(hp.InvalidInput, match=said):
        hp.solve(**{**call, **change})


def test_a_folder_of_another_format_is_refused(tmp_path):
    hp.train(make_task(), hp.SGP(5, 0.1), NETWORK, key=0, save=tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(hp.InvalidInput, match="of format 99"):
        hp.load(tmp_path / "run", task=make_task())


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "something").write_text("mine")
    with pytest.raises(hp.InvalidInput, match="save: got"):
        hp.train(make_task(), hp.SGP(5, 0.1), NETWORK, key=0, save=tmp_path)


@pytest.mark.parametrize(
    ("save", "said"),
    [
        ("", "save: got ''; allowed: the name of a folder"),
        (3, "save: got 3; allowed: the name of a folder"),
        ("~nobody-of-this-name/x", "save: got '~nobody-of-this-name/x'"),
        ("o" * 300, "File name too long"),
        (__file__, "Not a directory"),
        (__file__ + "/run", "Not a directory"),
    ],
    ids=["empty", "number", "user", "long", "file", "under a file"],
)
@pytest.mark.parametrize("seeds", [None, 1])
def test_what_cannot_be_a_folder_is_refused(save, said, seeds):
    with pytest.raises(hp.InvalidInput, match=re.escape(said)):
        hp.train(make_task(), hp.SGP(5, 0.1), NETWORK, key=0, save=save, seeds=seeds)


def test_a_folder_without_its_models_is_refused(tmp_path):
    hp.train(make_task(), hp.SGP(2, 0.05), NETWORK, key=0, save=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "models" / "params")
    with pytest.raises(hp.InvalidInput, match="which lacks models/params"):
        _ = hp.load(tmp_path / "run", task=make_task()).result
    for other in (tmp_path, "/"):
        with pytest.raises(hp.InvalidInput, match="the folder of a finished run"):
            hp.load(other)


def test_the_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        hp.train(make_task(), hp.SGP(2, 0.05), NETWORK, key=0, save="~/run")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert hp.load("~/run").result["params"].keys() == hp.load(tmp_path / "run").result["params"].keys()


class Interrupt(hp.hooks.Hook):
    """Hook that interrupts a run as Ctrl-C does, once the run has reached a given round."""

    def __init__(self, after):
        self.after = after

    def advance(self, loop, done, total):
        if loop == "SGP" and done >= self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path):
    task, solver = make_task(), hp.SGP(steps=400, step_size=0.05)
    whole = hp.train(task, solver, NETWORK, key=0)
    with pytest.raises(KeyboardInterrupt) as stopped:
        hp.train(task, solver, NETWORK, key=0, save=tmp_path / "run", hooks=[Interrupt(100)])
    assert "continues this run from its last checkpoint" in stopped.value.__notes__[0]
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        hp.InvalidInput, match=r"run: got .*an interrupted run.*the same call with save='.*run' continues"
    ):
        hp.load(tmp_path / "run")
    resumed = hp.train(task, solver, NETWORK, key=0, save=tmp_path / "run")
    assert same(whole.params, resumed.params)
    assert resumed.costs == whole.costs


def test_a_fresh_process_predicts(tmp_path):
    task = make_task()
    found = hp.train(task, hp.SGP(50, 0.05), NETWORK, key=0, save=tmp_path / "run")
    expected = jax.vmap(found.client("bob").params)(DATA[0][1])
    code = f"""
import sys; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
import jax, numpy as np, hyperpush as hp
from test_saving import make_task, DATA
model = hp.load({str(tmp_path / "run")!r}, task=make_task()).result.client("bob").params
np.save({str(tmp_path / "out.npy")!r}, jax.vmap(model)(DATA[0][1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-5)


def test_without_the_task_arrays_come_by_name(tmp_path):
    hp.train(make_task(), hp.SGP(5, 0.05), NETWORK, key=0, save=tmp_path / "run")
    arrays = hp.load(tmp_path / "run").result["params"]
    assert arrays["layers/0/weight"].shape == (3, 4, 2)


def power(x, hyper, batch, exponent=2):
    return jnp.abs(batch[0] @ x - batch[1]) ** exponent


def make_loss(scale):
    return lambda x, hyper, batch: scale * (batch[0] @ x - batch[1]) ** 2


def squared(x, hyper, batch):
    return jnp.square(batch[0] @ x - batch[1])


def absolute(x, hyper, batch):
    return jnp.abs(batch[0] @ x - batch[1])


FUNCTIONS = {
    "another function of the same shape": (squared, absolute),
    "another number in a closure": (make_loss(1.0), make_loss(2.0)),
    "another keyword": (functools.partial(power, exponent=2), functools.partial(power, exponent=1)),
}


@pytest.mark.parametrize(("one", "other"), FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.long
def test_another_cost_is_another_call(tmp_path, one, other):
    def train(inner):
        task = hp.Task(inner=inner, outer=squared, params=jnp.zeros(2), hypers=0.0, train=DATA, validation=DATA)
        return hp.train(task, hp.SGP(3, 0.1), NETWORK, key=0, save=tmp_path / "run")

    first = train(one)
    assert same(train(one).params, first.params)
    with pytest.raises(hp.InvalidInput, match=r"task\.inner was"):
        train(other)


def twice(x, hyper, batch):
    return 2 * squared(x, hyper, batch)


def test_a_run_is_not_continued_on_another_task_unnoticed(tmp_path):
    def make(inner=squared, rows=12, hypers=0.0):
        data = {"train": tuple(each[:, :rows] for each in DATA), "validation": DATA}
        return hp.Task(inner=inner, outer=squared, params=jnp.zeros(2), hypers=hypers, **data)

    trained = hp.train(make(), hp.SGP(3, 0.1), NETWORK, key=0, save=tmp_path / "run")
    others = {"inner": make(twice), "train": make(rows=9), "hypers": make(hypers=1.0)}
    for name, other in others.items():
        with pytest.raises(hp.InvalidInput, match=rf"task: got 'a task with other {name}'.*changed=\['{name}'\]"):
            hp.load(tmp_path / "run", task=other)
        continued = hp.load(tmp_path / "run", task=other, changed=[name]).result.task
        assert same(continued.params, trained.params)
        assert continued.train[0].shape == other.train[0].shape
    with jax.enable_x64(True):  # the same numbers in another precision
        assert same(hp.load(tmp_path / "run", task=make()).result.params, trained.params)
    with pytest.raises(hp.InvalidInput, match="changed: got 'labels'"):
        hp.load(tmp_path / "run", task=make(), changed=["labels"])
    with pytest.raises(hp.InvalidInput, match="without a task"):
        hp.load(tmp_path / "run", changed=["train"])


def test_another_optax_optimizer_is_another_call(tmp_path):
    def solve(rate):
        outer = hp.PDBO(hp.SGP(3, 0.1), hp.HGP(2, 2, 0.1), optax.adam(rate), 1)
        return hp.solve(make_task(), outer, NETWORK, key=0, save=tmp_path / "run")

    first = solve(0.1)
    assert same(solve(0.1).hypers, first.hypers)
    with pytest.raises(hp.InvalidInput, match="method was"):
        solve(0.2)


def test_what_was_spent_is_read_back(tmp_path):
    data = jax.tree.map(jnp.asarray, DATA)
    task = hp.Task(inner=squared, outer=squared, params=jnp.zeros(2), hypers=0.0, train=data, validation=data)
    private = task.private(clip=1.0, noise=hp.privacy.Gaussian(5.0))
    trained = hp.train(private, hp.SGP(4, 0.1), NETWORK, key=0, save=tmp_path / "run")
    loaded = hp.load(tmp_path / "run", task=private).result
    assert loaded.privacy.releases == trained.privacy.releases == {"train": 4}
    assert loaded.privacy.epsilon(1e-5) == pytest.approx(trained.privacy.epsilon(1e-5))
    with pytest.raises(hp.InvalidInput, match="which was private"):
        hp.load(tmp_path / "run", task=task)
