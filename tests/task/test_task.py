"""A task takes one client's costs and start and all clients' data, and refuses mismatches at once."""

import copy
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import hyperpush as hp
from hyperpush.data import batches
from hyperpush.data.batches import full_batch, ragged
from hyperpush.verbs.checks import check_batch_size

GENERATOR = np.random.default_rng(0)
INPUTS, TARGETS = GENERATOR.normal(size=(4, 7, 3)), GENERATOR.normal(size=(4, 7))
DATA = (INPUTS, TARGETS)


def loss(x, hyper, batch):
    inputs, targets = batch
    return (inputs @ x - targets) ** 2


def l2(x, hyper):
    return jnp.exp(hyper) * jnp.sum(x**2)


def make(**changes):
    given = {"inner": loss, "penalty": l2, "outer": loss, "params": jnp.zeros(3), "hypers": 0.0}
    return hp.Task(**{**given, "train": DATA, "validation": DATA, **changes})


def test_the_inner_cost_is_the_mean_loss_and_the_penalty_once():
    task, x, hyper = make(), np.array([1.0, -2.0, 0.5]), 0.3
    inputs, targets = INPUTS[2], TARGETS[2]
    expected = np.mean((inputs @ x - targets) ** 2) + np.exp(hyper) * np.sum(x**2)
    batch = jax.tree.map(lambda leaf: leaf[2], task.train)
    assert task.problem.inner_cost(jnp.asarray(x), hyper, batch) == pytest.approx(expected, rel=1e-5)
    assert task.problem.outer_cost(jnp.asarray(x), hyper, batch) == pytest.approx(
        expected - np.exp(hyper) * np.sum(x**2), rel=1e-5
    )


def test_a_start_of_one_client_is_everybodys():
    task = make(params=jnp.arange(3.0), train=DATA)
    np.testing.assert_array_equal(task.params, np.tile(np.arange(3.0), (4, 1)))
    assert task.hypers.shape == (4,)


def test_a_start_as_long_as_there_are_clients_is_one_clients():
    wide = make(params=jnp.zeros(4), train=(np.ones((4, 7, 4)), TARGETS), validation=(np.ones((4, 7, 4)), TARGETS))
    assert wide.params.shape == (4, 4)


def test_starts_may_differ_between_clients():
    starts = GENERATOR.normal(size=(4, 3))
    np.testing.assert_allclose(make(params=hp.per_client(starts)).params, starts, rtol=1e-6)


def test_clients_of_any_sizes_are_padded_and_their_means_leave_padding_out():
    sizes = [2, 5, 7, 3]
    task = make(train=[(INPUTS[i][:m], TARGETS[i][:m]) for i, m in enumerate(sizes)])
    x = jnp.array([1.0, 2.0, 3.0])
    for client, m in enumerate(sizes):
        batch = full_batch(jax.tree.map(lambda leaf, i=client: leaf[i], task.train))
        expected = np.mean((INPUTS[client][:m] @ np.asarray(x) - TARGETS[client][:m]) ** 2)
        assert task.problem.inner_cost(x, -np.inf, batch) == pytest.approx(expected, rel=1e-5)


