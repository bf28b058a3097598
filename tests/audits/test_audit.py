"""The audit compared with scikit-learn on pooled tables, and the inputs that it refuses."""

import json
from dataclasses import astuple
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

import hyperpush as hp
from hyperpush.audits.leaving import judge_leavers
from hyperpush.audits.rounds import AuditRounds
from hyperpush.audits.splits import split_records
from hyperpush.audits.watch import AuditWatch
from hyperpush.engines.compiled.compile import counting
from hyperpush.tables.heads import LinearHead
from hyperpush.tables.task import generator_of

L2, FOLDS, NAMES = 0.03, 3, ("a", "b", "c", "d")
COUNTS = (45, 60, 52, 38)


def given(kind="classes", flip=(), seed=0, counts=COUNTS):
    """Return four parties with one rule for labels, except those that flip them; a column has missing values."""
    draw, found = np.random.default_rng(seed), {}
    for place, count in enumerate(counts):
        rows = draw.normal(size=(count, 3)) + 0.3 * place
        score = rows @ [1.5, -1.0, 0.5] + 0.7 * draw.normal(size=count)
        labels = score if kind == "numbers" else (score > 0) != (place in flip)
        rows[draw.random(count) < 0.1, 2] = np.nan
        found[NAMES[place]] = (rows, labels)
    return hp.tables.read(found, label="y")


class Oracle:
    """The same audit by scikit-learn on pooled rows with the same folds."""

    def __init__(self, tables, key=0, folds=FOLDS, l2=L2):
        self.tables, self.l2, self.folds = tables, l2, folds
        own = split_records(tables, folds, generator_of(key))
        self.fold = [np.asarray(each)[:count] for each, count in zip(own.fold, tables.counts, strict=True)]

    def losses(self, members, scaled_by):
        """Return every party's held-out losses under models trained on the members' records."""
        found = [np.zeros(count) for count in self.tables.counts]
        for fold in range(self.folds):
            train = {p: self.fold[p] != fold for p in range(len(found))}
            mean, scaler = self._scaler([self.tables.inputs[p][train[p]] for p in scaled_by])
            rows = np.concatenate([scaler(mean, self.tables.inputs[p][train[p]]) for p in members])
            labels = np.concatenate([self.tables.labels[p][train[p]] for p in members])
            loss = self._fit(rows, labels)
            for p in train:
                held = ~train[p]
                found[p][held] = loss(scaler(mean, self.tables.inputs[p][held]), self.tables.labels[p][held])
        return found

    def _scaler(self, parts):
        rows = np.concatenate(parts)
        mean = np.nanmean(rows, axis=0)
        scaler = StandardScaler().fit(np.where(np.isnan(rows), mean, rows))
        return mean, lambda mean, own: scaler.transform(np.where(np.isnan(own), mean, own))

    def _fit(self, rows, labels):
        if self.tables.schema.kind == "numbers":
            model = Ridge(alpha=len(rows) * self.l2 / 2).fit(rows, labels)
            return lambda x, y: (model.predict(x) - y) ** 2
        model = LogisticRegression(C=1 / (len(rows) * self.l2), tol=1e-12, max_iter=10_000).fit(rows, labels)
        return lambda x, y: -model.predict_log_proba(x)[np.arange(len(y)), y]


def leavers(oracle):
    """Return losses with all parties, and losses without each of them as [leaver][party], as arrays over records."""
    everybody = range(len(NAMES))
    together = oracle.losses(everybody, everybody)
    without = [oracle.losses([p for p in everybody if p != leaver], everybody) for leaver in everybody]
    return together, without


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.long
def test_losses_and_tests_equal_scikit_learn_and_scipy_on_pooled_rows(kind):
    tables = given(kind)
    found = hp.audit(tables, hp.networks.RandomDirected(4), folds=FOLDS, l2=L2)
    oracle = Oracle(tables)
    together, without = leavers(oracle)
    assert found.status.converged
    ps = []
    for p, row in enumerate(found.join):
        alone = oracle.losses([p], [p])[p]
        expected = [each.mean() for each in (alone, together[p], without[p][p])]
        np.testing.assert_allclose([row.alone, row.together, row.not_contributing], expected, rtol=1e-5)
        np.testing.assert_allclose(row.gain, (alone - together[p]).mean(), atol=1e-6)
        ps.append(tuple(stats.ttest_1samp(alone - together[p], 0))[1])
    corrected = stats.false_discovery_control(ps, method="by")
    np.testing.assert_allclose([row.p for row in found.join], corrected, rtol=1e-3)
    for leaver, row in enumerate(found.without):
        gains = np.concatenate([without[leaver][p] - together[p] for p in range(4) if p != leaver])
        np.testing.assert_allclose(row.gain, gains.mean(), atol=1e-6)
        assert row.records == len(gains)
    cells = {(cell.leaver, cell.party): cell.gain for cell in found.cells}
    assert len(cells) == 12
    for leaver, mine in enumerate(NAMES):
        for p, other in enumerate(NAMES):
            if p != leaver:
                np.testing.assert_allclose(cells[mine, other], (without[leaver][p] - together[p]).mean(), atol=1e-6)


