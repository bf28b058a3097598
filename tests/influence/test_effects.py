"""Effects of whole parties on the others, by party, compared with least squares and logistic regression in NumPy."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from repeats import some
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush import influence
from hyperpush.base.errors import InvalidInput

NAMES, SIZE, L2 = ("north", "east", "south", "west"), 3, 0.1
CLIENTS, NETWORK = len(NAMES), hp.networks.RandomDirected(len(NAMES))
pytestmark = pytest.mark.usefixtures("float64")


def squares(params, hyper, examples):
    return 0.5 * (examples[0] @ params - examples[1]) ** 2


def draw(counts, seed):
    random = np.random.default_rng(seed)
    shifts = random.normal(size=CLIENTS)
    return [
        (random.normal(size=(m, SIZE)), random.normal(size=m) + shift) for m, shift in zip(counts, shifts, strict=True)
    ]


TRAIN, VALIDATION = draw((5, 8, 6, 9), 0), draw((4, 4, 4, 4), 1)


class Exact:
    """Ridge regression on weighted parties, solved exactly."""

    def __init__(self, clients, records=None):
        hessian, right = np.zeros((SIZE, SIZE)), np.zeros(SIZE)
        for party, (c, (a, b)) in enumerate(zip(clients, TRAIN, strict=True)):
            w = np.ones(len(b)) if records is None else records[party]
            hessian += c * ((a.T * w) @ a / len(b) + L2 * np.eye(SIZE))
            right += c * a.T @ (w * b) / len(b)
        self.x = np.linalg.solve(hessian, right)
        self.losses = np.array([0.5 * np.mean((a @ self.x - b) ** 2) for a, b in VALIDATION])


EVERYBODY = np.ones(CLIENTS)
BY_SITE = np.stack([Exact(EVERYBODY - row).losses - Exact(EVERYBODY).losses for row in np.eye(CLIENTS)])
OTHERS = np.sum(BY_SITE * (1 - np.eye(CLIENTS)), axis=1)


@pytest.fixture
def solved():
    data = {"train": TRAIN, "validation": VALIDATION, "names": NAMES}
    task = hp.Task(inner=squares, outer=squares, params=jnp.zeros(SIZE), hypers=0.0, **data).with_l2(L2)
    return task.at(params=np.tile(Exact(EVERYBODY).x, (CLIENTS, 1)))


WAYS: tuple[Literal["first order", "newton", "retrain"], ...] = ("first order", "newton", "retrain")


@pytest.mark.parametrize("how", WAYS[1:])
def test_effects_on_the_others_are_those_of_retraining(how, solved):
    """For least squares a Newton step is exact, so it must equal retraining."""
    found = influence.scores(solved, hp.Automatic(), NETWORK, key=0, parties=how)
    assert found.parties is not None
    np.testing.assert_allclose(found.by_site, BY_SITE, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.clients, OTHERS, rtol=1e-4, atol=1e-6)
    parties = found.parties
    np.testing.assert_allclose(parties.baseline, Exact(EVERYBODY).losses, rtol=1e-8)
    np.testing.assert_allclose(parties.total, BY_SITE.sum(1), rtol=1e-4, atol=1e-6)
    for party in range(CLIENTS):
        x = Exact(EVERYBODY - np.eye(CLIENTS)[party]).x
        np.testing.assert_allclose(parties.params[party], np.tile(x, (CLIENTS, 1)), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(parties.task_of(party).params, parties.params[party])
    assert found.warnings == []
    assert parties.status.converged
    assert found.costs.rounds == found.estimate.costs.rounds + parties.costs.rounds


@pytest.mark.long
def test_effects_to_first_order_are_derivatives_by_weights(solved):
    found = influence.scores(solved, hp.Automatic(tolerance=1e-9), NETWORK, key=0, parties="first order")
    step = 1e-5
    for party, row in enumerate(np.eye(CLIENTS)):
        less, more = (Exact(EVERYBODY + sign * step * row).losses for sign in (-1, 1))
        np.testing.assert_allclose(found.by_site[party], (less - more) / (2 * step), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.totals, found.by_site.sum(1), rtol=1e-7)
    (sentence,) = found.warnings
    assert "north, east, south and 1 more hold more than a tenth" in sentence
    assert found.parties is not None
    assert found.parties.params is None


def test_a_sign_is_printed_in_words(solved):
    found = influence.scores(solved, hp.hypergradients.Dense(), NETWORK, key=0)  # the default takes a Newton step
    strongest = int(np.argmax(np.abs(OTHERS)))
    said = ("rises", "helps") if OTHERS[strongest] > 0 else ("falls", "hurts")
    name = NAMES[strongest]
    line = f"without {name} the others' loss {said[0]} by {abs(OTHERS[strongest]):.2g} ({name} {said[1]})"
    assert line in repr(found)
    assert found.parties is not None
    assert line == found.parties.sentence(strongest)
    bars, heat = found.parties.own_panels()
    assert bars.numbers["marks"][strongest] == said[1]
    np.testing.assert_array_equal(heat.numbers["values"], found.by_site)


@pytest.mark.parametrize("at_once", some({"two": 2, "one": 1, "all": 64}, ["two"]))
@pytest.mark.long
def test_groups_are_found_in_parts(at_once, solved):
    places, (one, two) = [("east", 2), ("west", 0)], (0, 3)
    groups = [
        influence.without(solved, places), influence.without(solved, clients=[one, two]), influence.without(solved),
    ]  # fmt: skip
    kept = [np.ones(len(b)) for _, b in TRAIN]
    kept[1][2] = kept[3][0] = 0
    losses = [Exact(EVERYBODY, kept).losses, Exact([0, 1, 1, 0]).losses, Exact(EVERYBODY).losses]
    newton = influence.group_score(solved, hp.hypergradients.Dense(), NETWORK, groups, key=0, at_once=at_once)
    trained = influence.retrain(solved, hp.TreeNewton(), NETWORK, groups, key=0, at_once=at_once)
    for found in (newton, trained):
        assert len(found) == 3
        np.testing.assert_allclose(found.losses, losses, rtol=1e-7)
        np.testing.assert_allclose(found.others[1], found.by_site[1][1:3].sum())
        assert found.leaves.tolist()[:2] == [[False] * 4, [True, False, False, True]]
    assert [status.converged for status in trained.statuses] == [True] * 3
    np.testing.assert_allclose(trained.baseline_params, np.tile(Exact(EVERYBODY).x, (CLIENTS, 1)), rtol=1e-8)


def test_params_that_are_no_optimum_are_told(solved):
    """The result contains the same sentences in `warnings` as in its printed status."""
    off = solved.at(params=solved.params * (1 + 0.2 * np.arange(CLIENTS)[:, None]))
    found = influence.scores(off, hp.Automatic(), NETWORK, key=0)
    said, optimum = found.warnings
    assert said == str(found.status).removeprefix("! ")
    assert said.startswith("not converged (unsolved")
    assert optimum.startswith("The params are not an optimum: a Newton step moves them by")
    assert found.parties is not None
    assert found.parties.status.reason == "unsolved"
    alone = influence.group_score(off, hp.Automatic(), NETWORK, influence.without(off, [(0, 1)]), key=0)
    assert alone.status.reason == "unsolved"
    assert alone.warnings[1].startswith("The params are not an optimum")


@pytest.mark.long
def test_a_newton_step_is_close_for_logistic_regression():
    """Compare the effects of four different parties, each with a quarter of the weight, with retraining."""
    random = np.random.default_rng(3)
    inputs = random.normal(size=(CLIENTS, 40, SIZE))
    labels = (inputs @ random.normal(size=SIZE) + random.normal(size=(CLIENTS, 40)) > 0).astype(float)
    labels[1, ::3] = 1 - labels[1, ::3]  # every third label of this party is wrong

    def loss(params, hyper, examples):
        return jax.nn.softplus((1 - 2 * examples[1]) * (examples[0] @ params))

    cut = slice(0, 25), slice(25, 40)
    train, validation = ((inputs[:, each], labels[:, each]) for each in cut)
    task = hp.Task(
        inner=loss, outer=loss, params=jnp.zeros(SIZE), hypers=0.0, train=train, validation=validation
    ).with_l2(0.01)
    trained = hp.train(task, hp.TreeNewton(), NETWORK, key=0).task
    ways = {
        how: influence.scores(trained, hp.hypergradients.Dense(), NETWORK, key=0, parties=how).clients for how in WAYS
    }
    first, newton = (influence.agreement(ways[how], ways["retrain"])["r2"] for how in ("first order", "newton"))
    assert first is not None
    assert newton is not None
    assert newton > 0.97 > 0.95 > first


def test_what_cannot_be_asked_is_refused(solved):
    with pytest.raises(InvalidInput, match="parties: got 'second order'"):
        influence.scores(solved, hp.Automatic(), NETWORK, key=0, parties="second order")  # pyright: ignore
    trains = hp.hypergradients.ITDBackward(hp.SGP(2, 0.1))
    with pytest.raises(InvalidInput, match="'newton' with ITDBackward"):
        influence.scores(solved, trains, NETWORK, key=0, parties="newton")
    found = influence.scores(solved, hp.hypergradients.Dense(), NETWORK, key=0, parties=None)
    assert found.parties is None
    with pytest.raises(InvalidInput, match="parties='newton'"):
        _ = found.clients
