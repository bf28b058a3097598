"""The quickstart study: the parties' data, training on a part of them, and the text of its conclusions."""

from collections import Counter
from statistics import stdev

import jax
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.spec.execute import execute
from hyperpush.verbs import saved
from hyperpush_papers.common.data.sources import load
from hyperpush_papers.quickstart import report
from hyperpush_papers.quickstart.config import EXPERIMENT, Quickstart
from hyperpush_papers.quickstart.controls import STEP_SIZE, Trainer
from hyperpush_papers.quickstart.parties import EDGE, make_parties, make_task
from hyperpush_papers.quickstart.study import Story

SMALL = Quickstart(
    parties=4, shifted=1, marked=1, records=6, trusted=2, steps=5, outer_steps=1, terms=2, removals=2, seeds=2
)


# ------------------------------------------------------------------------ data


def inside(images):
    """Return the pixels that a mark never changes, as dictionary keys."""
    return [row.tobytes() for row in np.delete(images.reshape(-1, 64), EDGE, axis=1)]


def test_every_party_has_what_its_kind_says_and_no_image_twice():
    config = Quickstart(amplitude=2.5)
    made, digits = make_parties(config, seed=3), load("digits")
    labels = dict(zip(inside(digits.inputs), digits.labels, strict=True))
    assert np.bincount(made.kind).tolist() == [4, 3, 13]
    dealt = Counter(key for images, _ in (made.records, made.trusted, made.test) for key in inside(images))
    assert dealt == Counter(inside(digits.inputs))  # every image is used exactly as often as it occurs in the data
    for images, given in (made.trusted, made.test):
        assert [labels[key] for key in inside(images)] == given.ravel().tolist()
    for kind, images, given in zip(made.kind, *made.records, strict=True):
        right = np.array([labels[key] for key in inside(images)])
        assert np.array_equal(given, (right + (kind == 1)) % 10)
    marks = made.records[0][..., EDGE] == 2.5
    assert np.all(marks.sum(-1) == 1)
    tells = np.take_along_axis(marks, made.records[1][..., None], axis=-1)[..., 0]
    assert np.all(tells[made.kind == 2])
    # the mark fits the label by chance in one of ten images, of 175
    assert 0.02 < np.mean(tells[made.kind != 2]) < 0.25
    assert 0.05 < np.mean((made.test[0][:, EDGE] == 2.5)[np.arange(len(made.test[1])), made.test[1]]) < 0.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parties": 4, "shifted": 2, "marked": 2}, "shifted + marked: got 4; allowed: fewer than parties = 4"),
        ({"records": 90}, "records + trusted: got 92; allowed: at most 88 for 20 parties"),
    ],
)
def test_what_digits_cannot_give_is_refused_in_one_line(options, message):
    with pytest.raises(InvalidInput) as refused:
        make_parties(Quickstart(**options), seed=0)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------ training, against NumPy


def train_by_hand(params, records, weights, steps, rate=0.01):
    """Run gradient descent in float64 on a two-layer network's weighted sum of cross-entropies plus ½·rate·‖x‖²."""
    (first, second), (inputs, labels) = (params["dense1"], params["dense2"]), records
    a, b, c, d = (np.asarray(layer[name], np.float64) for layer in (first, second) for name in ("weight", "bias"))
    for _ in range(steps):
        hidden = np.tanh(inputs @ a + b)
        scores = hidden @ c + d
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        chances[np.arange(len(labels)), labels] -= 1
        error = chances * weights[:, None]
        back = (error @ c.T) * (1 - hidden**2)
        slopes = (inputs.T @ back, back.sum(0), hidden.T @ error, error.sum(0))
        a, b, c, d = (x - STEP_SIZE * (slope + rate * x) for x, slope in zip((a, b, c, d), slopes, strict=True))
    return a, b, c, d


def cost_by_hand(model, records):
    a, b, c, d = model
    scores = np.tanh(records[0] @ a + b) @ c + d
    own = scores[np.arange(len(scores)), records[1]]
    return np.mean(np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1)) + scores.max(1) - own)


def flat(records):
    return records[0].reshape(-1, 64), records[1].ravel()


@pytest.mark.long
def test_models_of_kept_and_trusted_records_are_as_trained_by_hand():
    made = make_parties(SMALL, seed=5)
    trainer = Trainer(made, hp.networks.FullyConnected(4), steps=5, seed=5)
    some = np.random.default_rng(0).random((4, 6)) < 0.5
    start = jax.tree.map(lambda leaf: leaf[0], make_task(made, 5).params)
    pairs = zip(flat(made.records), flat(made.trusted), strict=True)
    everything = tuple(np.concatenate(pair) for pair in pairs)
    for kept, model in zip((some, some[:, :1]), trainer.train([some, some[:, :1]]), strict=True):
        counts = np.concatenate([np.broadcast_to(kept, (4, 6)).ravel(), np.ones(8)])
        expected = train_by_hand(start, everything, counts / counts.sum(), 5)
        layers = (model["dense1"], model["dense2"])
        found = [layer[name] for layer in layers for name in ("weight", "bias")]
        for ours, by_hand in zip(found, expected, strict=True):
            assert np.allclose(ours, by_hand, atol=2e-5)