@pytest.mark.long
def test_one_newton_step_is_exact_where_the_loss_is_quadratic():
    tables = given("numbers")
    exact, step = (hp.audit(tables, folds=FOLDS, l2=L2, effects=effects) for effects in ("retrain", "newton"))
    for mine, theirs in zip(exact.cells, step.cells, strict=True):
        np.testing.assert_allclose(mine.gain, theirs.gain, atol=1e-8)
    assert step.about["effects"] == "newton"
    assert "one Newton step from the shared model; so are those for what" in str(step.panels())


def test_one_newton_step_is_close_for_classes():
    tables = given()
    exact, step = (hp.audit(tables, folds=FOLDS, l2=L2, effects=effects) for effects in ("retrain", "newton"))
    gains = [[cell.gain for cell in found.cells] for found in (exact, step)]
    assert np.corrcoef(gains[0], gains[1])[0, 1] > 0.99
    assert not np.allclose(gains[0], gains[1], atol=1e-6)


@pytest.mark.long
def test_inexact_newton_steps_are_close_with_many_params():
    draw, parties = np.random.default_rng(0), {}
    for name in "abc":
        rows = draw.normal(size=(80, 140))
        parties[name] = (rows, rows[:, 0] + draw.normal(size=80) > 0)
    tables = hp.tables.read(parties, label="y")
    exact, step = (hp.audit(tables, folds=2, l2=0.1, effects=effects) for effects in ("retrain", "auto"))
    assert step.about["newton_steps"] == 3
    assert step.about["effects"] == "newton"
    gains = [[cell.gain for cell in found.cells] for found in (exact, step)]
    np.testing.assert_allclose(gains[1], gains[0], atol=0.1 * float(np.std(gains[0])))


def test_another_key_and_fewer_parties_compile_nothing():
    tables = given(flip=[1])
    hp.audit(tables, folds=FOLDS, l2=L2)
    with counting() as counts:
        found = hp.audit(tables, key=1, folds=FOLDS, l2=L2)
    assert found.named
    assert counts.compilations == 0


def test_l2_is_chosen_by_inner_folds():
    draw = np.random.default_rng(5)
    noise = {n: (draw.normal(size=(40, 6)), draw.integers(2, size=40)) for n in "abc"}
    tuned, strong, weak = (hp.audit(hp.tables.read(noise, label="y"), folds=2, l2=rate) for rate in (None, 1.0, 1e-2))
    for mine, theirs, others in zip(tuned.join, strong.join, weak.join, strict=True):
        for name in ("alone", "together", "not_contributing"):  # labels are random, so the largest rate is best
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), atol=1e-7)
            assert abs(getattr(mine, name) - getattr(others, name)) > 1e-4
    # the test of leaving parties keeps its fixed rate
    for mine, theirs in zip(tuned.without, weak.without, strict=True):
        np.testing.assert_allclose(mine.gain, theirs.gain, atol=1e-7)


def test_a_flipped_party_is_named_and_then_nobody():
    found = hp.audit(given(flip=[1]), folds=FOLDS, l2=L2)
    assert [row.party for row in found.named] == ["b"]
    assert {row.party: row.verdict for row in found.without}["b"] == "hurts"
    assert hp.audit(given(), folds=FOLDS, l2=L2).named == ()


