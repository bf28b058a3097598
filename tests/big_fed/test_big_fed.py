"""BiG-Fed: its three forms compared with each other and NumPy, and its hypergradient with implicit differentiation."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from repeats import some
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.big_fed.algorithm import BiGFed, message_passing
from hyperpush.big_fed.bilinear import coefficients, loss, mean_square, model, represent
from hyperpush.big_fed.curvature import DampedCurvature
from hyperpush.programs import Exchange, Sequence, Server, profile
from hyperpush.task.task import JointCost
from hyperpush.tasks.quadratic import outer_fixed_points, quadratic

pytestmark = pytest.mark.usefixtures("float64")

N, W, M = 6, 3, 7
CLIQUES = nx.to_numpy_array(nx.barbell_graph(3, 0))
EVERYBODY = hp.networks.FullyConnected(N)


CURVATURES = ("hessian", "gauss-newton")
FORM = ["products", pytest.param("peers", marks=pytest.mark.long)]


def setting(seed=0):
    generator = np.random.default_rng(seed)
    inputs = generator.uniform(-2, 2, (N, M))
    params = generator.normal(size=(N, W, 2)) * 0.7
    kernel = generator.normal(size=(W, W)) * 0.7
    return (inputs[..., None], np.sin(generator.normal(size=(N, 1)) * inputs)), params, kernel


def cosine_of(graph, *options, **more):
    return hp.big_fed.Cosine(hp.networks.Graph(graph), *options, **{"represent": represent} | more)


def task_of(outer, made=None, inner=(model, loss), **options):
    """Return the task of clients with bilinear models; `outer_on="train"` gives clients separate outer costs."""
    data, params, kernel = setting() if made is None else made
    return hp.Task(
        inner=inner, outer=outer, params=hp.per_client(params), hypers=kernel, train=data, common=True, **options
    )


def run(outer, algorithm, network: hp.networks.Network = EVERYBODY, **options):
    return hp.solve(task_of(outer), algorithm, network, key=0, certify=False, **options)


# ------------------------------------------------------------------ by NumPy


def passing(weights, kind, loops):
    a = weights + np.eye(len(weights)) * loops
    degree = np.where(a.sum(1) > 0, a.sum(1), 1)
    return a / degree[:, None] if kind == "mean" else a / np.sqrt(degree[:, None] * degree)


def cost(shown, weights, counts, matrix, present):
    """Compute the cosine cost pair by pair."""
    H, total = matrix @ shown, 0.0
    for u in range(len(H)):
        for v in range(len(H)):
            norms = np.linalg.norm(H[u]) * np.linalg.norm(H[v])
            cos = H[u] @ H[v] / norms if norms > 0 else 0.0
            total += weights[u, v] * (1 - cos) + counts[u, v] * max(0.0, cos)
    return total / present.sum()


def gradient(f, at, h=1e-6):
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = h
        found[place] = (f(at + step) - f(at - step)) / (2 * h)
    return found


def drawn(cosine, weights, present, round):
    """Return how often each client drew each other client as a negative sample: floor(r_u + U)."""
    far = (weights == 0) & ~np.eye(len(weights), dtype=bool) & present[:, None] & present
    rates = cosine.negatives * weights.sum(1) / np.maximum(far.sum(1), 1)
    return far * np.floor(rates[:, None] + np.asarray(cosine.uniform(round)))


def one_round(cosine, theta, phi, data, weights, present, round, alpha, beta, damping):
    """Run one round of Algorithm 1 in NumPy.

    The blocks mean(x²)∇s∇sᵀ + εI are inverted by the Sherman–Morrison formula; J comes from finite differences.
    """
    x, y = data[0][..., 0], data[1]
    after = theta.copy()
    q, J = np.zeros((N, 2 * W)), np.zeros((N, W * W, 2 * W))
    counts, matrix = drawn(cosine, weights, present, round), passing(weights, cosine.passing, cosine.self_loops)

    def slope_of(t, p):
        return t.reshape(W, 2)[:, 0] @ p.reshape(W, W) @ t.reshape(W, 2)[:, 1]

    def inner_gradient(i, t, p):
        s, m = slope_of(t, p), p.reshape(W, W)
        turn = np.stack([m @ t.reshape(W, 2)[:, 1], m.T @ t.reshape(W, 2)[:, 0]], axis=1).ravel()
        return np.mean((s * x[i] - y[i]) * x[i]) * turn, turn

    for i in np.flatnonzero(present):
        after[i] = theta[i] - beta * inner_gradient(i, theta[i].ravel(), phi.ravel())[0].reshape(W, 2)

    def outer(theta, phi):
        return cost((phi @ theta).reshape(N, -1), weights, counts, matrix, present)

    along_theta = gradient(lambda t: outer(t, phi), after).reshape(N, -1)
    along_phi = gradient(lambda p: outer(after, p), phi).ravel()
    for i in range(N):
        turn = inner_gradient(i, theta[i].ravel(), phi.ravel())[1]
        size, right = np.mean(x[i] ** 2), along_theta[i]
        q[i] = right / damping - size * turn * (turn @ right) / damping**2 / (1 + size * (turn @ turn) / damping)
        for k in range(W * W):
            h = np.zeros(W * W)
            h[k] = 1e-6
            up, down = (inner_gradient(i, theta[i].ravel(), phi.ravel() + sign * h)[0] for sign in (1, -1))
            J[i, k] = (up - down) / 2e-6
    return after, phi - alpha * (along_phi - np.einsum("nkp,np->k", J, q)).reshape(W, W)


@pytest.mark.parametrize(
    ("passed", "loops", "forms"),
    [("mean", False, ("products", "peers")), ("symmetric", True, ("peers",))],
    ids=["mean", "symmetric"],
)
def test_all_forms_follow_algorithm_1(passed, loops, forms):
    """The graph changes twice: all clients, then one client absent, then another set of links."""
    other = nx.to_numpy_array(nx.cycle_graph(N))
    present = np.ones((3, N), bool)
    present[1, 2] = False
    graph = hp.networks.Graph(np.stack([CLIQUES, CLIQUES, other]), present)
    cosine = hp.big_fed.Cosine(graph, 2.5, passed, loops, seed=3, represent=represent)
    data, theta, phi = setting()
    expected = theta, phi
    for k in range(4):
        step = 0.05 / (k + 1) ** 0.6, 0.03 / (k + 1) ** 0.4
        weights = np.asarray(graph.weights[k % 3], float)
        expected = one_round(cosine, *expected, data, weights, present[k % 3], k, *step, 0.2)
    found = {}
    for form in forms:
        steps = hp.schedule("power", 0.05, 0.6), hp.schedule("power", 0.03, 0.4)
        found[form] = run(cosine, BiGFed(4, *steps, form, damping=0.2))
        np.testing.assert_allclose(found[form].params, expected[0], atol=1e-6)
        np.testing.assert_allclose(found[form].hypers, np.broadcast_to(expected[1], (N, W, W)), atol=1e-6)
    if len(forms) == 1:
        return
    # These two forms use no finite differences, so they agree much better.
    np.testing.assert_allclose(found["peers"].hypers, found["products"].hypers, atol=1e-11)
    d, h = 2 * W, W * W
    # The hypers are sent once to agree on a start. Then each round sends the params, the representations and a part of
    # dF/dφ.
    assert found["products"].costs.floats == h + 4 * (1 + d + h)
    assert found["peers"].costs.floats == 4 * (d + (d + 1) + d + (h + 1))


@pytest.mark.parametrize(("passed", "loops"), [("mean", False), ("symmetric", True)])
def test_the_expected_cost_has_the_mean_number_of_negatives(passed, loops):
    """The expected cost uses r_u in place of floor(r_u + U), with weighted links and an absent client."""
    generator = np.random.default_rng(5)
    weights = np.triu(CLIQUES * generator.uniform(0.5, 2, (N, N)), 1)
    weights += weights.T
    present = np.ones((1, N), bool)
    present[0, 1] = False
    cosine = hp.big_fed.Cosine(hp.networks.Graph(weights, present), 2.5, passed, loops, represent=represent)
    weights = np.float32(weights).astype(float) * present[0] * present[0][:, None]
    far = (weights == 0) & ~np.eye(N, dtype=bool) & present[0] & present[0][:, None]
    rates = 2.5 * weights.sum(1) / np.maximum(far.sum(1), 1)
    shown = generator.normal(size=(N, 4))
    expected = cost(shown, weights, far * rates[:, None], passing(weights, passed, loops), present[0])
    found = cosine.cost(jnp.asarray(shown), 7, expected=True)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found == cosine.cost(jnp.asarray(shown), 8, expected=True)
    assert found != cosine.cost(jnp.asarray(shown), 8)


@pytest.mark.parametrize("graph", some({"club": nx.karate_club_graph(), "star": nx.star_graph(4)}, ["star"]))
def test_numbers_of_negatives(graph):
    """If all representations are equal, n·F counts the negatives: 5 per link on average.

    Every negative then costs 1, and a link costs 0. The center of a star has no strangers, so only the links of the
    leaves are counted.
    """
    weights = (nx.to_numpy_array(graph) > 0).astype(float)
    n, rounds = len(weights), 400
    far = (weights == 0) & ~np.eye(n, dtype=bool)
    drawing = far.any(1)
    cosine = cosine_of(weights, 5.0, seed=2)
    same = jnp.ones((n, 2))
    counted = n * np.asarray(jax.jit(jax.vmap(lambda k: cosine.cost(same, k)))(jnp.arange(rounds)))
    np.testing.assert_allclose(counted, np.rint(counted), atol=1e-9)
    rates = np.where(drawing, 5 * weights.sum(1) / np.maximum(far.sum(1), 1), 0)
    lowest = (far.sum(1) * np.floor(rates)).sum()
    assert lowest <= np.rint(counted).min()
    assert np.rint(counted).max() <= lowest + far.sum()
    mean, rest = 5 * weights[drawing].sum(), rates - np.floor(rates)
    spread = np.sqrt((far.sum(1) * rest * (1 - rest)).sum() / rounds)
    assert abs(counted.mean() - mean) < 4 * spread + 1e-9
    assert n * cosine.cost(same, 0, expected=True) == pytest.approx(mean)


def test_every_form_declares_what_it_sends():
    """The declaration names a server if the program has one, and no message holds p×p numbers."""
    _, params, kernel = setting()
    data = hp.extend.Data.pair(jax.tree.map(lambda part: part[0], setting()[0]), None)
    problem = task_of(cosine_of(CLIQUES)).problem
    for form in ("products", "peers"):
        algorithm = BiGFed(2, 0.1, 0.1, form)
        state = hp.algorithms.BilevelState(params[0], kernel)
        places = profile(algorithm.program(problem), state, data, N).sendings
        central = any(isinstance(place.node, Server) or getattr(place.node, "by", "") == "exact" for place in places)
        assert (algorithm.info.network == "server") == central
        assert not algorithm.info.matrices
        assert all(place.floats <= (2 * W) ** 2 for place in places)
        assert "shown vectors" in algorithm.info.sends


# ------------------------------------------------- the implicit function


def test_parts_add_up_to_the_derivative_of_the_damped_problem():
    """Compare products and Newton's method on d/dφ F(φ, θ*(φ)), θ_i* = argmin g_i + ½ε‖θ − θ_i^k‖².

    The params θ^k are stationary.
    """
    data, params, kernel = setting(1)
    damping, cosine = 0.3, cosine_of(CLIQUES, 2.0)
    problem = task_of(cosine).problem
    x, y = jnp.asarray(data[0][..., 0]), jnp.asarray(data[1])
    # Make θ stationary: scale every θ_i so that its slope is the least-squares fit.
    best = jnp.mean(x * y, axis=1) / jnp.mean(x**2, axis=1)
    slopes = jax.vmap(coefficients, (0, None))(jnp.asarray(params), jnp.asarray(kernel))
    at = jnp.asarray(params).at[..., 1].multiply(best[:, None] / slopes)

    def damped(theta, phi, start, batch):
        return problem.inner_cost(theta, phi, batch) + 0.5 * damping * jnp.sum((theta - start) ** 2)

    def solved(phi, start, batch):
        def newton(theta, _):
            flat, shape = theta.ravel(), theta.shape

            def g(t):
                return damped(t.reshape(shape), phi, start, batch)

            return (flat - jnp.linalg.solve(jax.hessian(g)(flat), jax.grad(g)(flat))).reshape(shape), None

        return jax.lax.scan(newton, start, None, length=4)[0]

    def total(phi):
        theta = jax.vmap(solved, (None, 0, 0))(phi, at, (x[..., None], y))
        return cosine.cost(jax.vmap(represent, (0, None))(theta, phi), 0)

    truth = jax.jit(jax.grad(total))(jnp.asarray(kernel))
    assert float(jnp.linalg.norm(truth)) > 0.1
    for algorithm in (  # the inner step changes nothing, because θ is stationary
        BiGFed(1, 1.0, 1e-3, "products", "hessian", damping),
        BiGFed(1, 1.0, 1e-3, "products", "gauss-newton", damping),
    ):
        found = hp.solve(task_of(cosine, (data, at, kernel)), algorithm, EVERYBODY, key=0)
        np.testing.assert_allclose(kernel - found.hypers[0], truth, atol=1e-9)


def test_only_gauss_newton_has_no_negative_eigenvalue():
    """The Hessian of a product of layers is indefinite away from the fit; at the fit it equals Gauss–Newton's."""
    data, params, kernel = setting(2)
    batch, kernel = tuple(jnp.asarray(part[0]) for part in data), jnp.asarray(kernel)
    best = np.mean(data[0][0, :, 0] * data[1][0]) / np.mean(data[0][0] ** 2)
    away = jnp.asarray(params[0])
    fitted = away.at[:, 1].multiply(best / coefficients(away, kernel)[0])

    problem = task_of(cosine_of(CLIQUES)).problem

    @jax.jit
    def matrices(at):
        units = jnp.eye(at.size).reshape(-1, *at.shape)
        return [
            jax.vmap(DampedCurvature(problem, curvature, 0.0, at, kernel, batch).operator())(units).reshape(at.size, -1)
            for curvature in CURVATURES
        ]

    (hessian, newton), (there, also) = (map(np.linalg.eigvalsh, matrices(at)) for at in (away, fitted))
    assert hessian.min() < -0.1
    for values in (newton, there):
        assert values.max() > 0.1
        np.testing.assert_allclose(values[:-1], 0, atol=1e-9)
    np.testing.assert_allclose(there, also, atol=1e-9)


