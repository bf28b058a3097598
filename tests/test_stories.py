"""What users want to do with the interface, in a few lines each; longer stories have separate files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp

N, M, D = 4, 12, 3
RANDOM = np.random.default_rng(1)
INPUTS = RANDOM.normal(size=(N, M, D)).astype(np.float32)
TARGETS = (INPUTS @ np.arange(D) + 0.3 * RANDOM.normal(size=(N, M))).astype(np.float32)
DATA = (INPUTS, TARGETS)
RING, RANDOM_NETWORK = hp.networks.Ring(N), hp.networks.RandomDirected(N)


def loss(x, hyper, batch):
    return (batch[0] @ x - batch[1]) ** 2


def l2(x, hyper):
    return jnp.exp(hyper) * jnp.sum(x**2)


def make(**changes):
    given = {"inner": loss, "penalty": l2, "outer": loss, "params": jnp.zeros(D), "hypers": -2.0}
    return hp.Task(**{**given, "train": DATA, "validation": DATA, **changes})


def ridge(rates, data=DATA):
    """Return the minimizer of the clients' average of mean square error + rate·‖x‖², in NumPy."""
    hessian = sum(2 * a.T @ a / len(a) + 2 * rate * np.eye(D) for a, rate in zip(data[0], rates, strict=True))
    slope = sum(2 * a.T @ b / len(b) for a, b in zip(*data, strict=True))
    return np.linalg.solve(hessian, slope)


def test_clients_of_any_sizes_with_mini_batches_and_a_falling_step_size():
    sizes = [4, 7, 12, 9]
    own = [(INPUTS[i][:m], TARGETS[i][:m]) for i, m in enumerate(sizes)]
    solver = hp.SGP(3000, hp.schedule("milestones", 0.05, at=(2000, 2700)), batch_size=4)
    found = hp.train(make(train=own), solver, hp.networks.FullyConnected(N), key=0)
    truth = ridge([np.exp(-2.0)] * N, tuple(zip(*own, strict=True)))
    np.testing.assert_allclose(found.params.mean(axis=0), truth, atol=0.02)


@pytest.mark.long
def test_one_task_with_one_hyper_for_all_and_two_algorithms():
    task = make(common=True)
    options = {"tracked": True, "inner_steps": 5, "product_steps": 5}
    two = [
        hp.algorithms.MADSBO(800, 0.5, 0.1, 0.1, **options),
        hp.CDBO(hp.DSGD(150, 0.1), hp.HGP(60, 30, 0.2), hp.optimizer("sgd", learning_rate=4.0), 25, pushes=30),
    ]
    found = [hp.solve(task, method, RING, key=0) for method in two]
    for each in found:
        assert each.history.cost.mean(axis=1)[-1] < each.history.cost.mean(axis=1)[0]
        np.testing.assert_allclose(each.hypers, float(each.hyper), atol=1e-2)


def test_every_client_has_a_cost_of_its_own():
    """Costs differ between clients: a number in the data selects the cost."""
    kinds = np.broadcast_to(np.arange(N)[:, None] % 2, (N, M))

    def own(x, hyper, batch):
        inputs, targets, kind = batch
        error = inputs @ x - targets
        return jnp.where(kind == 0, error**2, jnp.abs(error) + 0.1 * error**2)

    task = make(inner=own, outer=own, train=(*DATA, kinds), validation=(*DATA, kinds))
    found = hp.train(task, hp.SGP(300, 0.05), RANDOM_NETWORK, key=0, every=300)
    assert found.history is not None
    assert found.history.cost.mean(axis=1)[-1] < 0.2 * found.history.cost.mean(axis=1)[0]


