"""Fitted models equal scikit-learn's on the pooled table; tasks use and keep the shared scaling."""

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

import hyperpush as hp
from hyperpush.tables.split import deal
from hyperpush.tables.task import split_rows

L2 = 0.03
COUNTS = (30, 50, 41)


def parties(classes, seed=0):
    """Return three parties whose columns differ in mean; `classes=0` gives numeric labels."""
    generator = np.random.default_rng(seed)
    found = {}
    for number, count in enumerate(COUNTS):
        rows = generator.normal(size=(count, 4)) * [1, 100, 0.01, 5] + 20 * number
        score = (rows - 20) @ [1.0, 0.01, 30, 0.1] + generator.normal(size=count)
        labels = np.digitize(score, np.linspace(-1, 1, classes + 1)[1:-1]) if classes else 1000 + 50 * score
        found[f"p{number}"] = (rows, labels)
    return found


def pooled(given):
    return [np.concatenate(parts) for parts in zip(*given.values(), strict=True)]


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_equal_scikit_learns_on_the_pooled_table(classes):
    given = parties(classes)
    rows, labels = pooled(given)
    model = hp.tables.fit(hp.tables.read(given, label="y"), hp.networks.RandomDirected(3), l2=L2)
    assert model.status.converged
    scaler = StandardScaler().fit(rows)
    if classes == 2:
        oracle = LogisticRegression(C=1 / (len(rows) * L2), tol=1e-12, max_iter=10_000)
        expected = oracle.fit(scaler.transform(rows), labels).predict_proba(scaler.transform(rows))
        np.testing.assert_allclose(model.predict_proba(rows), expected, atol=1e-6)
        assert model.score(rows, labels) == oracle.score(scaler.transform(rows), labels)
    else:  # scikit-learn has no reference class, so check that the gradient is zero
        inputs = np.asarray(scaler.transform(rows))
        rest = model.predict_proba(rows) - np.eye(3)[labels]
        gradient = rest.T @ inputs / len(rows)
        np.testing.assert_allclose(gradient[:2] + L2 * model.params[:, :-1], 0, atol=1e-6)
        np.testing.assert_allclose(rest.mean(0), 0, atol=1e-6)


def test_numbers_equal_ridge_regression_on_the_pooled_table():
    given = parties(0)
    rows, labels = pooled(given)
    model = hp.tables.fit(hp.tables.read(given, label="y"), l2=L2)
    scaled = StandardScaler().fit_transform(rows)
    oracle = Ridge(alpha=len(rows) * L2 / 2, tol=1e-12).fit(scaled, labels)
    np.testing.assert_allclose(model.predict(rows), oracle.predict(scaled), rtol=1e-8)
    assert model.score(rows, labels) == pytest.approx(oracle.score(scaled, labels), rel=1e-8)


def test_missing_values_count_at_the_shared_mean_and_constant_columns_are_left_out():
    given = {"a": (np.array([[1.0, 7], [3, 7], [np.nan, 7]]), [0, 1, 1]), "b": (np.array([[8.0, 7]]), [0])}
    model = hp.tables.fit(hp.tables.read(given, label="y"), l2=L2)
    assert model.scaling.kept.tolist() == [True, True, False]  # columns: x0, x0 is missing, x1
    assert model.scaling.mean[0] == pytest.approx(4)
    assert model.scaling.deviation[0] == pytest.approx(np.std([1, 3, 4, 8]))
    rows = np.array([[np.nan, 7.0], [4.0, 7.0]])
    first, second = model.predict_proba(rows)
    assert not np.allclose(first, second)  # a missing value has a separate weight


@pytest.mark.long
def test_l2_is_the_best_of_five_on_a_quarter_of_the_records():
    given = parties(2, seed=1)
    tables = hp.tables.read(given, label="y")
    model = hp.tables.fit(tables)
    train, held = (
        [np.concatenate(parts) for parts in zip(*own, strict=True)]
        for own in zip(
            *(
                [(rows[each[name]], labels[each[name]]) for name in ("train", "validation")]
                for (rows, labels), each in zip(given.values(), split_rows(tables, (0.75, 0.25, 0), 0), strict=True)
            ),
            strict=True,
        )
    )
    scaler, losses = StandardScaler().fit(train[0]), {}
    for rate in (1e-4, 1e-3, 1e-2, 0.1, 1.0):
        oracle = LogisticRegression(C=1 / (len(train[1]) * rate), tol=1e-10, max_iter=10_000)
        oracle.fit(scaler.transform(train[0]), train[1])
        losses[rate] = log_loss(held[1], oracle.predict_proba(scaler.transform(held[0])))
    assert model.l2 == min(losses, key=lambda rate: losses[rate])


