"""Early stopping on hypers 0, 1, 2, …, where NumPy knows every client's metric at every outer step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.algorithms.base import LOOP, BilevelState
from hyperpush.engines.result import Recorder
from hyperpush.programs import program_of

RING, STEPS, PATIENCE, PUSHES = hp.networks.DirectedRing(3), 20, 3, 3
EXAMPLES = [[2.0], [4.0, 6.0], [8.0, 9.0, 9.0, 10.0]]  # examples of each client
HELD = [np.array(own) for own in EXAMPLES]
UNIT = hp.optimizer("sgd", learning_rate=1.0)


def inner(x, hyper, batch):
    """Return an inner cost with the solution x = λ, which one step reaches."""
    return 0.5 * (x - hyper) ** 2 * jnp.ones_like(batch)


def outer(x, hyper, batch):
    """Return an outer cost with ∂F = −1, which moves λ by 1 in each outer step, with and without consensus."""
    return -hyper * jnp.ones_like(batch)


def distance(x, hyper, batch):
    return (x - batch) ** 2


def closeness(x, hyper, batch):
    return -distance(x, hyper, batch)


def task_of(common=False, **options):
    sets = {"train": np.zeros((3, 1)), "validation": np.ones((3, 1)), "holdout": HELD, "test": HELD} | options
    return hp.Task(inner=inner, outer=outer, params=0.0, hypers=0.0, common=common, **sets)


def method_of(stop, common=False):
    kind = hp.CDBO if common else hp.PDBO
    return kind(hp.LocalSGD(1, 1.0), hp.hypergradients.DirectGradient(), UNIT, STEPS, stop=stop)


def solve(stop, task=None, engine=None, **options):
    task, engine = task_of() if task is None else task, hp.Simulate() if engine is None else engine
    return hp.solve(task, method_of(stop, task.common), RING, key=0, engine=engine, **options)


def judged(weighted):
    """Return each client's metric by outer step, and the averages of it that clients get after PUSHES pushes."""
    half = (np.eye(3) + np.roll(np.eye(3), 1, axis=0)) / 2  # every client keeps one half and sends the other half
    counts = np.array([len(own) for own in EXAMPLES]) if weighted else np.ones(3)
    own = np.array([[np.mean((t - np.array(c)) ** 2) for c in EXAMPLES] for t in range(STEPS + 1)])
    pushed = np.linalg.matrix_power(half, PUSHES)
    return own, (own * counts) @ pushed.T / (pushed @ counts)


@pytest.mark.parametrize(
    ("engine", "stop", "common"),
    [
        (hp.Simulate(), hp.EarlyStopping(closeness, "holdout", PATIENCE, "max", PUSHES), False),
        (hp.Threads(), hp.EarlyStopping(distance, "holdout", PATIENCE, "min", PUSHES, True), True),
    ],
    ids=["simulate, max", "threads, min, weighted, consensus"],
)
def test_patience_ends_and_the_best_is_returned(engine, stop, common):
    own, means = judged(stop.weighted)
    sign = -1 if stop.mode == "max" else 1
    # With so few pushes, averages differ between clients; all clients take the largest.
    agreed = (sign * means).max(1)
    best = int(np.argmin(sign * agreed))
    assert np.argmin(judged(not stop.weighted)[1].max(1)) != best
    assert means[best].max() > 1.05 * means[best].min()
    task = task_of(common)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither level trains on the holdout examples
        found = solve(stop, task, engine, metrics={"own": ("holdout", stop.metric)})
    taken, history = best + PATIENCE, found.history
    assert found.best_step == best
    np.testing.assert_array_equal(found.hypers, np.full(3, best))
    np.testing.assert_array_equal(found.params, np.full(3, best))
    np.testing.assert_array_equal(history.steps, np.arange(taken + 1))
    np.testing.assert_allclose(history.metrics["own"], sign * own[: taken + 1], rtol=1e-5)
    assert history.hypergradient_norm is not None
    assert history.hypergradient_norm.shape == (taken + 1, 3)
    np.testing.assert_array_equal(history.hypers[:, 0], np.arange(taken + 1))
    # Each value of the metric takes three pushes of two numbers and two rounds of one number for the maximum. Each
    # outer step adds two rounds for a vote and, with consensus, one of three numbers.
    rounds, floats = 5 + 7 * np.arange(taken + 1), 8 + 10 * np.arange(taken + 1)
    if common:
        rounds, floats = rounds + np.arange(taken + 1), floats + 3 * np.arange(taken + 1)
    np.testing.assert_array_equal(history.rounds, rounds)
    np.testing.assert_array_equal(history.floats, floats)
    assert (found.costs.rounds, found.costs.floats) == (rounds[-1], floats[-1])
    # The agreed metric by which all clients decide.
    program = program_of(method_of(stop, common).bind(RING), task.problem)
    states = BilevelState(task.params, task.hypers, best_step=jnp.full(3, STEPS, jnp.int32))
    record = {LOOP: Recorder(lambda state, ctx: state.watch.mean, entry=True)}
    run = engine.run(program, RING, states, task.data, jax.random.key(0), record=record)
    expected = np.broadcast_to(agreed[: taken + 1, None], (taken + 1, 3))
    np.testing.assert_allclose(np.asarray(run.history[LOOP])[: taken + 1], expected, rtol=1e-5)