# ------------------------------------------------------- own costs, no graph


def test_without_a_graph_it_ends_where_own_hypergradients_are_zero():
    """Both forms end at NumPy's x_L: with a server, and with peers at falling steps or several inner steps."""
    task = quadratic(4, 2, common=True)
    end = outer_fixed_points(task.train, task.validation)["x_L"]
    exact = BiGFed(300, 0.3, 0.2, curvature="hessian", damping=0.0, inner_steps=2, blocks_at="after")
    found = hp.solve(task, exact, hp.networks.FullyConnected(4), key=0, certify=False)
    np.testing.assert_allclose(found.hypers, np.broadcast_to(end, task.hypers.shape), atol=1e-8)
    peers = BiGFed(4000, hp.schedule("power", 0.5, 0.6), 0.2, form="peers", curvature="hessian", damping=0.0, pushes=3)
    alone = hp.solve(task, peers, hp.networks.DirectedRing(4), key=0, certify=False)
    assert np.abs(alone.hypers - end).max() < 0.02 * np.abs(np.asarray(task.hypers) - end).max()


@pytest.mark.parametrize("form", FORM)
def test_personal_hypers_stay_beside_the_common_ones(form):
    """One common number and two personal ones solve the least-squares problem of all clients with separate blocks."""
    made = quadratic(4, 2, common=True)
    first, second = jax.tree.map(np.asarray, (made.train, made.validation))
    rows, right = np.zeros((4, 7, 1 + 2 * 4)), np.zeros((4, 7))
    for i in range(4):
        inverse = np.linalg.inv(first["hessian"][i])
        slope = np.concatenate([-second["map"][i] @ inverse @ first["coupling"][i].T, np.eye(3)])
        rows[i, :, [0, 1 + 2 * i, 2 + 2 * i]] = slope.T
        misfit = second["target"][i] - second["map"][i] @ inverse @ first["linear"][i]
        right[i] = np.concatenate([misfit, second["hyper_target"][i]])
    best = np.linalg.lstsq(rows.reshape(-1, 9), right.ravel(), rcond=None)[0]

    def joined(cost):
        return lambda x, hyper, batch: cost(x, jnp.concatenate([hyper["all"], hyper["own"]]), batch)

    task = hp.Task(
        inner=joined(made.inner), outer=joined(made.outer), params=hp.per_client(made.params), common=True,
        hypers={"all": jnp.zeros(1), "own": jnp.zeros(2)}, train=made.train, validation=made.validation,
    )  # fmt: skip
    method = BiGFed(400, 0.2, 0.2, form, "hessian", 0.0, inner_steps=2, blocks_at="after", personal=["own"])
    found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0, certify=False)
    np.testing.assert_allclose(found.hypers["all"], np.full((4, 1), best[0]), atol=1e-7)
    np.testing.assert_allclose(found.hypers["own"], best[1:].reshape(4, 2), atol=1e-7)
    assert np.ptp(best[1:].reshape(4, 2), axis=0).min() > 0.1
    assert set(found.hyper) == {"all"}  # personal hypers have no common value
    np.testing.assert_allclose(found.hyper["all"], best[:1], atol=1e-7)
    # Only the common number is sent: once for a common start, then in every step. Peers send it with its mass.
    assert found.costs.floats == (1 + 400 if form == "products" else 800)
    with pytest.raises(hp.InvalidInput, match=r"BiGFed\.personal: got 'mine'"):
        hp.solve(task, method.with_options(personal=("mine",)), hp.networks.FullyConnected(4), key=0)