def test_after_naming_the_rest_is_audited_as_if_the_party_were_not_there():
    tables = given(flip=[1])
    with jax.enable_x64(True):
        own = split_records(tables, FOLDS, generator_of(0))
        head = LinearHead.of(tables.schema, len(tables.schema.features))
        key, network = jax.random.key(0), hp.networks.Ring(4)
        rounds = AuditRounds(
            head, own, (0, 1, 2, 3), network, key, hp.Simulate(), FOLDS, L2, newton=False, watch=AuditWatch(())
        )
        tests, records = judge_leavers(rounds, rounds.again(np.array([1.0, 0, 1, 1])), [0, 2, 3], 0.05)
    oracle, rest = Oracle(tables), [0, 2, 3]
    together = oracle.losses(rest, rest)
    for place, leaver in enumerate(rest):
        stay = [p for p in rest if p != leaver]
        without = oracle.losses(stay, rest)
        gains = np.concatenate([without[p] - together[p] for p in stay])
        np.testing.assert_allclose(tests.gain[place], gains.mean(), atol=1e-6)
        assert records[place] == len(gains)


@pytest.mark.parametrize("flip", [(), (1,)])
def test_record_effects_are_the_derivative_of_the_others_training_loss(flip):
    """Records of a named party are scored at the model that named it, which was trained with that party."""
    tables = given(flip=flip)
    found = hp.audit(tables, folds=FOLDS, l2=L2, records=True)
    owner = np.repeat(range(4), tables.counts)
    assert [row.party for row in found.named] == [NAMES[party] for party in flip]

    def others_loss(weights, party, kept):
        filled = np.concatenate(tables.inputs)[kept]
        rows = StandardScaler().fit_transform(np.where(np.isnan(filled), np.nanmean(filled, axis=0), filled))
        labels = np.concatenate(tables.labels)[kept]
        model = LogisticRegression(C=1 / (len(rows) * L2), tol=1e-14, max_iter=10_000, solver="newton-cholesky")
        model.fit(rows, labels, weights[kept])
        losses = -model.predict_log_proba(rows)[np.arange(len(rows)), labels]
        return losses[owner[kept] != party].sum()

    rounds = [[row for row in found.records if row.round == number] for number in range(1 + len(flip))]
    for number, scored in enumerate(rounds):
        kept = ~np.isin(owner, flip) if number == 0 else np.ones(len(owner), bool)
        for row in (scored[0], scored[-1]):
            party = NAMES.index(row.party)
            assert (party in flip) == (number == 1)
            place = int(np.nonzero(owner == party)[0][row.line])
            up, down = np.ones(len(owner)), np.ones(len(owner))
            up[place], down[place] = 1.01, 0.99
            slope = (others_loss(down, party, kept) - others_loss(up, party, kept)) / 0.02
            np.testing.assert_allclose(row.gain, slope, rtol=1e-3)
        assert scored[0].gain < scored[-1].gain
    assert found.records[0].gain < 0
    assert "would fall" in found.records[0].says


@pytest.mark.parametrize("engine", [hp.Threads(), pytest.param(hp.Shard(), marks=pytest.mark.long)])
def test_engines_agree(engine):
    check_agreement(given(flip=[1]), engine)


@pytest.mark.long  # stacks of matrices as large as a real table's, which XLA distributes over all its threads
def test_threads_agree_on_a_large_table():
    draw, columns = np.random.default_rng(1), 16
    weights, parties = draw.normal(size=columns), {}
    for name, count in zip("abcde", (290, 260, 200, 150, 100), strict=True):
        rows = draw.normal(size=(count, columns))
        parties[name] = (rows, rows @ weights + draw.normal(size=count) > 0)
    check_agreement(hp.tables.read(parties, label="y"), hp.Threads())


def check_agreement(tables, engine):
    """Check that both engines name the same parties and that all numbers agree."""
    one, other = (hp.audit(tables, folds=FOLDS, l2=L2, engine=each) for each in (hp.Simulate(), engine))
    assert [row.party for row in one.named] == [row.party for row in other.named]
    for rows in ("join", "without", "cells"):
        for mine, theirs in zip(getattr(one, rows), getattr(other, rows), strict=True):
            one_row, other_row = (
                [value for value in astuple(row) if isinstance(value, float)] for row in (mine, theirs)
            )
            np.testing.assert_allclose(one_row, other_row, atol=1e-6)


def test_small_parties_take_no_part_and_are_named():
    tables = given(counts=(45, 60, 52, 19))
    found = hp.audit(tables, folds=FOLDS, l2=L2)
    assert found.small == ("d",)
    assert [row.party for row in found.join] == ["a", "b", "c"]
    without_it = hp.tables.read({n: (given(counts=(45, 60, 52, 19)).inputs[k], tables.labels[k]) for k, n in
                                 enumerate("abc")}, label="y")  # fmt: skip
    assert without_it.counts == (45, 60, 52)
    assert any("Fewer than 20 records" in each for each in found.warnings)
    oracle = Oracle(tables)
    np.testing.assert_allclose(found.join[0].together, oracle.losses([0, 1, 2], [0, 1, 2])[0].mean(), rtol=1e-5)