def test_the_task_is_scaled_and_keeps_its_scaling():
    given = parties(2)
    tables = hp.tables.read(given, label="y")
    task = tables.task(hp.networks.Ring(3), key=4)
    counts = np.asarray(task.train.counts)
    assert counts.tolist() == [18, 30, 25]
    inputs, _, weight = (np.asarray(each) for each in task.train.examples)
    rows = np.concatenate([own[:count] for own, count in zip(inputs, counts, strict=True)])
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(rows.std(0), 1, atol=1e-5)
    np.testing.assert_allclose(weight[:, 0], counts / counts.mean(), rtol=1e-6)
    assert task.at(params=task.params).scaling is task.scaling
    assert task.names == ("p0", "p1", "p2")
    parties_alike = tables.task(hp.networks.Ring(3), key=4, weights="parties").train.examples[2]
    np.testing.assert_array_equal(np.asarray(parties_alike)[:, 0], 1)


def test_columns_that_are_constant_in_the_training_rows_alone_are_named():
    given = parties(2)
    held = split_rows(hp.tables.read(given, label="y"), (0.6, 0.2, 0.2), 4)[0]["test"][0]
    for name, (rows, labels) in given.items():
        given[name] = np.c_[rows, np.zeros(len(rows)), np.ones(len(rows))], labels
    given["p0"][0][held, 4] = 1.0
    tables = hp.tables.read(given, label="y")
    assert tables.warnings[0] == "Constant and therefore left out: x5."
    with pytest.warns(UserWarning, match=r"^Constant in the training rows and therefore left out: x4\.$"):
        task = tables.task(hp.networks.Ring(3), key=4)
    assert task.params.shape == (3, 1, 5)


def test_panels_show_the_coefficients_by_feature():
    with jax.enable_x64(True):
        model = hp.tables.fit(hp.tables.read(parties(2), label="y"), l2=L2)
    shown = model.panels()[-1].numbers
    assert shown["labels"] == ["x0", "x1", "x2", "x3", "intercept"]
    np.testing.assert_array_equal(shown["series"][""], model.params[0])


def test_splits_have_equal_shares_of_each_class():
    labels = np.repeat([0, 1], [80, 20])
    dealt = deal(labels, (0.6, 0.2, 0.2), np.random.default_rng(0))
    assert np.bincount(dealt[labels == 1]).tolist() == [12, 4, 4]
    assert np.bincount(deal(np.zeros(3), (0.6, 0.2, 0.2), np.random.default_rng(0))).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"x0": [1.0]}, "column 'x1': got 'missing'"),
        (np.ones((2, 3)), "a matrix with 4 columns"),
        ({"x0": [1], "x1": [1], "x2": [1], "x3": ["a"]}, "rows, row 0, column 'x3': got 'a'"),
    ],
)
def test_predict_refuses_rows_with_other_columns(rows, says):
    with jax.enable_x64(True):
        model = hp.tables.fit(hp.tables.read(parties(2), label="y"), l2=L2)
    with pytest.raises(hp.InvalidInput) as error:
        model.predict(rows)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"split": (0.5, 0.5)}, "split"),
        ({"split": (0.9, 0.0, 0.1)}, "split"),
        ({"l2": 0}, "l2"),
        ({"head": "regression"}, "head: got 'regression'; allowed: 'softmax' for classes"),
        ({"weights": "rows"}, "weights"),
        ({"network": hp.networks.Ring(4)}, "network: got '4 clients'; allowed: 3, one per party"),
    ],
)
def test_task_refuses(change, says):
    tables = hp.tables.read(parties(2), label="y")
    given = {"network": hp.networks.Ring(3), "key": 0} | change
    with pytest.raises(hp.InvalidInput) as error:
        tables.task(given.pop("network"), **given)
    assert says in str(error.value)


def test_a_party_with_too_few_records_is_named():
    tables = hp.tables.read({"a": (np.ones((2, 1)), [0, 1]), "b": (np.zeros((9, 1)), [0] * 9)}, label="y")
    with pytest.raises(hp.InvalidInput, match="party 'a': got '2 records'"):
        tables.task(hp.networks.Ring(2), key=0)


def test_missing_values_in_predictions_are_told_and_labels_are_asked_for():
    given = parties(2)
    model = hp.tables.fit(hp.tables.read(given, label="y"), l2=L2)
    rows = given["p0"][0].copy()
    rows[:2, 1] = np.nan
    with pytest.warns(UserWarning, match="training had none in these columns: x1 in 2 rows"):
        model.predict(rows)
    with pytest.raises(hp.InvalidInput, match="labels: got None; allowed: one label per row, or a column 'y'"):
        model.score(given["p0"][0])