@pytest.mark.parametrize("form", FORM)
def test_own_costs_are_added_to_the_graphs(form):
    """One step changes φ by the sum of both gradients; each alone gives the same θ, so the changes of φ add up."""
    kernel, algorithm = setting()[2], BiGFed(1, 0.1, 0.02, form)
    graph, both = (cosine_of(CLIQUES, 1.0, own=own) for own in (None, mean_square))
    found = [
        hp.solve(task_of(outer, validation=setting()[0]), algorithm, EVERYBODY, key=0, certify=False)
        for outer in (both, graph, mean_square)
    ]
    changes = [np.asarray(each.hypers)[0] - kernel for each in found]
    assert np.abs(changes[2]).max() > 1e-3
    np.testing.assert_allclose(changes[0], changes[1] + changes[2], atol=1e-12)
    # The graph's cost uses no examples; each client's own cost uses the validation examples once.
    assert [each.costs.accesses.get("validation", 0) for each in found] == [1, 0, 1]
    assert [each.costs.gradients for each in found] == [2, 1, 2]
    assert [each.history.recorded_cost is None for each in found] == [True, True, False]


def test_an_outer_penalty_is_everybodys_own():
    """The mean of ½c‖φ‖² over clients has the gradient cφ, which is added to the gradient of the graph's cost."""
    kernel, algorithm, graph = setting()[2], BiGFed(1, 0.1, 0.02), cosine_of(CLIQUES, 1.0)
    plain, more = (
        hp.solve(task_of(graph, outer_penalty=penalty), algorithm, EVERYBODY, key=0).hypers[0]
        for penalty in (None, lambda params, hyper: 1.5 * jnp.sum(hyper**2) / 2)
    )
    np.testing.assert_allclose(more - plain, -0.1 * 1.5 * kernel, atol=1e-12)