def test_warnings_say_shares_and_constants():
    draw = np.random.default_rng(0)
    noise = {n: (draw.normal(size=(40, 6)), draw.random(40) < share) for n, share in (("a", 0.1), ("b", 1.0))}
    noise["a"][0][:, 5], noise["b"][0][:, 5] = np.arange(40) == 7, 0  # varies by one record: constant without its fold
    found = hp.audit(hp.tables.read(noise, label="y"), folds=FOLDS, l2=1e-4)
    said = " ".join(found.warnings)
    assert "Label shares differ: class 1 makes up" in said
    assert "A constant answer beats the model at a" in said
    assert "has few records" in said
    assert "Constant in the training records of a fold and therefore left out there: x5." in said
    assert found.named == ()  # with two parties, no party is named
    assert found.status.converged  # b has only one class, but still gets a local model


class Seen(hp.hooks.Hook):
    """Hook that collects its events."""

    def __init__(self):
        self.told, self.costs, self.ended = [], [], 0

    def advance(self, loop, done, total):
        self.told.append((loop, done, total))

    def row(self, loop, step, values):
        self.costs.append((int(values["rounds"]), int(values["bytes"])))

    def finish(self):
        self.ended += 1


def test_json_page_and_refusals(tmp_path):
    seen = Seen()
    found = hp.audit(given(), folds=FOLDS, l2=L2, hooks=[seen])
    assert seen.told == [("audit", 0, 1), ("audit", 0, 2), ("audit", 1, 2), ("audit", 2, 2)]
    assert seen.costs == [(found.costs.rounds, found.costs.bytes)] * 2
    assert seen.ended == 1
    assert "Models without a party are trained to the solution." in str(found.panels())
    read = json.loads(found.to_json(tmp_path / "audit.json").read_text())
    assert read["join"][0]["party"] == "a"
    assert read["about"]["l2"] == L2
    with pytest.raises(hp.InvalidInput, match="a new file"):
        found.to_json(tmp_path / "audit.json")
    page = found.page(tmp_path / "page.html").read_text()
    assert page.count("<svg") >= 4
    assert "<script" not in page
    kinds = [panel.kind for panel in found.panels()]
    assert kinds.count("bars") == 2
    assert {"heat", "shares", "network"} <= set(kinds)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tables": 5}, "tables: got 'int'"),
        ({"tables": hp.tables.read({n: (np.ones((20, 1)), np.arange(20) % 2) for n in "ab"}, label="y")}, "constant"),
        ({"folds": 1}, "folds"),
        ({"l2": 0}, "l2"),
        ({"level": 1.0}, "level"),
        ({"effects": "first"}, "effects"),
        ({"records": 1}, "records"),
        ({"network": hp.networks.Ring(3)}, "network: got '3 clients'; allowed: 4, one per party"),
        ({"engine": hp.Threads(faults=hp.Faults(loss=0.1))}, "engine"),
    ],
)
def test_refuses(change, says):
    options = {"tables": given(), "folds": FOLDS, "l2": L2} | change
    with pytest.raises(hp.InvalidInput) as error:
        hp.audit(options.pop("tables"), **options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_records_of_a_model_that_is_too_large_are_refused_before_any_training():
    seen, rows, labels = Seen(), np.random.default_rng(0).normal(size=(20, 1024)), np.arange(20) % 2
    with pytest.raises(hp.InvalidInput, match="records: got 'True with 1,025 params'"):
        hp.audit(hp.tables.read({"a": (rows, labels), "b": (rows, labels)}, label="y"), records=True, hooks=[seen])
    assert seen.told == []


def test_a_private_task_is_refused():
    task: Any = hp.tasks.logistic(3, seed=0).private(clip=1.0, noise=hp.privacy.Gaussian(1.0))
    with pytest.raises(hp.InvalidInput, match="a private task"):
        hp.audit(task)


def test_numbers_in_float64_leave_the_precision_of_the_process_alone():
    hp.audit(given(), folds=FOLDS, l2=L2)
    assert jax.numpy.ones(()).dtype == np.float32
