"""Tasks with known results, and the comparison of personal models at a small size."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import operations_of

import hyperpush as hp
from hyperpush import networks
from hyperpush.base.errors import Diverged, InvalidInput
from hyperpush.runs.run import StudyRun, plan_run
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush_papers.common.data.files import folder
from hyperpush_papers.common.data.partition import Shift, Split
from hyperpush_papers.common.data.sources import Dataset
from hyperpush_papers.common.models import cnn
from hyperpush_papers.personalize import methods
from hyperpush_papers.personalize.figures import draw_partition
from hyperpush_papers.personalize.published import published_cell
from hyperpush_papers.personalize.scenarios import Scenario, scenario, turn_images
from hyperpush_papers.personalize.settings import small
from hyperpush_papers.personalize.study import estimator_of, network_of, setting_of, show_partition
from hyperpush_papers.sweep import plan

pytestmark = pytest.mark.long

SETTING = small("digits")
SMALL = ("clients=6", "examples=400", "steps=8", "again=4", "outer_steps=2", "rounds=2", "batch=16", "order=2")


def asked(*overrides):
    return load_config("personalize", overrides, experiments())


def test_images_are_turned_once_by_their_owner():
    images = np.arange(12.0).reshape(3, 2, 2)
    made = turn_images(images, [np.array([2]), np.array([0, 1])], np.array([1, 2]))
    assert made[2].tolist() == [[9, 11], [8, 10]]  # a quarter turn counterclockwise
    assert made[0].tolist() == [[3, 2], [1, 0]]  # a half turn
    assert images[2].tolist() == [[8, 9], [10, 11]]


def test_a_task_deals_every_example_out_once():
    made = scenario("digits", 6, 1)
    numbers = np.concatenate([own for part in made.split for own in part])
    assert sorted(numbers) == list(range(1797))
    assert made.cluster is not None
    assert np.bincount(made.cluster).tolist() == [2, 2, 2]
    with pytest.raises(InvalidInput, match="examples: got 1798; allowed: at most 1797"):
        scenario("digits", 6, 1, examples=1798)
    with pytest.raises(InvalidInput, match="clients: got 301; allowed: at most 300, the examples"):
        scenario("digits", 301, 1, examples=300)


class Printed(StudyRun):
    """Collect what a run would print and draw."""

    def __init__(self):
        """Skip the base class: nothing is written."""

    def table(self, title, columns, rows):
        self.title, self.rows = title, {row[0]: row[1:] for row in rows}

    def figure(self, name, figure):
        self.drawn, self.bar = figure.axes
        return Path()


def test_a_partition_is_counted_and_drawn():
    data = Dataset("toy", np.zeros((30, 4), np.float32), np.arange(30) % 3, 3, "a note")
    split = Split(*([np.arange(0, 6) + i, np.array([12])] for i in (0, 6, 12)))
    shift = Shift(np.array([0, 1]), np.array([0.1, 0.2]), np.array([0.3, 0.4]))
    made = Scenario(data, split, shift, None, cnn.EMNIST, None, None, None)
    found = made.describe()
    assert (found["train"], found["labels"], found["note"]) == ([6, 1], [3, 1], "a note")
    assert found["commonest_label"] == [pytest.approx(1 / 3), 1]
    assert (found["cluster"], found["std"]) == ([0, 1], [0.3, 0.4])
    np.testing.assert_allclose(made.label_shares(), [[1 / 3, 1 / 3, 1 / 3], [1, 0, 0]])
    run = Printed()
    show_partition(run, made, found)
    assert "a note; 2 clients" in run.title
    assert run.rows["training examples"] == (1, 3.5, 6, 7)
    draw_partition(run, made)
    np.testing.assert_array_equal(run.drawn.get_images()[0].get_array(), [[6, 6, 6], [3, 0, 0]])
    assert run.bar.get_ylabel() == "examples"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    every = 'methods=["local","mtl","fedem"]'
    made, run = execute(*asked(*SMALL, every, "network=fully-connected"), tmp_path_factory.mktemp("a") / "run")
    assert (run.path / "figures" / "accuracy.png").exists()
    return made


def test_every_method_has_a_row(result):
    assert [row["method"] for row in result["rows"]] == ["local", "mtl", "fedem"]
    sizes = np.array(result["data"]["test"])
    for row, detail in zip(result["rows"], result["details"], strict=True):
        each = np.array(detail["clients"])
        assert row["accuracy"] == pytest.approx(np.sum(each * sizes) / sizes.sum())
        assert row["accuracy_p10"] == each.min()  # ⌈6/10⌉ = 1
        curve = detail["validation_by_outer_step"]
        assert len(curve) in (0, 3)
        if curve:
            assert row["best_step"] == int(np.argmax(curve))
            assert row["validation_accuracy"] == pytest.approx(max(curve), rel=1e-5)
        for weights in detail["weights"].get("mtl", {}).get("models", []):
            assert sum(weights) == pytest.approx(1, rel=1e-5)
    assert result["rows"][0]["floats_per_client"] == 0  # each client trains alone
    assert result["start"].startswith("warm")


def test_pushes_are_not_compared_where_there_are_none(tmp_path):
    for override in ("estimator=vr-hgp", "estimator=directed-rb"):
        with pytest.raises(InvalidInput, match=r"pushes: got \[10, 1\]; allowed: one number"):
            execute(*asked("pushes=[10, 1]", override), tmp_path / "run")


def test_where_a_method_cannot_run_it_says_why():
    directed, static = (hp.network(name, 6) for name in ("random-directed", "static-undirected"))
    for name in methods.FEDERATED:
        assert "server" in (methods.why_not(name, directed, SETTING) or "")
        assert methods.why_not(name, networks.FullyConnected(6), SETTING) is None
    assert methods.why_not("fedem", static, SETTING) is None
    assert methods.why_not("fedprox", static, SETTING) == "needs a server"
    assert {methods.why_not(name, directed, SETTING) for name in (*methods.PLAIN, *methods.RECIPES)} == {None}
    assert [methods.kind(network) for network in (directed, static, networks.FullyConnected(3))] == [
        "push",
        "gossip",
        "server",
    ]


def test_a_plan_counts_every_method_without_running_any():
    given = ("clients=6", "steps=70", "again=10", "outer_steps=3", "order=2", "pushes=[4]", 'methods=["sgp","pl"]')
    found = plan_run(*asked(*given))
    assert found["stopped"] is None
    # Training from the start is shared; then four times ten steps, and three estimates of 2·4 pushes.
    first, shared, personal = found["pieces"]
    assert first["rounds"] == 70
    assert personal["rounds"] - shared["rounds"] == 3 * 2 * 4


def test_what_was_dealt_out_and_learned_is_shown(tmp_path):
    result, run = execute(*asked(*SMALL, 'methods=["sgp","pl-direct","head"]'), tmp_path / "run")
    assert [row["method"] for row in result["rows"]] == ["sgp", "pl-direct"]
    assert "no layer before" in result["not_applicable"]["head"]  # logistic regression has only a head
    assert sorted(result["data"]["cluster"]) == [0, 0, 1, 1, 2, 2]
    plain, learned = result["details"]
    assert plain["weights"] == {}
    assert np.sum(learned["weights"]["pl"]["labels"], axis=1) == pytest.approx([10] * 6, rel=1e-5)
    assert (run.path / "figures" / "weights-pl-direct-pl.png").stat().st_size > 5_000


PRODUCTS = """
experiment = "personalize"
methods = ["clean+pl", "interpolation+l2rates+mtl", "da+own_recipe:Bias+clean-direct"]
models = 2
outer_on = "validation"
clients = 4
examples = 200
steps = 8
again = 4
outer_steps = 2
batch = 16
order = 2

