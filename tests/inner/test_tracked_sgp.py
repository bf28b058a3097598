"""TrackedSGP solves the inner problem without a tree, and reports when it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inner_problems import data, logistic, penalty, solution, square, task_of
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.solving.mixing import fast_rounds

CLIENTS = 6
NETWORKS = {
    "random": hp.networks.RandomDirected(CLIENTS),
    "directed ring": hp.networks.DirectedRing(CLIENTS),
    "exponential": hp.networks.OnePeerExponential(CLIENTS),
}


def error(found, expected):
    return np.sqrt(np.mean(np.sum((found.params - expected) ** 2, -1))) / np.linalg.norm(expected)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_it_ends_at_the_solution_without_a_setting(network):
    given = data(10.0)
    found = hp.train(task_of(logistic, *given), hp.TrackedSGP(), network, key=0)
    assert (found.status.converged, found.status.reason) == (True, "tolerance")
    assert error(found, solution(logistic, *given)) <= found.status.error <= 1e-6
    assert found.costs.rounds <= 600


@pytest.mark.usefixtures("float64")
def test_lost_messages_do_no_harm():
    given = data(3.0)
    engine = hp.Simulate(faults=hp.Faults(loss=0.2, delay=1))
    found = hp.train(task_of(square, *given), hp.TrackedSGP(600), NETWORKS["random"], key=0, engine=engine)
    assert found.status.converged
    assert error(found, solution(square, *given)) <= found.status.error <= 1e-6


@pytest.mark.usefixtures("float64")
def test_threads_lose_the_same_messages():
    faults, task = hp.Faults(loss=0.2, delay=1), task_of(square, *data(3.0))
    one, other = (
        hp.train(task, hp.TrackedSGP(24), NETWORKS["random"], key=0, engine=engine, certify=False)
        for engine in (hp.Simulate(faults=faults), hp.Threads(faults=faults))
    )
    np.testing.assert_allclose(other.params, one.params, rtol=1e-9)


@pytest.mark.usefixtures("float64")
def test_it_says_where_it_falls_short():
    given = data(1e5)
    found = hp.train(task_of(square, *given), hp.TrackedSGP(rounds=200), NETWORKS["random"], key=0)
    assert error(found, solution(square, *given)) > 1e-3
    assert found.status.converged is False


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("network", "most"),
    [
        (hp.networks.DirectedRing(20), 19),
        (hp.networks.Ring(20), 10),
        (hp.networks.Torus(12), 6),
        (hp.networks.StaticUndirected(20, 0.5, seed=1), 8),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rounds_on_fixed_links_average(network, most):
    """Products with the network's own weights: values divided by the mass approach the mean, for arbitrary values."""
    weights = np.asarray(hp.networks.matrix(network, jax.random.key(0), 0))
    values = np.random.default_rng(0).normal(size=(network.clients, 3))
    held = before = np.concatenate([values, np.ones((network.clients, 1))], axis=1)
    rounds = fast_rounds(network, 100)
    assert rounds is not None
    assert len(rounds) <= most
    for a, b, c in rounds:
        before, held = held, a * weights @ held + b * held + c * before
    np.testing.assert_allclose(held.sum(0), [*values.sum(0), network.clients], rtol=1e-9)
    found = held[:, :3] / held[:, 3:]
    assert np.abs(found - values.mean(0)).max() <= 0.1 * np.abs(values - values.mean(0)).max()


def test_links_that_change_have_no_fast_rounds():
    assert fast_rounds(NETWORKS["random"], 100) is None
    assert fast_rounds(hp.networks.DirectedRing(20), 18) is None


@pytest.mark.usefixtures("float64")
@pytest.mark.long
def test_an_outer_step_continues_where_the_one_before_stood():
    task = task_of(logistic, *data(3.0))
    methods = [hp.PDBO(hp.TrackedSGP(), steps=3, restart=restart) for restart in (True, None)]
    anew, warm = (hp.solve(task, method, NETWORKS["directed ring"], key=0) for method in methods)
    np.testing.assert_allclose(warm.hypers, anew.hypers, atol=1e-4)
    assert warm.costs.rounds < anew.costs.rounds


def test_mini_batches_and_private_tasks_are_refused():
    with pytest.raises(hp.InvalidInput, match=r"TrackedSGP\.batch_size.*SGP"):
        hp.TrackedSGP(batch_size=3)
    private = task_of(square, *data()).private(noise=hp.privacy.Gaussian(1.0), clip=1.0)
    with pytest.raises(hp.InvalidInput, match="TrackedSGP on a private task"):
        hp.train(private, hp.TrackedSGP(), NETWORKS["random"], key=0)


