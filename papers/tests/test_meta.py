"""The meta-learning study: its split, its NumPy references and a small run."""

import signal
from math import comb

import jax
import numpy as np
import pytest
from ridge import phi_of, ridge
from wide import float64  # noqa: F401  (a fixture)

from hyperpush.cli import app as cli
from hyperpush.privacy import ASSUMPTION
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush_papers.common.data.sources import available
from hyperpush_papers.meta.config import Meta
from hyperpush_papers.meta.study import draw_images


def check_split(config):
    drawn = draw_images(config)
    classes = [drawn.labels[tasks] for tasks in (drawn.training, *drawn.tests.values())]
    assert all(np.all(each == each[..., :1]) for each in classes)
    training, known, new = (
        {frozenset(task) for task in each[..., 0].reshape(-1, config.ways).tolist()} for each in classes
    )
    assert len(np.unique(drawn.training)) == drawn.training.size  # no image belongs to two tasks or two clients
    assert not np.intersect1d(drawn.training, drawn.tests["accuracy"]).size
    assert not training & known
    assert 1 <= len(known) <= -(-comb(len(drawn.known), config.ways) // 5)
    assert not frozenset.union(*training) & frozenset.union(*new)
    assert frozenset.union(*known) <= set(drawn.known.tolist())
    return drawn


@pytest.mark.parametrize("seed", range(8))
def test_new_tasks_share_nothing_with_training(seed):
    check_split(Meta(data="digits", seed=seed))


@pytest.mark.skipif(not available("cifar10"), reason="needs CIFAR-10 in $HYPERPUSH_DATA")
@pytest.mark.long
def test_cifar_is_taken_where_it_is():
    drawn = check_split(Meta())
    assert drawn.described["data"] == "cifar10"
    assert drawn.inputs.shape[1] == 8 * 8 * 3


SMALL = (
    "data=digits",
    "loss=squares",
    "iterations=5",
    "joint_steps=5",
    "test_tasks=6",
    "outer=[0.5]",
    "inner=[1.0]",
    "points=5",
    "tasks=2",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    experiment, config = load_config(
        "meta", (*SMALL, "methods=['LDPDSBO', 'GBDSBO']", "privacy.epsilon=2.0", "privacy.iterations=5"), experiments()
    )
    result, run = execute(experiment, config, tmp_path_factory.mktemp("meta") / "run")
    return config, result, run


@pytest.mark.long
def test_a_run_reports_rows_references_and_curves(small):
    _, result, run = small
    rows = {row["method"]: row for row in result["rows"]}
    assert set(rows) == {"LDPDSBO", "GBDSBO"}
    assert "matrix" in rows["GBDSBO"]["left_out"]
    # One round sends x, y and z; y and z have the size of the heads.
    heads, layer = 5 * 2 * 17 * 3, 64 * 16 + 16
    assert rows["LDPDSBO"]["floats_per_client"] == 5 * (2 * heads + layer)
    assert rows["LDPDSBO"]["rounds"] == 5
    (curve,) = result["curves"]
    assert curve["accuracy"][0] == pytest.approx(result["references"]["random"]["accuracy"])
    assert curve["accuracy"][-1] == pytest.approx(rows["LDPDSBO"]["accuracy"])
    assert len(run.figures) == 3


def test_what_can_be_private_is_and_says_what_it_cost(small):
    _, result, _ = small
    private, other = result["privacy"]["LDPDSBO"], result["privacy"]["GBDSBO"]
    assert 0 < private["claimed"] <= private["epsilon"] == 2
    assert private["assumes"] == ASSUMPTION
    without = result["rows"][[row["method"] for row in result["rows"]].index("LDPDSBO")]["accuracy"]
    assert private["cost_in_accuracy"] == pytest.approx(without - private["accuracy"])
    assert private["cost_of_settings"] + private["cost_of_noise"] == pytest.approx(private["cost_in_accuracy"])
    assert other["reason"].startswith("n/a")
    assert not {"accuracy", "epsilon", "delta", "assumes"} & set(other)


def test_the_random_representation_is_judged_as_by_numpy(small):
    config, result, _ = small
    drawn = draw_images(config)
    key = jax.random.split(jax.random.key(config.seed), 1)[0]
    weight = np.asarray(jax.random.normal(key, (64, 16)), np.float64) / 8
    bias, shots = np.zeros(16), config.shots

    def phi(rows):
        return phi_of(weight, bias, drawn.inputs[rows.ravel()].astype(np.float64))[0]

    for name, tests in drawn.tests.items():
        right = []
        for task in tests:
            head, _ = ridge(phi(task[:, :shots]), np.repeat(np.eye(3), shots, 0), config.l2)
            right.append((phi(task[:, shots:]) @ head).argmax(1) == np.repeat(np.arange(3), config.test_queries))
        # A query near the decision boundary may fall on either side in float32.
        assert result["references"]["random"][name] == pytest.approx(np.mean(right), abs=0.005)
    costs = []
    for task in drawn.training.reshape(-1, 3, config.shots + config.queries):
        head, _ = ridge(phi(task[:, :shots]), np.repeat(np.eye(3), shots, 0), config.l2)
        costs.append(
            0.5 * np.mean(np.sum((phi(task[:, shots:]) @ head - np.repeat(np.eye(3), config.queries, 0)) ** 2, 1))
        )
    assert result["references"]["random"]["outer_cost"] == pytest.approx(np.mean(costs), rel=1e-4)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("new_classes=7", ("new_classes", "7", "6")),
        ("tasks=1000", ("tasks", "fewer")),
        ("ways=1", ("ways", "1", "2")),
        ("data=cifar", ("data", "cifar", "cifar10")),
        ("methods=['MADSBOO']", ("methods", "MADSBOO", "MADSBO")),
    ],
)
def test_bad_options_end_in_one_clear_line(override, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(("run", "meta", "-s", "data=digits", "-s", override))
    _, error = capsys.readouterr()
    assert caught.value.code == 2
    assert all(word in error for word in words), error
    assert "Traceback" not in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
