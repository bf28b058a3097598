"""The verbs on quadratics: from training to a solution, numbers that need no compilation, and refused mistakes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import closed_form, mean_outer_cost, solution
from common_suite import compiled  # noqa: F401
from repeats import some

import hyperpush as hp
from hyperpush.tasks.quadratic import quadratic

CLIENTS = 3
NETWORK = hp.networks.FullyConnected(CLIENTS)
ENGINES = {"simulate": hp.Simulate(), "shard": hp.Shard(2), "threads": hp.Threads()}
NUMBERS = (0.01, 0.02, 0.03)
HGP = hp.HGP(steps=3, pushes=1, step_size=0.1)
SGP = hp.SGP(steps=4, step_size=0.1)


def metric(x, hyper, batch):
    return jnp.sum(x**2)


# ---------------------------------------------------------------- the way through


def test_from_training_to_a_solution():
    """With exact averages and enough steps, every verb reaches its closed form."""
    task = quadratic(CLIENTS, 7)
    first, second, hypers = jax.tree.map(np.asarray, (task.train, task.validation, task.hypers))
    step_size = float(1 / np.linalg.eigvalsh(first["hessian"].mean(0)).max())
    solver = hp.SGP(steps=300, step_size=step_size)
    trained: Any = hp.train(task, solver, NETWORK, key=0, every=100, metrics={"size": metric})
    x = solution(hypers, first)
    np.testing.assert_allclose(trained.params, np.broadcast_to(x, (CLIENTS, 4)), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(trained.history.steps, [0, 100, 200, 300])
    np.testing.assert_array_equal(trained.history.rounds, [0, 100, 200, 300])
    np.testing.assert_allclose(trained.history.metrics["size"][0], 0)
    np.testing.assert_allclose(trained.history.metrics["size"][-1], np.sum(x**2), rtol=1e-3)
    assert trained.history.cost[-1].mean() == pytest.approx(mean_outer_cost(hypers, first, second), rel=1e-3)

    estimator = hp.HGP(steps=300, pushes=1, step_size=step_size)
    estimate: Any = hp.hypergradient(trained.task, estimator, NETWORK, key=0)
    truth = closed_form(hypers, first, second)
    np.testing.assert_allclose(estimate.value, truth, rtol=1e-3, atol=1e-4)
    assert estimate.task.point.step == 600

    method = hp.PDBO(solver, estimator, hp.optimizer("sgd", learning_rate=0.5), steps=2)
    found: Any = hp.solve(task, method, NETWORK, key=0)
    for row in range(2):
        hypers = hypers - 0.5 * closed_form(hypers, first, second)
        np.testing.assert_allclose(found.history.hypers[row + 1], hypers, rtol=1e-3, atol=1e-3)
        expected = mean_outer_cost(hypers, first, second)
        assert found.history.cost[row + 1].mean() == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(found.hypers, hypers, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.history.hypergradient_norm[1], np.linalg.norm(truth, axis=1), rtol=1e-2)
    assert np.all(np.isnan(found.history.hypergradient_norm[0]))
    np.testing.assert_array_equal(found.history.rounds, [300, 900, 1500])
    assert found.best_step == 2
    assert found.costs.rounds == 1500


# ------------------------------------------------------------------------ numbers


def pdbo(number):
    outer = hp.optimizer("adam", learning_rate=number)
    return hp.PDBO(hp.SGP(4, number), hp.HGP(3, 1, number), outer, steps=2)


CALLS = {
    "train": lambda task, number, **more: hp.train(task, hp.SGP(4, number), NETWORK, every=2, **more),
    "TrackedHGP": lambda task, number, **more: hp.hypergradient(
        task, hp.TrackedHGP(5, number, pushes=1, tolerance=number, acceleration=1), NETWORK, **more
    ),
    "PDBO": lambda task, number, **more: hp.solve(task, pdbo(number), NETWORK, **more),
}


@pytest.mark.parametrize("engine", some(ENGINES, ["shard", "threads"]))
@pytest.mark.parametrize("call", some(CALLS, ["PDBO"]))
@pytest.mark.long
def test_a_new_number_compiles_nothing(call, engine, compiled):  # noqa: F811
    """Change numbers of the method and the task's L2 rate, which also affects the recorded cost.

    The common suite tests all methods on `Simulate`.
    """
    task = quadratic(CLIENTS, 0)
    call(task.with_l2(0.1), 0.1, key=0, engine=engine)
    before, found = compiled[0], []
    for number in NUMBERS:
        result = call(task.with_l2(2 * number), number, key=1, engine=engine)
        found.append(np.asarray(result.value if isinstance(result, hp.Estimate) else result.params))
    assert compiled[0] == before
    assert len({each.tobytes() for each in found}) == len(NUMBERS)


@pytest.mark.parametrize("verb", ["train", "solve"])
@pytest.mark.long
def test_a_number_of_a_recorded_cost_is_the_new_one(verb):
    """Nothing is compiled anew, but the recorded cost is that of the current task."""
    task = quadratic(CLIENTS, 0)
    costs = []
    for rate in (0.0, 1.0, 2.0):
        given = task.replace(outer_penalty=task.with_l2(rate).penalty)
        method = SGP if verb == "train" else hp.PDBO(SGP, HGP, hp.optimizer("sgd", learning_rate=1e-9), steps=1)
        found = getattr(hp, verb)(given, method, NETWORK, key=0, every=1, metrics={"size": metric})
        costs.append(found.history.cost[-1] - 0.5 * rate * found.history.metrics["size"][-1])
    np.testing.assert_allclose(costs[1], costs[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(costs[2], costs[0], rtol=1e-5, atol=1e-6)


def test_tuning_compiles_a_structure_once(compiled):  # noqa: F811
    task = quadratic(CLIENTS, 0)

    def tuned(values, steps=4):
        before = compiled[0]
        found = hp.tune(task, hp.SGP(steps, 0.1), NETWORK, key=0, over={"step_size": values}, on="validation")
        return compiled[0] - before, found

    tuned([0.1], steps=3)  # compile all parts that do not depend on the program
    few, _ = tuned([0.1])
    many, found = tuned(NUMBERS)
    assert many <= few + 1  # at most the program for five settings is compiled in addition
    runs: list[Any] = [hp.train(task, hp.SGP(4, value), NETWORK, key=0, every=4) for value in NUMBERS]
    costs = [run.history.cost[-1].mean() for run in runs]
    np.testing.assert_allclose([row.score for row in found.rows], costs, rtol=1e-5)
    assert found.best == hp.SGP(4, NUMBERS[int(np.argmin(costs))])


def test_tuning_takes_the_keys_of_its_seeds():
    task, method, network = quadratic(CLIENTS, 0), hp.SGP(2, 0.1), hp.networks.RandomDirected(CLIENTS)
    over = {"step_size": [0.05, 0.1]}
    found = hp.tune(task, method, network, key=0, over=over, on="validation", seeds=[3, 4])
    own = [hp.tune(task, method, network, key=key, over=over, on="validation") for key in (3, 4)]
    assert abs(own[0].rows[1].score - own[1].rows[1].score) > 1e-6  # the links affect the score
    for number, row in enumerate(found.rows):
        np.testing.assert_allclose(row.by_seed, [each.rows[number].score for each in own], rtol=1e-5)


def test_tuning_on_links_that_lose_messages_scores_what_training_reaches_there():
    task, network, engine = quadratic(CLIENTS, 0), hp.networks.Ring(CLIENTS), hp.Simulate(faults=hp.Faults(loss=0.3))
    found = hp.tune(task, hp.SGP(6, 0.1), network, key=0, over={"step_size": [0.1]}, on="validation", engine=engine)
    trained: Any = hp.train(task, hp.SGP(6, 0.1), network, key=0, every=6, engine=engine)
    reliable: Any = hp.train(task, hp.SGP(6, 0.1), network, key=0, every=6)
    # lost messages affect the cost
    assert abs(trained.history.cost[-1].mean() - reliable.history.cost[-1].mean()) > 1e-4
    np.testing.assert_allclose(found.best_row.score, trained.history.cost[-1].mean(), rtol=1e-5)


def test_tuning_on_such_links_runs_the_method_as_a_solution_does():
    """On links that lose messages, estimators keep no memory between outer steps."""
    task, network, engine = quadratic(CLIENTS, 0), hp.networks.Ring(CLIENTS), hp.Simulate(faults=hp.Faults(loss=0.3))
    estimator = hp.TrackedHGP(4, 0.1, pushes=2, tolerance=None)
    method = hp.PDBO(hp.SGP(6, 0.1), estimator, hp.optimizer("sgd", learning_rate=0.1), steps=3)
    found = hp.tune(task, method, network, key=0, over={"steps": [3]}, on="validation", engine=engine)
    solved = hp.solve(task, method, network, key=0, engine=engine)
    np.testing.assert_allclose(found.best_row.score, solved.history.cost[-1].mean(), rtol=1e-5)


# ----------------------------------------------------------------- silent mistakes


def test_links_seen_on_one_network_are_of_no_use_on_another():
    task, seen, other = quadratic(CLIENTS, 0), hp.networks.RandomDirected(CLIENTS), hp.networks.Ring(CLIENTS)
    trained: Any = hp.train(task, hp.SGP(20, 0.1), seen, key=0)
    assert trained.task.point.links is not None
    method = hp.hypergradients.DirectedRB(5, 0.1)

    def estimate(task, network, **more) -> Any:
        return hp.hypergradient(task, method, network, key=0, **more)

    links = trained.task.point.links
    forgotten = estimate(task.at(params=trained.params), other)
    np.testing.assert_array_equal(estimate(trained.task, other).value, forgotten.value)
    assert np.any(estimate(trained.task, other, links=links).value != forgotten.value)
    assert estimate(trained.task, other).task.point.step == 5
    # On the network where they were observed, links are used and the network's time continues.
    again = estimate(trained.task, seen)
    assert again.task.point.step == 25
    with pytest.raises(hp.InvalidInput, match=r"run hp\.train"):
        estimate(trained.task.at(params=trained.params), seen)


def test_training_is_not_differentiated_from_where_it_ended():
    trained: Any = hp.train(quadratic(CLIENTS, 0), SGP, NETWORK, key=0)
    with pytest.raises(hp.InvalidInput, match=r"task: got 'a trained task'; allowed: the task before training"):
        hp.hypergradient(trained.task, hp.hypergradients.ITDBackward(SGP), NETWORK, key=0)


def test_hypers_that_are_in_no_cost_are_refused():
    def inner(x, hyper, batch):
        return jnp.sum((x - batch["linear"]) ** 2)

    def outer(x, hyper, batch):
        return jnp.sum((x - batch["target"]) ** 2)

    task = quadratic(CLIENTS, 0).replace(inner=inner, outer=outer)
    hp.train(task, SGP, NETWORK, key=0)
    method = hp.PDBO(SGP, HGP, hp.optimizer("sgd", learning_rate=0.1), steps=1)
    calls: list[Any] = [(hp.hypergradient, HGP), (hp.solve, method)]
    for verb, each in calls:
        with pytest.raises(hp.InvalidInput, match=r"task\.hypers: got 'hypers that no cost or penalty contains'"):
            verb(task, each, NETWORK, key=0)


@pytest.mark.parametrize(
    ("inner", "hypergradient", "message"),
    [
        (SGP, hp.hypergradients.LocalGradient(), r"PDBO\.hypergradient: got 'LocalGradient after SGP'.*such as HGP"),
        (hp.LocalSGD(4, 0.1), HGP, r"PDBO\.hypergradient: got 'HGP after LocalSGD'.*LocalGradient\(\)"),
    ],
)
def test_pairs_that_lower_nobodys_cost_are_refused(inner, hypergradient, message):
    with pytest.raises(hp.InvalidInput, match=message):
        hp.PDBO(inner, hypergradient, hp.optimizer("sgd", learning_rate=0.1), steps=1)


def test_whether_hypers_agree_is_the_tasks_to_say():
    task, outer = quadratic(CLIENTS, 0), hp.optimizer("sgd", learning_rate=0.1)
    with pytest.raises(hp.InvalidInput, match=r"task\.common: got False.*common=True.*MDBO.*or one of .*PDBO"):
        hp.solve(task, hp.algorithms.MDBO(2, 0.1, 0.1), NETWORK, key=0)
    with pytest.raises(hp.InvalidInput, match=r"task\.common: got True.*common=False for PDBO.*or one of .*CDBO.*MDBO"):
        hp.solve(task.replace(common=True), hp.PDBO(SGP, HGP, outer, steps=1), NETWORK, key=0)


def test_a_history_of_a_prime_number_of_steps_is_no_longer_than_others():
    steps, seen = 1009, []

    class Watch(hp.hooks.Hook):
        def row(self, loop, step, values):
            seen.append(step)

    task, method = quadratic(CLIENTS, 7, common=True), hp.algorithms.MDBO(steps, 0.05, 0.01)
    found: Any = hp.solve(task, method, NETWORK, key=0, certify=False, hooks=[Watch()])
    assert 20 < len(found.history) <= 202
    assert found.history.steps.tolist() == seen == sorted(set(seen))
    assert (seen[0], seen[-1]) == (0, steps)
    assert found.history.rounds[-1] == found.costs.rounds
    np.testing.assert_array_equal(found.history.hypers[-1], found.hypers)