[recipes.clean]
l2 = 0.1
outer = {name = "sgd", learning_rate = 100.0}

[recipes.da]
normalized = false
outer = {name = "rmsprop", learning_rate = 0.2}

[recipes."own_recipe:Bias"]
l2 = 0.0
"""
BIAS = """
import jax.numpy as jnp
from hyperpush.personalize import Recipe

class Bias(Recipe):
    def hyper(self, model, params, key):
        return jnp.zeros(model.classes)

    def wrap(self, predict, model, hyper):
        return lambda params, inputs: predict(params, inputs) + hyper
"""


def test_products_that_nobody_named_are_written_in_a_file(tmp_path):
    (tmp_path / "own_recipe.py").write_text(BIAS)
    (tmp_path / "products.toml").write_text(PRODUCTS)
    with pytest.warns(UserWarning, match="'validation' is what the outer level fits"):
        result, run = execute(*load_config(str(tmp_path / "products.toml"), (), experiments()), tmp_path / "run")
    assert [row["method"] for row in result["rows"]] == tomllib.loads(PRODUCTS)["methods"]
    pair, triple, direct = (detail["weights"] for detail in result["details"])
    assert np.shape(triple["mtl"]["models"]) == (4, 2)
    assert np.ptp(np.concatenate(pair["clean"]["examples"])) > 0
    assert [len(own) for own in pair["clean"]["examples"]] == result["data"]["train"]
    assert len(set(result["data"]["train"])) > 1  # clients have different numbers of examples
    # The direct gradient changes hypers that predictions use, but not the weights of labels and examples.
    assert np.all(np.asarray(direct["da"]["labels"]) == 1)
    assert np.all(np.concatenate(direct["clean"]["examples"]) == 1)
    assert np.abs(hp.load(run.path).models("da+own_recipe:Bias+clean-direct, hypers")["bias"]).max() > 0.05


def test_a_method_that_diverges_leaves_the_others(tmp_path):
    given = (*SMALL, "rate=1e30", "ensemble_rate=0.1", "outer_steps=1")
    result, _ = execute(*asked(*given, 'methods=["local","local-mtl"]'), tmp_path / "run")
    assert [row["method"] for row in result["rows"]] == ["local-mtl"]
    assert result["not_applicable"]["local"].startswith("diverged with seed 0: ")
    with pytest.raises(Diverged):  # no method is left
        execute(*asked(*given, 'methods=["local","sgp"]', "seeds=2"), tmp_path / "none")


def test_a_sweep_refuses_an_unknown_method_before_it_runs():
    for given, field in (
        ('methods=["sgp","fedsgd"]', "methods"),
        ("network=wheel", "network"),
        ('sweep.compare.network=["ring","wheel"]', "network"),
    ):
        with pytest.raises(InvalidInput) as error:
            plan.load("personalize", (given,), experiments())
        assert error.value.field == field
    paper = ("size=paper", "paper=cooperative", 'sweep.compare.data=["emnist","cifar10"]', 'methods=["mtl"]')
    # digits, the default data set, is not among them
    assert len(plan.load("personalize", paper, experiments()).methods) == 2


def test_numbers_of_the_configuration_take_the_place_of_the_sizes():
    config: Any
    _, config = asked("steps=7", "rate=0.5", "size=paper", "data=cifar10")
    made = setting_of(config)
    assert (made.steps, made.rate, made.clients, made.again) == (7, 0.5, 20, None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hgp", hp.HGP),
        ("directed-rb", hp.hypergradients.DirectedRB),
        ("vr-hgp", hp.hypergradients.VRHGP),
        ("tracked", hp.TrackedHGP),
    ],
)
def test_the_estimator_is_the_one_asked_for(name, kind):
    config: Any
    _, config = asked(f"estimator={name}", "order=7")
    made = estimator_of(setting_of(config), 3)
    assert type(made) is kind
    assert 7 in (getattr(made, field, None) for field in ("order", "rounds", "steps"))
    static = "size=paper", "data=emnist", "network=static-undirected"
    _, config = asked(*static, "network_options.probability=0.5")
    setting: Any = setting_of(config)
    assert type(estimator_of(setting, 3)) is hp.hypergradients.DirectedRB
    assert setting.network_options == {"mixing": "fastest-mixing", "probability": 0.5}
    _, config = asked(*static, "network_options.mixing=metropolis", "clients=12")
    network = network_of(config, setting_of(config), 0)
    assert network == networks.StaticUndirected(12, seed=0)


def test_published_numbers_stand_in_the_right_cells():
    assert published_cell("emnist", "random-directed", "da+mtl") == "82.2 / 74.5"
    assert published_cell("emnist", "static-undirected", "fedem") == "83.8 / 75.9"
    assert published_cell("emnist", "random-directed", "sgp-mtl") == "80.9 / 73.2; 81.3 / 73.5 *"
    assert published_cell("shakespeare", "random-directed", "mtl-direct") == "38.9 / 34.8 *"
    assert published_cell("emnist", "fully-connected", "mtl") == "83.9 / 76.5"
    assert published_cell("cifar100", "random-directed", "da") == "42.1 / 37.1"
    assert published_cell("emnist", "random-directed", "fedprox") is None
    assert published_cell("digits", "random-directed", "sgp") is None


def test_operations_are_counted_as_by_hand():
    convolutions = 24 * 24 * 25 * 32 + 8 * 8 * 25 * 32 * 64
    assert operations_of(cnn.EMNIST) == 2 * (convolutions + 1024 * 2048 + 2048 * 62)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("methods=[]", "methods"),
        ('methods=["fedsgd"]', "methods"),
        ("network=wheel", "network"),
        ("data=imagenet", "data"),
        ("clients=-1", "clients"),
        ("examples=3", "clients"),
        ("pushes=[0]", "pushes"),
        ("pushes=[2, 2]", "pushes"),
        ('methods=["sgp", "sgp"]', "methods"),
        ("network_options.clients=3", "network_options"),
        ("pushes=1", "pushes"),
        ("paper=cooperative", "paper"),
        ("size=large", "size"),
        ("outer_on=test", "outer_on"),
        ("models=-1", "models"),
        ('methods=["pl+pl"]', "recipes"),
        ("recipes.mtl.models=0", "recipes.mtl.models"),
        ("recipes.pl.l1=0", "recipes.pl.l1"),
        ('recipes.pl.outer={name="adam"}', "recipes.pl.outer"),
    ],
)
def test_bad_options_are_named(override, field, tmp_path):
    with pytest.raises(InvalidInput) as error:
        execute(*asked(override), tmp_path / "run")
    assert field in error.value.field
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['methods=["pl+mlt"]'], r"^methods: got 'mlt'; allowed: clean, da, .* \(did you mean 'mtl'\?\)$"),
        (['methods=["mtl+sgp"]'], r"^methods: got 'sgp'; allowed: clean, da, "),
        (
            ["recipes.claen.l2=1", 'methods=["clean+pl"]'],
            r"^recipes: got 'claen'; allowed: clean, pl \(did you mean 'cl",
        ),
        (["recipes.pl.l2=1", 'methods=["sgp"]'], r"^recipes: got 'pl'; allowed: nothing: no method is made of recipes"),
        (['methods=["pl+tests_only:PL"]'], r"^methods: got 'tests_only:PL'; allowed: "),
        (['methods=["hyperpush.personalize:PL+pl"]'], r"^recipes: got 'PL \+ PL'; allowed: one of each name"),
    ],
)
def test_what_does_not_combine_is_named(overrides, said, tmp_path):
    with pytest.raises(InvalidInput, match=said):
        execute(*asked(*overrides), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_missing_data_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    command = [
        sys.executable,
        "-c",
        "from hyperpush.cli.app import main; main()",
        "run",
        "personalize",
        "-s",
        "data=emnist",
    ]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "HYPERPUSH_DATA" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(folder() is None, reason="needs HYPERPUSH_DATA")
def test_emnist_is_dealt_out_in_clusters():
    made = scenario("emnist", 6, 0, examples=600)
    assert made.shift is not None
    assert sum(len(own) for part in made.split for own in part) == 600
    images = np.asarray(made.train.examples[0])
    for client, (mean, std) in enumerate(zip(made.shift.mean, made.shift.std, strict=True)):
        assert images[client, 0].min() == pytest.approx(-mean / std, rel=1e-4)  # black pixels