def test_hypers_by_example_reach_the_examples_of_a_batch():
    def weighted(x, weight, batch):
        return weight * loss(x, weight, batch)

    task = make(inner=weighted, penalty=None, hypers=hp.per_example(DATA, start=1.0))
    assert task.hypers.shape == (4, 7)
    one = jax.tree.map(lambda leaf: leaf[1], task.train)
    few = jax.tree.map(lambda leaf: leaf[np.array([4, 2])], one)
    weights = jnp.arange(7.0)
    found = task.problem._losses(task.problem.inner, jnp.ones(3), weights, few)
    expected = np.array([4, 2]) * np.asarray(loss(jnp.ones(3), None, (INPUTS[1], TARGETS[1])))[[4, 2]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


FIVE_AND_TWO = (np.ones(5), np.ones(2))


def weighted_ragged(train=FIVE_AND_TWO):
    """Return a task with a weight for every example, for a client with five examples and one with two."""
    rows = list(train)
    return hp.Task(
        inner=lambda x, h, b: jnp.exp(h) * (x - b) ** 2, outer=lambda x, h, b: (x - b) ** 2,
        outer_penalty=lambda x, h: jnp.sum(h**2), params=1.0, hypers=hp.per_example(rows, start=3.0), train=rows,
        validation=rows, names=["north", "south"],
    )  # fmt: skip


@pytest.mark.parametrize("start", [3.0, -2.0])
def test_a_penalty_counts_the_hypers_of_own_examples_only(start):
    """Test the default start, and one that sets hypers of nonexistent examples."""
    task = weighted_ragged()
    task = task if start == 3 else task.at(hypers=jnp.full((2, 5), start))
    outer = [jax.tree.map(lambda leaf, i=i: leaf[i], task.validation) for i in range(2)]
    costs = [task.problem.outer_cost(jnp.ones(()), task.hypers[i], full_batch(outer[i])) for i in range(2)]
    np.testing.assert_allclose(costs, [5 * start**2, 2 * start**2])


def test_clients_are_handed_the_hypers_of_their_own_examples(tmp_path):
    """Results trim the hypers; the files of a run, and hypers read back, are padded with zeros as in the task."""
    task, network = weighted_ragged((np.arange(5.0), np.arange(2.0))), hp.networks.Ring(2)
    method = hp.PDBO(hp.SGP(5, 0.01), hp.HGP(3, 1, 0.01), hp.optimizer("sgd", learning_rate=0.1), steps=2)
    found = hp.solve(task, method, network, key=0, save=tmp_path / "run")
    assert [found.client(name).hyper.shape for name in task.names] == [(5,), (2,)]
    assert found.client("south").hyper.tolist() == found.hypers[1, :2].tolist()
    file = load_file(tmp_path / "run/models/hypers/all.safetensors")[""]
    assert file.tolist() == [found.hypers[0].tolist(), [*found.hypers[1, :2].tolist(), 0, 0, 0]]
    several = hp.solve(task, method, network, key=0, seeds=2)
    assert [several.client(name).hyper.shape for name in task.names] == [(2, 5), (2, 2)]
    loaded = hp.load(tmp_path / "run", task=task).result
    np.testing.assert_array_equal(loaded.hypers, found.hypers)
    np.testing.assert_array_equal(loaded.task.hypers[1, 2:], 0)


def test_a_party_with_fewer_examples_than_a_mini_batch_gives_all_it_has():
    """A client of a simulation does the same."""
    method, task = hp.SGP(3, 0.1, batch_size=4), weighted_ragged()
    check_batch_size(method, task)
    check_batch_size(method, task.for_client("south"))
    own = {"train": np.ones(2), "validation": np.ones(2)}
    # other parties may have more examples
    check_batch_size(hp.SGP(3, 0.1, batch_size=6), task.for_client("south", own))
    for each in (task, task.for_client("south")):
        with pytest.raises(hp.InvalidInput, match="at most 5"):
            check_batch_size(hp.SGP(3, 0.1, batch_size=6), each)


def test_an_equinox_model_keeps_what_is_no_number():
    model = eqx.nn.MLP(3, 1, 8, 1, key=jax.random.key(0))

    def own(model, hyper, batch):
        return (jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2

    task = make(inner=own, outer=own, penalty=lambda model, hyper: jnp.exp(hyper), params=model)
    task.check()
    whole = task.problem.whole(jax.tree.map(lambda leaf: leaf[0], task.params))
    np.testing.assert_allclose(jax.vmap(whole)(INPUTS[0]), jax.vmap(model)(jnp.asarray(INPUTS[0])), rtol=1e-5)


def test_one_party_holds_its_own_data_and_start_only():
    loaded = []

    def load(client):
        loaded.append(client)
        return INPUTS[client], TARGETS[client]

    task = make(train=hp.tasks.clients(load, 4), validation=hp.tasks.clients(load, 4), names=["a", "b", "c", "d"])
    own = task.for_client("c")
    own.check()
    assert own.params.shape == (3,)
    assert set(loaded) == {2}
    other = task.for_client("d", {"train": (INPUTS[0][:2], TARGETS[0][:2]), "validation": (INPUTS[0], TARGETS[0])})
    assert other.train[0].shape == (2, 3)
    assert set(loaded) == {2}


def test_gauss_newton_is_the_hessian_of_least_squares():
    def model(x, hyper, batch):
        return batch[0] @ x

    def square(outputs, batch):
        return (outputs - batch[1]) ** 2

    task = make(inner=(model, square))
    at = jnp.array([0.3, -1.0, 2.0]), 0.1, jax.tree.map(lambda leaf: leaf[0], task.train)
    vector = jnp.array([1.0, 0.5, -0.2])
    np.testing.assert_allclose(
        task.problem.gauss_newton(*at)(vector), task.problem.hessian_product(*at, vector), rtol=1e-4
    )


def test_gauss_newton_takes_the_hypers_of_the_batch():
    def model(x, weight, batch):
        return weight * jnp.tanh(batch[0] @ x)

    def square(outputs, batch):
        return (outputs - batch[1]) ** 2

    task = make(inner=(model, square), penalty=None, hypers=hp.per_example(DATA))
    rows = np.array([4, 2])
    few = jax.tree.map(lambda leaf: leaf[1, rows], task.train)
    weights, x, vector = np.linspace(0.5, 2.0, 7, dtype=np.float32), np.array([0.3, -1.0, 0.4]), np.ones(3)
    found = task.problem.gauss_newton(jnp.asarray(x), jnp.asarray(weights), few)(jnp.asarray(vector))
    # Row j of the Jacobian is w_j (1 − tanh²) a_j, and the second derivative of a square is 2.
    inputs = INPUTS[1, rows]
    jacobian = (weights[rows] * (1 - np.tanh(inputs @ x) ** 2))[:, None] * inputs
    np.testing.assert_allclose(found, 2 / len(rows) * jacobian.T @ (jacobian @ vector), rtol=1e-4)


WRONG = {
    "no validation": ({"validation": None}, r"validation: got None; allowed: .*outer_on"),
    "fitting the test set": ({"test": DATA, "outer_on": "test"}, r"outer_on: got 'test'.*nothing may be fitted"),
    "a data set that is not there": ({"outer_on": "valid"}, r"outer_on: got 'valid'.*did you mean 'validation'"),
    "auxiliary output": ({"inner": lambda x, h, b: (loss(x, h, b), 1.0)}, r"task\.inner.*\(loss, aux\)"),
    "params ignored": ({"inner": lambda x, h, b: b[1]}, r"task\.inner.*ignores its params"),
    "a function for a start": ({"params": lambda key: key}, r"params.*not a function that makes them"),
    "whole numbers": ({"hypers": jnp.zeros(3, int)}, r"hypers: got 'numbers of type int32'.*floating"),
    "other clients": ({"train": (INPUTS[:3], TARGETS[:3])}, r"validation: got '4 clients'; allowed: 3 clients"),
    "starts of other clients": ({"params": hp.per_client(jnp.zeros((3, 3)))}, r"params: got \(3, 3\).*4 clients"),
    "a reserved name": ({"data": {"train": DATA}}, r"data: got 'train'"),
    "no function": ({"inner": 5}, r"task\.inner: got 5; allowed: a function of \(params, hyper, batch\)"),
    "shapes": ({"params": jnp.zeros(4)}, r"task\.inner.*fails with.*one client"),
    "names": ({"names": ["a"]}, r"names: got \['a'\]; allowed: a list of 4"),
    "half a pair": ({"inner": (loss,)}, r"task\.inner.*\(model, loss\)"),
    "nothing": ({"params": {}}, r"params.*at least one number"),
    "nobody": ({"train": []}, r"train: got \[\].*at least one client"),
    "a misspelled option": ({"pennalty": None}, r"Task\.pennalty: got 'pennalty'.*did you mean 'penalty'"),
    "no client's arrays": (
        {"train": (INPUTS[:0], TARGETS[:0]), "validation": (INPUTS[:0], TARGETS[:0])},
        r"train: got 'data of no client'.*at least one client",
    ),
    "not finite": ({"hypers": jnp.nan}, r"hypers: got 'NaN or infinity"),
    "a loss per class": ({"outer": lambda x, h, b: jnp.ones(2) * jnp.sum(x)}, r"task\.outer.*shape \(2,\) for 7"),
    "a matrix for a penalty": ({"penalty": lambda x, h: x}, r"task\.penalty.*one real scalar"),
    "a scalar of padded data": (
        {
            "train": [(INPUTS[0][:2], TARGETS[0][:2])] * 3 + [(INPUTS[0], TARGETS[0])],
            "inner": lambda x, h, b: jnp.mean(loss(x, h, b)),
        },
        r"task\.inner.*one scalar.*hp\.Batch\.cost",
    ),
    "no examples": ({"train": (INPUTS[:, :0], TARGETS[:, :0])}, r"train: got '0 examples"),
    "a list of names in one text": ({"names": "abcd"}, r"names: got 'abcd'"),
    "common as a text": ({"common": "yes"}, r"common: got 'yes'"),
}


UNLIKE = [(INPUTS[0], TARGETS[0])] * 3 + [(INPUTS[0][:2], TARGETS[0][:2])]

WRONG |= {
    "hypers by example that are to agree, of clients with different numbers": (
        {"train": UNLIKE, "hypers": hp.per_example(UNLIKE), "common": True},
        r"hypers: got 'one for each example of clients with 2 to 7 of them, and common=True'; allowed: common=False",
    ),
    "hypers of other examples": (
        {"hypers": hp.per_example((INPUTS[:, :5], TARGETS[:, :5]))},
        r"hypers: got \"one for each of 5 examples of client '0'\".*'0' has 7",
    ),
    "hypers of other clients' examples": (
        {
            "hypers": hp.per_example(UNLIKE),
            "names": ["a", "b", "c", "d"],
        },
        r"hypers: got \"one for each of 2 examples of client 'd'\".*'d' has 7",
    ),
    "hypers of too few clients": (
        {"hypers": hp.per_example([(INPUTS[0], TARGETS[0])] * 3)},
        r"hypers: got 'one for each example of 3 clients'.*of 4 clients",
    ),
    "examples that are not finite": (
        {"train": (np.where(INPUTS[1, 2, 0] == INPUTS, np.nan, INPUTS), TARGETS)},
        r"train\[0\].*NaN.*clients \[1\]",
    ),
    "a client without examples": (
        {"train": [(INPUTS[0], TARGETS[0])] * 3 + [(INPUTS[0][:0], TARGETS[0][:0])]},
        r"train of client 3: got '0 examples'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(hp.InvalidInput, match=message):
        make(**changes).check()


def test_a_network_of_other_clients_is_refused():
    with pytest.raises(hp.InvalidInput, match=r"network: got 'FullyConnected of 5 clients'.*4 clients"):
        hp.hypergradient(make(), hp.HGP(2, 1, 1.0), hp.networks.FullyConnected(5), key=0)


def test_ragged_copies_examples_once():
    """The examples of many clients are copied once, into one array of the result's size."""
    clients = [np.full((1 + number % 5, 50), number, np.float32) for number in range(2000)]
    ragged(clients[:5])
    tracemalloc.start()
    made = ragged(clients)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * made.examples.nbytes
    np.testing.assert_array_equal(made.counts, [len(client) for client in clients])
    np.testing.assert_array_equal(made.examples.sum((1, 2)), [client.sum() for client in clients])


def test_ragged_looks_at_all_counts_once(monkeypatch):
    looks = []
    monkeypatch.setattr(batches, "max", lambda counts: looks.append(len(counts)) or np.max(counts), raising=False)
    ragged([np.ones(1 + number % 3) for number in range(30)])
    assert sum(looks) <= 30


def test_ragged_keeps_the_type_that_holds_all_clients():
    made = ragged([np.arange(3), np.array([0.5])])
    assert made.examples.tolist() == [[0.0, 1.0, 2.0], [0.5, 0.0, 0.0]]


def test_ragged_refuses_what_it_cannot_stack():
    with pytest.raises(hp.InvalidInput, match=r"data of client 1.*0 examples"):
        ragged([np.zeros((3, 2)), np.zeros((0, 2))])
    with pytest.raises(hp.InvalidInput, match="data of client 1"):
        ragged([{"a": np.zeros(3)}, {"b": np.zeros(3)}])
    with pytest.raises(hp.InvalidInput, match=r"data of client 0.*same number"):
        ragged([(np.zeros(3), np.zeros(4))])


def test_l2_adds_to_gradient_and_hessian():
    made = hp.tasks.logistic(2, 0, examples=8)
    with_l2 = made.problem.with_l2(0.3)
    x, hyper, batch = made.params[0] + 0.5, made.hypers[0], jax.tree.map(lambda a: a[0], made.train)
    vector = jnp.arange(6.0)
    more = with_l2.inner_gradient(x, hyper, batch) - made.problem.inner_gradient(x, hyper, batch)
    np.testing.assert_allclose(more, 0.3 * x, rtol=1e-5)
    product = with_l2.products(x, hyper, batch, vector)[0] - made.problem.products(x, hyper, batch, vector)[0]
    np.testing.assert_allclose(product, 0.3 * vector, rtol=1e-4, atol=1e-5)
    assert made.with_l2(0.3).problem.penalty == with_l2.penalty
    with pytest.raises(hp.InvalidInput, match="l2"):
        made.with_l2(-1.0)


def test_products_are_those_of_the_matrices():
    """The cost ½xᵀAx − bᵀx + λᵀCx has the Hessian A and the cross derivative C."""
    made = hp.tasks.quadratic(2, 0)
    batch = jax.tree.map(lambda a: a[1], made.train)
    vector = jnp.arange(1.0, 5.0)
    arguments = (made.params[1], made.hypers[1], batch, vector)
    image, mixed = np.asarray(batch["hessian"]) @ vector, np.asarray(batch["coupling"]) @ vector
    np.testing.assert_allclose(made.problem.hessian_product(*arguments), image, rtol=1e-5)
    np.testing.assert_allclose(made.problem.jacobian_product(*arguments), mixed, rtol=1e-5)
    both = made.problem.products(*arguments)
    np.testing.assert_allclose(both[0], image, rtol=1e-5)
    np.testing.assert_allclose(both[1], mixed, rtol=1e-5)


def test_a_task_does_not_change():
    task = hp.tasks.quadratic(3, seed=0)
    with pytest.raises(hp.InvalidInput, match=r"task\.penlty: got None; allowed: a new task: tasks do not change"):
        task.penlty = None
    with pytest.raises(hp.InvalidInput, match=r"task\.hypers: got 9\.0"):
        task.hypers = 9.0  # pyright: ignore[reportAttributeAccessIssue]
    assert copy.deepcopy(task).names == task.replace(common=True).names == task.names