@pytest.mark.long
def test_real_changes_are_those_of_retraining_by_hand_without_a_party_or_a_record():
    story = Story(SMALL, 5, hp.networks.FullyConnected(4))
    told, changes = story.check(story.predict(hp.HGP(2, 1, 0.3)))
    start = jax.tree.map(lambda leaf: leaf[0], story.task.params)

    def cost(weights, rate=0.01):
        model = train_by_hand(start, flat(story.parties.records), weights.ravel() / 24, 5, rate)
        return 4 * cost_by_hand(model, flat(story.parties.trusted))

    full = cost(np.ones(24))
    assert told["cost"] == pytest.approx(full, rel=1e-5)
    for place, change in zip(np.random.default_rng(5).permutation(24)[:2], told["records"]["real"], strict=True):
        assert change == pytest.approx(cost(np.arange(24) != place) - full, abs=2e-5)
    for party, change in enumerate(changes):  # removing a party also removes its penalty
        assert change == pytest.approx(cost(np.arange(24) // 6 != party, 0.0075) - full, abs=2e-5)


# ------------------------------------------------------------------------ what it says


def rows_of(accuracies):
    """Return rows of a result for several seeds, by method."""
    groups = {report.WON: "hypergradient", report.HARMLESS: "bound"}
    common = {"kept": 0.5, "trainings": 2, "floats_per_client": 10, "status": "fixed length"}
    return [
        {"method": method, "group": groups.get(method, "control"), "seed": seed, "accuracy": accuracy, **common}
        for method, own in accuracies.items()
        for seed, accuracy in enumerate(own)
    ]


REMOVED = {"r2": 0.5, "signs": 0.75}


def test_the_sentence_names_the_controls_that_were_not_beaten():
    clear = {report.AS_IS: [0.6, 0.62, 0.58], report.WON: [0.84, 0.86, 0.85], report.HARMLESS: [0.9, 0.91, 0.89]}
    near = {"near": [0.8, 0.87, 0.84]}  # accuracy is behind by 0.04, −0.01 and 0.01
    compared = report.compare(rows_of(clear | near))
    (found,) = (row for row in compared if row["method"] == "near")
    assert found["ahead"] == pytest.approx(0.04 / 3)
    assert found["standard_error"] == pytest.approx(stdev([0.04, -0.01, 0.01]) / 3**0.5)
    said = report.sentence(compared, [{"parties": REMOVED, "records": REMOVED}] * 3)
    for part in (
        "from 60.0 to 85.0 %",
        "90.0 %, 83 % of the way",
        "ahead of 1 of 2",
        "not of 'near' (83.7 %)",
        "75 and 75 %",
    ):
        assert part in said
    lost = report.compare(rows_of({report.AS_IS: [0.7], report.WON: [0.5], report.HARMLESS: [0.9]}))
    bad = {"r2": -1e20, "signs": 0.5}
    said = report.sentence(lost, [{"parties": bad, "records": bad}], measured=False)
    assert "R² below 0 and below 0" in said
    assert "of the way" not in said
    assert "over ten" not in said
    one = report.compare([row for row in rows_of(clear | near) if row["seed"] == 0])
    assert "ahead of all 2 controls." in report.sentence(one, [{"parties": REMOVED, "records": REMOVED}])


@pytest.mark.long
def test_a_small_run_has_every_row_and_its_costs(tmp_path):
    result, run = execute(EXPERIMENT, SMALL, tmp_path / "run")
    own = {row["method"]: row for row in result["rows"] if row["seed"] == 1}
    assert len(result["rows"]) == 2 * len(own) == 2 * 16
    assert {report.AS_IS, report.TRUSTED, report.ALONE, report.LEAVE_ONE_OUT, report.WON, *report.FILTERS} <= set(own)
    one = 5 * (64 * 32 + 32 + 32 * 10 + 10 + 1)  # messages contain all params and a mass
    trainings = {report.AS_IS: 1, report.TUNED: 2, report.FILTERS[0]: 4, report.FILTERS[2]: 2, report.LEAVE_ONE_OUT: 6}
    for method, count in trainings.items():
        assert (own[method]["trainings"], own[method]["floats_per_client"]) == (count, count * one)
    assert own[report.ALONE]["floats_per_client"] == 0
    series = 2 * 5 * one / 5  # two terms of five pushes
    assert own[report.WON]["floats_per_client"] == 3 * one + series
    assert own[report.HARMLESS]["kept"] == 0.5
    assert own[report.RIGHT]["kept"] == 1 - SMALL.shifted / SMALL.parties
    assert [len(each["records"]["real"]) for each in result["removals"]] == [2, 2]
    assert [path.name for path in run.figures] == ["first-run.png"]
    assert saved.load(tmp_path / "run").result["sentence"] == result["sentence"]