def test_params_are_trained_on_a_task_with_a_joint_cost():
    """Training does not use the outer cost; metrics leave out an outer cost that belongs to no single client."""
    trained = hp.train(task_of(cosine_of(CLIQUES)), hp.LocalSGD(3, 0.1), EVERYBODY, key=0, every=1)
    alone = hp.train(task_of(mean_square, outer_on="train"), hp.LocalSGD(3, 0.1), EVERYBODY, key=0, every=1)
    np.testing.assert_array_equal(trained.params, alone.params)
    assert trained.history is not None
    assert trained.history.recorded_cost is None
    np.testing.assert_array_equal(trained.history.steps, range(4))


# ----------------------------------------------------------------- engines


@pytest.mark.parametrize("engine", [hp.Simulate(), hp.Shard(), hp.Threads()])
def test_stacked_messages_are_told_apart(engine):
    """Receivers weigh messages by the sender's index; messages that do not arrive are rows of zeros."""
    links = np.random.default_rng(0).random((N, N)) < 0.5
    links |= np.roll(np.eye(N, dtype=bool), 1, axis=1)  # a ring connects all clients
    np.fill_diagonal(links, False)
    sent = np.arange(2.0 * N).reshape(N, 2) + 1

    def receive(state, inbox, ctx):
        return jnp.arange(1.0, N + 1) @ inbox.total

    program = Exchange(lambda state, ctx: state, receive, "ones", "stack")
    network = hp.networks.Trace(N, links[None])
    found = engine.run(program, network, jnp.asarray(sent), jnp.zeros(N), jax.random.key(0))
    np.testing.assert_allclose(found.states, links.T @ (np.arange(1, N + 1)[:, None] * sent))
    assert found.floats == 2