# ------------------------------------------------------- which examples may decide


def pull(x, hyper, batch):
    return (hyper - batch) ** 2


def overfitting():
    """Return a task whose λ_i approaches 10, the validation examples; the holdout examples are at 3, 4 and 5."""
    return hp.Task(
        inner=inner,
        outer=pull,
        params=0.0,
        hypers=0.0,
        train=np.zeros((3, 1)),
        validation=np.full((3, 2), 10.0),
        holdout=np.array([[3.0], [4.0], [5.0]]),
        test=np.array([[3.0], [4.0], [5.0]]),
    )


def fit(stop):
    falling = hp.optimizer("sgd", learning_rate=0.15)
    method = hp.PDBO(hp.LocalSGD(1, 1.0), hp.hypergradients.DirectGradient(), falling, STEPS, stop=stop)
    return hp.solve(overfitting(), method, RING, key=0, metrics={"unseen": ("holdout", pull)})


def test_examples_that_neither_level_fits_show_overfitting():
    plain = fit(None)
    assert plain.history.cost is not None
    assert np.all(np.diff(plain.history.cost, axis=0) < 0)  # the outer cost decreases throughout
    unseen = plain.history.metrics["unseen"].mean(1)
    best = int(unseen.argmin())
    assert 0 < best < STEPS - PATIENCE
    stopped = fit(hp.EarlyStopping("cost", on="holdout", patience=PATIENCE))
    assert stopped.best_step == best
    assert len(stopped.history) == best + PATIENCE + 1
    np.testing.assert_allclose(stopped.hypers, plain.history.hypers[best], rtol=1e-6)
    assert float(jnp.mean((stopped.hypers[:, None] - overfitting().data.sets["test"]) ** 2)) < unseen[-1]


def test_the_fitted_examples_do_not_show_it_and_are_warned_of():
    with pytest.warns(UserWarning, match=r"PDBO\.stop\.on: 'validation' is what the outer level fits") as said:
        found = fit(hp.EarlyStopping("cost", on="validation", patience=PATIENCE))
    assert len(said) == 1
    assert (found.best_step, len(found.history)) == (STEPS, STEPS + 1)


def test_nothing_is_chosen_on_the_test_examples():
    with pytest.raises(hp.InvalidInput, match=r"nothing may be chosen on the test examples") as refused:
        fit(hp.EarlyStopping("cost", on="test", patience=PATIENCE))
    assert (refused.value.field, refused.value.given) == ("PDBO.stop.on", "test")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hp.EarlyStopping(distance, "holdout", 0), ("EarlyStopping.patience", "0", "from 1")),
        (lambda: hp.EarlyStopping(distance, "holdout", 1, pushes=0), ("EarlyStopping.pushes", "0", "from 1")),
        (lambda: solve(hp.EarlyStopping(distance, "holdut", 1)), ("PDBO.stop.on", "holdut", "holdout")),
        (
            lambda: solve(hp.EarlyStopping(distance, "holdout", 1), task_of(holdout=np.zeros((4, 2)))),
            ("holdout", "4 clients", "3 clients"),
        ),
        (
            lambda: solve(hp.EarlyStopping(lambda x, hyper, batch: batch["missing"], "holdout", 1)),
            ("PDBO.stop.metric", "fails", "one client"),
        ),
        (
            lambda: solve(hp.EarlyStopping(lambda x, hyper, batch: batch[:, None], "holdout", 1)),
            ("PDBO.stop.metric", "one scalar"),
        ),
        (
            lambda: solve(hp.EarlyStopping(distance, "holdout", 1), engine=hp.Simulate(faults=hp.Faults(loss=0.1))),
            ("PDBO.stop", "lose messages", "reliable links"),
        ),
    ],
    ids=["patience", "pushes", "data set", "clients", "metric", "shape", "faults"],
)
def test_what_cannot_be_used_is_named(make, words):
    with pytest.raises(hp.InvalidInput) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