LOSSY = hp.Faults(loss=0.2)
ASYNCHRONOUS = hp.Peers("0", {str(client): None if client else "127.0.0.1:1" for client in range(CLIENTS)}, tls=False,
                        mode="asynchronous")  # fmt: skip


@pytest.mark.parametrize(
    ("options", "engine", "name", "why"),
    [
        ({}, hp.Simulate(), "TreeNewton", "members that trust each other"),
        ({}, hp.Simulate(faults=LOSSY), "TreeNewton", "members that trust each other"),
        ({}, hp.Threads(faults=LOSSY), "TrackedSGP", "lose messages"),
        ({}, ASYNCHRONOUS, "TrackedSGP", "asynchronous"),
        ({"trust": False}, hp.Simulate(), "TrackedSGP", "distrust"),
        ({"batch_size": 2, "step_size": 0.1}, hp.Simulate(), "SGP", "mini-batches"),
    ],
)
def test_automatic_inner_takes_what_the_situation_allows(options, engine, name, why):
    task, method = task_of(square, *data()), hp.AutomaticInner(**options)
    assert type(method.bind(NETWORKS["random"], engine, task)).__name__ == name
    chosen = method.choice(engine, task)
    assert chosen.startswith(f"{name}: ")
    assert why in chosen
    # The estimator follows the same rule.
    estimator = hp.Automatic(**{key: value for key, value in options.items() if key != "step_size"})
    assert estimator.choice(engine, task).partition(": ")[2] == chosen.partition(": ")[2]


def test_automatic_inner_asks_for_a_step_size_where_it_takes_sgp():
    task = task_of(square, *data())
    with pytest.raises(hp.InvalidInput, match=r"AutomaticInner\.step_size.*with mini-batches"):
        hp.train(task, hp.AutomaticInner(batch_size=2), NETWORKS["random"], key=0)
    private = task.private(noise=hp.privacy.Gaussian(1.0), clip=1.0)
    with pytest.raises(hp.InvalidInput, match=r"AutomaticInner\.step_size.*on a private task"):
        hp.train(private, hp.AutomaticInner(), NETWORKS["random"], key=0)
    found = hp.train(private, hp.AutomaticInner(steps=3, step_size=0.1), NETWORKS["random"], key=0)
    assert found.status.chosen == "SGP: a private task"


def ridge(rows, targets, rate):
    return np.linalg.solve(rows.T @ rows / len(rows) + rate * np.eye(rows.shape[1]), rows.T @ targets / len(rows))


@pytest.mark.usefixtures("float64")
@pytest.mark.long
def test_nested_algorithms_need_no_setting():
    """One regression has an L2 rate per client; after three steps the hypers equal the closed form's."""
    rows, labels, _ = data(3.0)
    rates = np.zeros((CLIENTS, 1))
    pair = jnp.asarray(rows), jnp.asarray(labels)
    task = hp.Task(inner=square, outer=square, params=jnp.zeros(rows.shape[-1]), train=pair, validation=pair,
                   hypers=hp.per_client(jnp.asarray(rates)), penalty=penalty)  # fmt: skip
    sgd = hp.optimizer("sgd", learning_rate=1.0)
    found = hp.solve(task, hp.PDBO(outer=sgd, steps=3), NETWORKS["random"], key=0)
    assert found.status.converged
    assert found.status.chosen == "TreeNewton and TreeCG: all examples, members that trust each other"
    flat, targets = rows.reshape(-1, rows.shape[-1]), labels.reshape(-1)
    hypers = rates[:, 0].copy()
    for _ in range(3):
        x = ridge(flat, targets, np.exp(hypers).mean())
        hessian = flat.T @ flat / len(flat) + np.exp(hypers).mean() * np.eye(flat.shape[1])
        source = flat.T @ (flat @ x - targets) / len(flat)
        hypers = hypers + np.exp(hypers) / CLIENTS * (x @ np.linalg.solve(hessian, source))
    np.testing.assert_allclose(found.hypers[:, 0], hypers, rtol=1e-4)
    np.testing.assert_allclose(found.params[0], ridge(flat, targets, np.exp(hypers).mean()), rtol=1e-4)