def test_weights_of_stacked_messages_are_refused():
    with pytest.raises(hp.InvalidInput, match=r"Exchange\.weights.*push.*ones"):
        Exchange(lambda state, ctx: state, lambda state, inbox, ctx: state, reduce="stack")


def test_peers_say_the_same_by_bytes_and_survive_loss():
    network = hp.networks.RandomDirected(N, (0.5, 0.9), seed=1)
    algorithm, cosine = BiGFed(5, 0.05, 0.03, "peers", pushes=2), cosine_of(CLIQUES, 2.0)
    simulated = run(cosine, algorithm, network)
    np.testing.assert_allclose(run(cosine, algorithm, network, engine=hp.Threads()).hypers, simulated.hypers, atol=1e-9)
    assert np.ptp(simulated.hypers, axis=0).max() > 1e-6  # on such links peers agree only asymptotically
    falling = BiGFed(200, hp.schedule("power", 0.05, 1), 0.03, "peers")
    lossy = run(cosine, falling, network, engine=hp.Simulate(faults=hp.Faults(loss=0.2)))
    assert np.ptp(lossy.hypers, axis=0).max() < 0.05
    assert np.abs(np.asarray(lossy.hypers) - setting()[2]).max() > 0.05
    with pytest.raises(hp.InvalidInput, match=r"faults.*reliable"):
        run(cosine, BiGFed(1, 0.1, 0.1), engine=hp.Simulate(faults=hp.Faults(loss=0.1)))