def test_data_on_disk_are_loaded_client_by_client(tmp_path):
    for client in range(N):
        np.savez(tmp_path / f"{client}.npz", inputs=INPUTS[client], targets=TARGETS[client])

    def load(client):
        with np.load(tmp_path / f"{client}.npz") as file:
            return file["inputs"], file["targets"]

    on_disk = hp.tasks.clients(load, N)
    network, solver = hp.networks.FullyConnected(N), hp.SGP(50, 0.1)
    found = hp.train(make(train=on_disk, validation=on_disk), solver, network, key=0)
    np.testing.assert_array_equal(found.params, hp.train(make(), solver, network, key=0).params)


def test_weights_of_examples_fall_where_labels_are_wrong():
    wrong = np.zeros((N, M), bool)
    wrong[:, :3] = True
    train = (INPUTS, np.where(wrong, -TARGETS, TARGETS))

    def weighted(x, weight, batch):
        return jax.nn.sigmoid(weight) * loss(x, None, batch)

    task = make(inner=weighted, penalty=None, hypers=hp.per_example(train), train=train).with_l2(0.01)
    method = hp.PDBO(hp.SGP(200, 0.1), hp.HGP(30, 5, 0.3), hp.optimizer("adam", learning_rate=0.5), 8)
    weights = np.asarray(hp.solve(task, method, hp.networks.FullyConnected(N), key=0).hypers)
    assert weights[~wrong].mean() - weights[wrong].mean() > 1.0


def test_metrics_are_measured_inside_and_keep_their_meaning():
    def error(x, hyper, batch):
        return jnp.abs(batch[0] @ x - batch[1])

    task = make(test=DATA)
    method = hp.PDBO(hp.SGP(100, 0.1), hp.HGP(10, 5, 0.2), hp.optimizer("sgd", learning_rate=1.0), 2)
    found = hp.solve(task, method, RANDOM_NETWORK, key=0, metrics={"error": ("test", error)})
    expected = np.abs(np.einsum("nmd,nd->nm", INPUTS, found.params) - TARGETS).mean(axis=1)
    np.testing.assert_allclose(found.history.metrics["error"][-1], expected, rtol=1e-4)
    cost = ((np.einsum("nmd,nd->nm", INPUTS, found.params) - TARGETS) ** 2).mean(axis=1)
    np.testing.assert_allclose(found.history.cost[-1], cost, rtol=1e-4)
    assert found.history.steps.tolist() == [0, 1, 2]


def test_row_zero_is_the_start_for_algorithms_of_one_loop():
    found = hp.solve(make(common=True), hp.algorithms.MDBO(6, 0.1, 0.05), RING, key=0, every=2)
    assert found.history.steps.tolist() == [0, 2, 4, 6]
    np.testing.assert_allclose(found.history.cost[0], (TARGETS**2).mean(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(found.history.rounds, [0, 2, 4, 6])


def test_names_are_the_owners():
    names = ["north", "east", "south", "west"]
    found = hp.train(make(names=names), hp.SGP(5, 0.1), RANDOM_NETWORK, key=0)
    np.testing.assert_array_equal(found.client("south").params, found.params[2])
    assert found.names == tuple(names)
    with pytest.raises(hp.InvalidInput, match="did you mean 'south'"):
        found.client("soth")


@pytest.mark.long
def test_an_estimate_before_training_says_that_the_inner_problem_is_not_solved():
    estimator = hp.HGP(10, 5, 0.2)
    before = hp.hypergradient(make(), estimator, RANDOM_NETWORK, key=0)
    assert before.status.residual is not None
    assert before.status.residual > 0.5
    assert before.status.converged is False
    assert "! not converged (unsolved: the params do not solve the inner problem" in repr(before)
    with pytest.raises(hp.NotConverged, match="unsolved"):
        hp.hypergradient(make(), estimator, RANDOM_NETWORK, key=0, throw=True)
    trained = hp.train(make(), hp.SGP(600, 0.05), RANDOM_NETWORK, key=0)
    after = hp.hypergradient(trained.task, estimator, RANDOM_NETWORK, key=0)
    assert after.status.residual is not None
    assert after.status.residual < 0.1
    assert after.status.converged is None
    assert "!" not in repr(after)
