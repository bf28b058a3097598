"""Influence on least squares compared with closed forms, and retraining compared with NumPy's."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from repeats import some

import hyperpush as hp
from hyperpush import influence
from hyperpush.base.errors import InvalidInput
from hyperpush.influence.curvature import measure_curvature
from hyperpush.networks.expected import tree_rounds

COUNTS, SIZE, L2 = (5, 8, 6), 3, 0.1
KEY = jax.random.key(1)


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def losses(params, hyper, examples):
    inputs, targets = examples
    return 0.5 * (inputs @ params - targets) ** 2


def task_of(losses, params, train, validation=None, **more):
    """Return a task whose hypers occur in no cost."""
    validation = train if validation is None else validation
    given = {"params": params, "hypers": 0.0, "train": train, "validation": validation}
    return hp.Task(inner=losses, outer=losses, **given, **more)


def drawn(counts, seed):
    generator = np.random.default_rng(seed)
    return [(generator.normal(size=(m, SIZE)), generator.normal(size=m)) for m in counts]


TRAIN, VALIDATION = drawn(COUNTS, 0), drawn((4, 4, 4), 1)
ONE_SIZE = (np.ones((3, 4, SIZE)), np.ones((3, 4)))
SOLVER = hp.SGP(2, 0.1)


@pytest.fixture(scope="module")
def setting(wide):
    return task_of(losses, jnp.zeros(SIZE), TRAIN, VALIDATION).with_l2(L2)


class Exact:
    """Weighted least squares in NumPy."""

    def __init__(self, weights=None, clients=(1, 1, 1)):
        weights = [np.ones(m) for m in COUNTS] if weights is None else weights
        terms = list(zip(TRAIN, weights, clients, strict=True))
        self.hessian = sum(c * ((a.T * w) @ a / len(b) + L2 * np.eye(SIZE)) for (a, b), w, c in terms)
        self.x = np.linalg.solve(self.hessian, sum(c * (a.T @ (w * b)) / len(b) for (a, b), w, c in terms))

    def total(self):
        return sum(0.5 * np.mean((a @ self.x - b) ** 2) for a, b in VALIDATION)

    def steepest(self):
        return sum(a.T @ (a @ self.x - b) / len(b) for a, b in VALIDATION)

    def gradients(self, client):
        a, b = TRAIN[client]
        return a * (a @ self.x - b)[:, None] / len(b)


def removed(places):
    weights = [np.ones(m) for m in COUNTS]
    for client, number in places:
        weights[client][number] = 0
    return weights


@pytest.fixture(scope="module")
def solution(setting):
    return setting.at(params=jnp.broadcast_to(Exact().x, (3, SIZE)))


NETWORK = hp.networks.RandomDirected(3, probability=(0.4, 0.8))


@pytest.fixture(scope="module", params=["tracked", "HGP"])
def found(request, setting, solution):
    method = hp.TrackedHGP() if request.param == "tracked" else hp.HGP(400, 40, 0.4)
    return influence.scores(solution, method, NETWORK, key=KEY, curvature_steps=SIZE, parties=None)


def test_scores_are_the_closed_form(found):
    exact = Exact()
    q = np.linalg.solve(exact.hessian, exact.steepest())
    for client, count in enumerate(COUNTS):
        assert found.examples[client].shape == (count,)
        np.testing.assert_allclose(found.examples[client], exact.gradients(client) @ q, rtol=2e-4, atol=1e-6)
        leaving = (exact.gradients(client).sum(0) + L2 * exact.x) @ q
        np.testing.assert_allclose(found.totals[client], leaving, rtol=2e-4, atol=1e-6)


def test_scores_predict_small_changes_of_weights(found):
    eps = 1e-5
    for client, number in [(0, 2), (1, 7), (2, 0)]:
        less = removed([])
        less[client][number] -= eps
        change = (Exact(less).total() - Exact().total()) / eps
        assert found.examples[client][number] == pytest.approx(change, rel=1e-3, abs=1e-5)


def test_rankings_and_the_largest(found):
    everything = np.concatenate(found.examples)
    for client, own in enumerate(found.examples):
        assert np.all(np.diff(own[found.ranking(client)]) >= 0)
    top = [found.examples[client][number] for client, number in found.top(7)]
    np.testing.assert_array_equal(np.abs(top), np.sort(np.abs(everything))[::-1][:7])


def test_rankings_of_nobody_are_refused(found):
    with pytest.raises(InvalidInput, match="client"):
        found.ranking(7)
    with pytest.raises(InvalidInput, match="count"):
        found.top(-1)


def test_curvature_is_that_of_the_mean_hessian(found):
    values = np.linalg.eigvalsh(Exact().hessian / 3)
    np.testing.assert_allclose(found.curvature, (values[0], values[-1]), rtol=1e-6)
    assert found.warnings == []


def test_curvature_does_not_wait_for_seldom_links():
    """On sparse random links, push-sum gives the same curvature; a tree would take more than 3,000 rounds."""
    task, seldom = hp.tasks.quadratic(200, seed=0), hp.networks.KOut(200, k=3)
    by_tree = influence.curvature(task, hp.networks.FullyConnected(200), key=KEY)
    found, costs = measure_curvature(task, seldom, KEY, steps=50)
    np.testing.assert_allclose(found, by_tree, rtol=1e-5)
    steps = sum(leaf.size for leaf in jax.tree.leaves(task.params)) // 200
    assert costs.rounds < steps * tree_rounds(seldom) / 3


def test_groups_and_clients_that_leave_are_retraining_itself(setting, solution):
    # The inner costs are quadratic: a Newton step is the solution.
    groups = [([(0, 1), (0, 3), (2, 5)], []), ([], [1]), ([(1, number) for number in range(8)], [])]
    for places, clients in groups:
        weights = influence.without(setting, places, clients)
        found = influence.group_score(solution, hp.hypergradients.Dense(), NETWORK, weights, key=KEY)
        exact = Exact(removed(places), [client not in clients for client in range(3)])
        assert found.total[0] == pytest.approx(exact.total() - Exact().total(), rel=1e-9)


# ------------------------------------------------------------------------------- personal hypers


class Personal:
    """Ridge regression with personal example weights, target shifts and L2 rates, and its solution in NumPy."""

    def __init__(self, seed=3):
        generator = np.random.default_rng(seed)
        self.weight = [generator.uniform(0.3, 2, m) for m in COUNTS]
        self.shift, self.rate = generator.normal(size=3), generator.uniform(0.1, 0.6, 3)

    def task(self, params=None):
        def inner(x, hyper, batch):
            inputs, targets = batch
            return 0.5 * hyper["weight"] * (inputs @ x - targets - hyper["shift"]) ** 2

        def outer(x, hyper, batch):
            inputs, targets = batch
            return 0.5 * (inputs @ x - targets + hyper["shift"]) ** 2

        padded = np.stack([np.pad(own, (0, max(COUNTS) - len(own))) for own in self.weight])
        made = hp.Task(
            inner=inner,
            outer=outer,
            penalty=lambda x, hyper: 0.5 * hyper["rate"] * jnp.sum(x**2),
            outer_penalty=lambda x, hyper: hyper["rate"] * jnp.sum(x),
            params=jnp.zeros(SIZE),
            hypers={"rate": 1.0, "shift": 0.0, "weight": hp.per_example(TRAIN)},
            train=TRAIN,
            validation=VALIDATION,
            names=("north", "east", "south"),
        )
        hypers = {"rate": jnp.asarray(self.rate), "shift": jnp.asarray(self.shift), "weight": jnp.asarray(padded)}
        return made.at(params=None if params is None else jnp.broadcast_to(params, (3, SIZE)), hypers=hypers)

    def solve(self, kept=None, clients=(1, 1, 1)):
        kept = removed([]) if kept is None else kept
        self.hessian, right = np.zeros((SIZE, SIZE)), np.zeros(SIZE)
        for (a, b), w, k, s, rate, c in zip(TRAIN, self.weight, kept, self.shift, self.rate, clients, strict=True):
            self.hessian += c * ((a.T * (w * k)) @ a / len(b) + rate * np.eye(SIZE))
            right += c * (a.T @ (w * k * (b + s))) / len(b)
        return np.linalg.solve(self.hessian, right)

    def validation_losses(self, x):
        return [0.5 * (a @ x - b + s) ** 2 for (a, b), s in zip(VALIDATION, self.shift, strict=True)]

    def total(self, x):
        return sum(own.mean() for own in self.validation_losses(x)) + sum(self.rate) * x.sum()


def differences(f, client, number, eps=1e-4):
    """Return −df/dw for the weight of one example, by central differences."""
    values = []
    for sign in (1, -1):
        kept = removed([])
        kept[client][number] += sign * eps
        values.append(np.asarray(f(kept)))
    return -(values[0] - values[1]) / (2 * eps)


@pytest.fixture(scope="module")
def personal(wide):
    exact = Personal()
    task = exact.task(exact.solve())
    return exact, task, influence.scores(task, hp.Automatic(tolerance=1e-9), NETWORK, key=KEY, parties=None)


def test_scores_at_personal_hypers_are_those_of_retraining(personal):
    exact, task, found = personal
    for client, number in [(0, 4), (1, 2), (2, 0)]:
        change = differences(lambda kept: exact.total(exact.solve(kept)), client, number)
        assert found.examples[client][number] == pytest.approx(change, rel=1e-5)
    assert found.ranking("east")[0] == np.argmin(found.examples[1])
    named, numbered = (influence.without(task, [(client, 2)]) for client in ("east", 1))
    np.testing.assert_array_equal(named.examples, numbered.examples)
    for places, clients in [([(0, 4)], []), ([(1, n) for n in range(8)], []), ([], ["south"]), ([(0, 0)], [1, 2])]:
        weights = influence.without(task, places, clients)
        score = influence.group_score(task, hp.hypergradients.Dense(), NETWORK, weights, key=KEY)
        left = [int(name not in clients and number not in clients) for number, name in enumerate(task.names)]
        change = exact.total(exact.solve(removed(places), left)) - exact.total(exact.solve())
        assert score.total[0] == pytest.approx(change, rel=1e-8)


@pytest.mark.long
def test_retraining_at_personal_hypers_reaches_the_closed_form():
    exact, places = Personal(), [(0, 1), (2, 3)]
    task = exact.task()
    weights = [influence.without(task, places), influence.without(task, clients=["north"])]
    network = hp.networks.FullyConnected(3)
    costs = influence.retrain(task, hp.SGP(3000, 0.3), network, weights, key=KEY)
    expected = [exact.total(exact.solve(removed(places))), exact.total(exact.solve(clients=(0, 1, 1)))]
    np.testing.assert_allclose(costs.losses.sum(axis=1), expected, rtol=1e-7)


@pytest.mark.long
def test_scores_of_single_validation_examples_are_the_closed_form(personal):
    exact, task, together = personal
    asked = [("north", 3), (1, 0), "south"]
    found = influence.scores(task, hp.Automatic(tolerance=1e-9), NETWORK, key=KEY, validation=asked, parties=None)
    assert found.validation == ((0, 3), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3))

    def chosen(kept):
        own = exact.validation_losses(exact.solve(kept))
        return [own[client][number] for client, number in found.validation]

    for client, number in [(0, 4), (1, 2), (2, 0)]:
        expected = differences(chosen, client, number)
        np.testing.assert_allclose(found.by_validation[client][:, number], expected, rtol=1e-4, atol=1e-8)
    for one, other in zip(found.examples, together.examples, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(found.totals, together.totals, rtol=1e-7)
    shown = next(panel for panel in found.panels() if "single validation losses" in panel.title).numbers["rows"]
    assert len(shown) == 6
    assert [abs(row[4]) for row in shown] == sorted((abs(row[4]) for row in shown), reverse=True)
    for asked, example, client, record, change in shown:
        row = found.validation.index((task.names.index(asked), example))
        own = [changes[row] for changes in found.by_validation]
        assert change == own[task.names.index(client)][record]
        assert abs(change) == max(np.abs(each).max() for each in own)
    # One estimate solves seven right-hand sides: its vectors are longer, but it takes hardly more rounds.
    assert found.costs.rounds <= 2 * together.costs.rounds


@pytest.mark.long
def test_models_and_costs_of_batches_are_taken():
    def batch_cost(x, hyper, batch):
        return batch.mean(losses(x.weight[0], hyper, batch.examples)) + hyper

    model = eqx.nn.Linear(SIZE, 1, use_bias=False, key=KEY)
    model = eqx.tree_at(lambda m: m.weight, model, jnp.zeros((1, SIZE)))
    made = hp.Task(
        inner=lambda x, hyper, batch: losses(x.weight[0], hyper, batch),
        outer=hp.Batch.cost(batch_cost),
        params=model,
        hypers=0.0,
        train=TRAIN,
        validation=VALIDATION,
    ).with_l2(L2)
    weights, change = influence.without(made, [(1, 3)]), Exact(removed([(1, 3)])).total() - Exact().total()
    network, solver = hp.networks.FullyConnected(3), hp.SGP(2000, 0.5)
    trained = hp.train(made, solver, network, key=KEY).task
    score = influence.group_score(trained, hp.hypergradients.Dense(), network, weights, key=KEY)
    assert score.total[0] == pytest.approx(change, rel=1e-5)
    again = influence.retrain(made, solver, network, [weights], key=KEY)
    assert again.total[0] == pytest.approx(change, rel=1e-5)
    assert influence.scores(trained, hp.Automatic(), network, key=KEY, parties=None).status.converged


def test_what_leaves_no_curvature_is_refused(solution):
    nobody = influence.without(solution, clients=[0, 1, 2])
    with pytest.raises(InvalidInput, match="no client is left"):
        influence.group_score(solution, hp.TrackedHGP(), NETWORK, nobody, key=KEY)
    plain = task_of(losses, jnp.zeros(SIZE), TRAIN, VALIDATION)
    empty = influence.without(plain, [(client, n) for client, m in enumerate(COUNTS) for n in range(m)])
    with pytest.raises(hp.NotConverged, match="ill-posed"):
        influence.group_score(plain, hp.hypergradients.Dense(), NETWORK, empty, key=KEY)


def test_a_client_without_curvature_does_not_upset_plain_steps(setting, solution):
    weights = influence.without(setting, clients=[2])
    found = influence.group_score(solution, hp.TrackedHGP(acceleration=0), NETWORK, weights, key=KEY)
    assert found.total[0] == pytest.approx(Exact(clients=(1, 1, 0)).total() - Exact().total(), rel=1e-3)


def test_damping_adds_to_the_hessian(setting, solution):
    exact = Exact()
    found = influence.scores(solution, hp.hypergradients.Dense(), NETWORK, key=KEY, damping=0.7, parties=None)
    q = np.linalg.solve(exact.hessian + 3 * 0.7 * np.eye(SIZE), exact.steepest())
    np.testing.assert_allclose(found.examples[1], exact.gradients(1) @ q, rtol=1e-9)
    assert found.curvature is None
    assert found.status.converged  # damping does not change the optimum


@pytest.mark.long
def test_indefinite_hessians_are_told():
    def saddle(params, hyper, examples):
        inputs, signs = examples
        return 0.5 * signs * (inputs @ params) ** 2

    inputs = np.broadcast_to(np.eye(2), (3, 2, 2))
    data = (inputs, np.broadcast_to([1.0, -0.5], (3, 2)))  # mean Hessian diag(½, −¼)
    made = task_of(saddle, jnp.ones(2), data)
    found = influence.scores(made, hp.hypergradients.Dense(), NETWORK, key=KEY, curvature_steps=5, parties=None)
    np.testing.assert_allclose(np.asarray(found.curvature), (-0.25, 0.5), rtol=1e-6)
    status, sentence = found.warnings
    assert status == str(found.status).removeprefix("! ")
    assert "-0.25" in sentence
    damped = influence.scores(
        made, hp.hypergradients.Dense(), NETWORK, key=KEY, damping=0.3, curvature_steps=5, parties=None
    )
    # With and without damping the params are not stationary; only the warning of indefinite curvature disappears.
    assert damped.status.reason == "unsolved"
    assert not any("indefinite" in sentence for sentence in damped.warnings)


def test_clients_that_mix_slowly_agree_on_the_curvature():
    n, size = 16, 6
    generator = np.random.default_rng(5)
    data = (generator.normal(size=(n, 4, size)) * generator.uniform(0.2, 2, (n, 1, size)), np.zeros((n, 4)))
    made = task_of(losses, jnp.zeros(size), data)
    values = np.linalg.eigvalsh(np.einsum("nmi,nmj->ij", data[0], data[0]) / (4 * n))
    found = influence.curvature(made, hp.networks.Ring(n), key=KEY, steps=size)
    np.testing.assert_allclose(found, (values[0], values[-1]), rtol=1e-6)


def test_singular_hessians_are_not_called_indefinite():
    with jax.enable_x64(False):
        inputs = np.random.default_rng(2).normal(size=(3, 2, 9)).astype(np.float32)  # rank 6 of 9
        data = (inputs, np.zeros((3, 2), np.float32))
        made = task_of(losses, jnp.zeros(9), data)
        found = influence.scores(made, hp.HGP(2, 2, 0.1), NETWORK, key=KEY, parties=None)
        assert found.curvature is not None
        assert abs(found.curvature.smallest) < 1e-4
        assert found.warnings == ["not converged (ill-posed: the Hessian is singular or indefinite)"]
        alone = influence.scores(made, hp.HGP(2, 2, 0.1), NETWORK, key=KEY, curvature_steps=0, parties=None)
    assert found.costs.rounds > alone.costs.rounds == alone.estimate.costs.rounds
    assert found.costs.hessian_products == alone.costs.hessian_products + 9


def test_retraining_is_gradient_descent_without_them(setting):
    places = [[(0, 0)], [(1, 3), (2, 2)], []]
    weights = [influence.without(setting, own) for own in places]
    # With full batches and all links, SGP is gradient descent on the mean cost.
    network = hp.networks.FullyConnected(3)
    costs = influence.retrain(setting, hp.SGP(25, 0.3), network, weights, key=KEY, at_once=2).losses
    assert costs.shape == (3, 3)
    for own, row in zip(places, costs, strict=True):
        exact, x = Exact(removed(own)), np.zeros(SIZE)
        for _ in range(25):
            x = x - 0.1 * exact.hessian @ (x - exact.x)
        np.testing.assert_allclose(row, [0.5 * np.mean((a @ x - b) ** 2) for a, b in VALIDATION], rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("solver", [hp.TrackedSGP(tolerance=1e-9), hp.AutomaticInner(tolerance=1e-9, trust=False)])
def test_retraining_without_a_tree_reaches_the_solution(setting, solver):
    places = [[(1, 3), (2, 2)], []]
    weights = [influence.without(setting, own) for own in places]
    found = influence.retrain(setting, solver, hp.networks.FullyConnected(3), weights, key=KEY)
    expected = [[0.5 * np.mean((a @ Exact(removed(own)).x - b) ** 2) for a, b in VALIDATION] for own in places]
    np.testing.assert_allclose(found.losses, expected, rtol=1e-6)
    assert found.status.converged
    assert len(found.statuses) == 2


@pytest.mark.long
def test_retrainings_share_links_and_mini_batches_with_the_run(setting):
    solver = hp.SGP(12, 0.2, batch_size=3)
    weights = [influence.without(setting), influence.without(setting, [(1, 4)])]
    costs = influence.retrain(setting, solver, NETWORK, weights, key=KEY).losses
    for own, row in zip(weights, costs, strict=True):
        trained = hp.train(influence.with_weights(setting).at(hypers=own), solver, NETWORK, key=KEY).params
        expected = [0.5 * np.mean((a @ x - b) ** 2) for (a, b), x in zip(VALIDATION, np.asarray(trained), strict=True)]
        np.testing.assert_allclose(row, expected, rtol=1e-9)
    assert np.any(costs[0] != costs[1])


def test_agreement_by_hand():
    found = influence.agreement(np.array([-1.0, 2.0, 1.0, -3.0]), np.array([-2.0, 2.0, -1.0, -3.0]))
    # Residuals are 1, 0, 4, 0, and squared deviations from the mean −1 are 1, 9, 0, 4. Two of three negative values
    # are predicted.
    assert found["r2"] == pytest.approx(1 - 5 / 14)
    assert found["f1"] == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert found["kendall"] == pytest.approx(1.0)
    assert found["spearman"] == pytest.approx(1.0)
    assert influence.agreement(np.ones(3), np.ones(3)) == {"r2": None, "f1": 1.0, "kendall": None, "spearman": None}


def score(task, **options):
    return influence.scores(task, hp.TrackedHGP(), NETWORK, key=KEY, **options)


def scalar_outer():
    def outer(x, hyper, batch):
        return jnp.mean(losses(x, hyper, batch))

    given = {"params": jnp.zeros(SIZE), "hypers": 0.0, "train": TRAIN, "validation": ONE_SIZE}
    return hp.Task(inner=losses, outer=outer, **given)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (
            lambda s: influence.with_weights(
                task_of(lambda x, h, e: jnp.sum(losses(x, h, e)), jnp.zeros(SIZE), ONE_SIZE)
            ),
            "task.inner",
        ),
        (lambda s: influence.without(s, [(0, 5)]), "places"),  # client 0 has five, and padding
        (lambda s: influence.without(s, [(3, 0)]), "client"),
        (lambda s: influence.without(s, clients=[-1]), "client"),
        (lambda s: influence.scores(s, hp.TrackedHGP(), NETWORK, key=KEY, damping=-0.1), "damping"),
        (lambda s: influence.scores(s, hp.hypergradients.DirectGradient(), NETWORK, key=KEY), "method"),
        (
            lambda s: influence.scores(s, hp.hypergradients.ITDBackward(SOLVER), NETWORK, key=KEY, damping=0.1),
            "damping",
        ),
        (lambda s: influence.curvature(s, NETWORK, key=KEY, steps=0), "steps"),
        (lambda s: influence.retrain(s, SOLVER, NETWORK, [], key=KEY), "weights"),
        (lambda s: influence.retrain(s, SOLVER, NETWORK, [influence.without(s)], key=KEY, at_once=0), "at_once"),
        (lambda s: score(s, curvature_steps=-1), "curvature_steps"),
        (lambda s: score(s, validation=[(0, 4)]), "validation"),  # four examples each
        (lambda s: score(s, validation=[(0, "a")]), "validation"),
        (lambda s: score(s, validation=[]), "validation"),
        # ambiguous: example 1 of client 0, or examples of both clients
        (lambda s: score(s, validation=(0, 1)), "validation"),
        (lambda s: score(s, validation=["0", 1]), "validation"),
        (lambda s: score(s, validation=[(0, 1), ("0", 1)]), "validation"),
        (lambda s: score(s, validation=3), "validation"),
        (lambda s: score(s, validation=["nobody"]), "client"),
        (lambda s: score(s, validation=[("nobody", 0)]), "client"),
        (lambda s: score(scalar_outer(), validation=[0]), "task.outer"),
        (lambda s: score(hp.train(s, SOLVER, NETWORK, key=0)), "task"),
        (lambda s: influence.without(s, clients=["nobody"]), "client"),
        (lambda s: influence.without(s.for_client(1)), "task"),
        (lambda s: influence.agreement(np.ones(2), np.ones(3)), "predicted"),
    ],
)
def test_bad_input_is_named(setting, call, field):
    with pytest.raises(InvalidInput) as caught:
        call(setting)
    assert caught.value.field == field


def test_optimisers_that_would_mix_runs_are_refused(setting):
    solver = hp.SGP(2, optimizer=optax.clip_by_global_norm(1.0))
    with pytest.raises(InvalidInput, match=r"method\.optimizer"):
        influence.retrain(setting, solver, NETWORK, [influence.without(setting)], key=KEY)


@pytest.mark.parametrize("method", some({"looks": hp.HGP(3, 2, 0.1), "sees": hp.Automatic()}, ["looks"]))
def test_a_second_call_compiles_nothing(method, setting, solution):
    compiled = []

    def listen(event, duration_secs, **kwargs):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    def run(task, damping, key):
        network = hp.networks.RandomDirected(3, probability=(0.2, 0.3))  # the speed of mixing depends on the key
        return influence.scores(task, method, network, key=key, damping=damping, parties=None)

    other = task_of(losses, jnp.zeros(SIZE), drawn(COUNTS, 7), VALIDATION).replace(penalty=setting.penalty)
    other = other.at(params=jnp.ones((3, SIZE)), hypers=jnp.arange(3.0))
    first = solution.at(hypers=jnp.zeros(3))
    run(first, 0.0, 0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = [run(first, 0.0, key) for key in (1, 2, 3)]
        found.append(run(other, 0.2, 1))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert [each.curvature is None for each in found] == [isinstance(method, hp.Automatic)] * 4


def test_a_look_costs_no_more_than_the_default_estimate_needs(solution):
    def rounds(network, **options):
        return influence.scores(solution, hp.Automatic(), network, key=0, parties=None, **options).costs.rounds

    network = hp.networks.FullyConnected(3)
    # conjugate gradients measure the curvature themselves
    assert rounds(network) == rounds(network, curvature_steps=0)
    # A tree takes two rounds to sum and to return the sum, and SIZE products span all directions.
    assert rounds(network, curvature_steps=50) == rounds(network) + 2 * SIZE