class Shown(eqx.Module):
    shown: jax.Array
    scale: jax.Array


def test_some_strangers_stand_for_all():
    """Two neighbors that hear two of four strangers at a time move, on average, as with a server that hears all."""
    weights = np.zeros((N, N))
    weights[0, 1] = weights[1, 0] = 1
    cosine = cosine_of(weights, 4.0, self_loops=True)  # r = 1, so every stranger is drawn once
    shown, found = jnp.asarray(np.random.default_rng(3).normal(size=(N, 4))), []
    program = Sequence(*message_passing(cosine))
    for absent in itertools.combinations(range(2, N), 2):
        links = ~np.eye(N, dtype=bool)
        links[np.ix_(absent, (0, 1))] = links[np.ix_((0, 1), absent)] = False
        network = hp.networks.Trace(N, links[None])
        states = Shown(shown, jnp.zeros(N))
        found.append(hp.Simulate().run(program, network, states, jnp.zeros(N), jax.random.key(0)).states.shown[:2])
    np.testing.assert_allclose(np.mean(found, axis=0), jax.grad(cosine.cost)(shown, 0)[:2], atol=1e-9)
    assert np.ptp(found, axis=0).max() > 1e-3


# ----------------------------------------------------------------- refusals


class Unknown(JointCost):
    """An object of a class that BiG-Fed does not know."""


def solved(outer, **options):
    return hp.solve(task_of(outer, **options), BiGFed(1, 0.1, 0.1), EVERYBODY, key=0)


@pytest.mark.parametrize(
    ("make", "field", "allowed"),
    [
        (lambda: run(cosine_of(np.ones((3, 3)) - np.eye(3)), BiGFed(1, 0.1, 0.1)), "graph", "6"),
        (lambda: solved(cosine_of(CLIQUES), inner=mean_square), "BiGFed.curvature", "inner=(model, loss)"),
        (lambda: solved(cosine_of(CLIQUES, own=mean_square)), "validation", "the outer level fits"),
        (
            lambda: solved(cosine_of(CLIQUES, own=lambda *_: jnp.zeros(2)), outer_on="train"),
            "task.outer.own",
            "one scalar",
        ),
        (lambda: solved(Unknown(represent=represent)), "task.outer", "Cosine"),
        (lambda: cosine_of(CLIQUES, represent=None), "Cosine.represent", "a function"),
        (
            lambda: solved(
                hp.big_fed.Cosine(hp.networks.Graph(CLIQUES), represent=lambda params, hyper: hyper @ params)
            ),
            "task.outer.represent",
            "one real vector",
        ),
        (lambda: cosine_of(CLIQUES, -1), "Cosine.negatives", "0 or more"),
        (lambda: cosine_of(CLIQUES, seed=-1), "Cosine.seed", "from 0"),
        (lambda: hp.networks.Graph(np.ones((2, 3))), "graph.weights", "n×n"),
        (lambda: hp.networks.Graph(np.eye(3)), "graph.weights", "diagonal"),
        (lambda: hp.networks.Graph(np.triu(np.ones((3, 3)), 1)), "graph.weights", "undirected"),
        (lambda: hp.networks.Graph(-CLIQUES), "graph.weights", "0 or more"),
        (lambda: hp.networks.Graph(CLIQUES, np.ones((2, N), bool)), "graph.present", "1, 6"),
        (lambda: hp.networks.Graph(CLIQUES, np.zeros((1, N), bool)), "graph.present", "at least one client"),
    ],
)
def test_what_cannot_be_used_is_refused(make, field, allowed):
    with pytest.raises(hp.InvalidInput) as refused:
        make()
    assert refused.value.field == field
    assert allowed in refused.value.allowed


CHEAP = {"inner": hp.SGP(1, 0.1), "hypergradient": hp.HGP(1, 1, 0.1), "outer": hp.optimizer("sgd", learning_rate=0.1)}


@pytest.mark.parametrize(
    "call",
    [
        lambda task: hp.solve(task, hp.algorithms.MDBO.example(), EVERYBODY, key=0),
        lambda task: hp.solve(task, hp.CDBO(**CHEAP, steps=1), EVERYBODY, key=0),
        lambda task: hp.hypergradient(task, CHEAP["hypergradient"], EVERYBODY, key=0),
    ],
    ids=["MDBO", "CDBO", "HGP"],
)
def test_methods_that_cannot_differentiate_a_joint_cost_refuse_it(call):
    with pytest.raises(hp.InvalidInput, match=r"Cosine, a cost of all clients together.*BiGFed") as refused:
        call(task_of(cosine_of(CLIQUES)))
    assert refused.value.field == "task.outer"


@pytest.mark.parametrize("form", FORM)
def test_privately_every_access_is_a_release_and_without_noise_nothing_else_changes(form):
    """Two iterations release two inner gradients and, for each of three solver steps, five products."""
    task = task_of(cosine_of(CLIQUES))
    method = BiGFed(2, 0.1, 0.1, form, inner_steps=2, blocks_at="after", solver_steps=3)
    bounds: Any = {"clip": 1e4, "curvature": 1e4, "coupling": 1e4}  # bounds that clip nothing
    private = task.private(noise=hp.privacy.Gaussian(1e-12), **bounds)
    assert hp.budget(private, method, EVERYBODY).releases == {"train": 2 * (2 + 5)}
    quiet, plain = (hp.solve(each, method, EVERYBODY, key=0) for each in (private, task))
    np.testing.assert_allclose(quiet.params, plain.params, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(quiet.hyper, plain.hyper, rtol=1e-4, atol=1e-6)
    noisy = hp.solve(task.private(noise=hp.privacy.Gaussian(1.0), **bounds), method, EVERYBODY, key=0)
    assert np.abs(noisy.params - plain.params).max() > 1


def test_nobody_computes_a_joint_cost_alone():
    with pytest.raises(hp.InvalidInput, match=r"task\.outer.*each client's own"):
        task_of(cosine_of(CLIQUES)).problem.outer_cost(setting()[1][0], setting()[2], None)
