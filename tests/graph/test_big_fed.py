"""BiG-Fed: its three forms against each other and against NumPy, its hyper-gradient against the implicit function."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.declarations import ON_GRAPHS
from hyperpush.graph.big_fed import BiGFed, message_passing
from hyperpush.graph.bilinear import PROBLEM, coefficients, represent, residuals
from hyperpush.graph.problem import Bend
from hyperpush.problems.quadratic import outer_fixed_points, quadratic
from hyperpush.program import Exchange, Sequence, Server, sendings

pytestmark = pytest.mark.usefixtures("float64")

N, W, M = 6, 3, 7
CLIQUES = nx.to_numpy_array(nx.barbell_graph(3, 0))
EVERYBODY = hp.networks.FullyConnected(N)


CURVATURES = ("hessian", "gauss-newton")


def setting(seed=0):
    generator = np.random.default_rng(seed)
    inputs = generator.uniform(-2, 2, (N, M))
    params = generator.normal(size=(N, W, 2)) * 0.7
    kernel = generator.normal(size=(W, W)) * 0.7
    return (inputs[..., None], np.sin(generator.normal(size=(N, 1)) * inputs)), params, kernel


def run(algorithm, network: hp.networks.Network = EVERYBODY, outer=None, problem=PROBLEM, **options):
    data, params, kernel = setting()
    hypers = np.broadcast_to(kernel, (N, W, W))
    return hp.optimise(problem, algorithm, network, params, hypers, data, outer, jax.random.key(0), **options)


# ------------------------------------------------------------------ by NumPy


def passing(weights, kind, loops):
    a = weights + np.eye(len(weights)) * loops
    degree = np.where(a.sum(1) > 0, a.sum(1), 1)
    return a / degree[:, None] if kind == "mean" else a / np.sqrt(degree[:, None] * degree)


def cost(shown, weights, counts, matrix, present):
    """The cosine cost, pair by pair."""
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
    """How often everybody drew everybody: floor(r_u + U)."""
    far = (weights == 0) & ~np.eye(len(weights), dtype=bool) & present[:, None] & present
    rates = cosine.negatives * weights.sum(1) / np.maximum(far.sum(1), 1)
    return far * np.floor(rates[:, None] + np.asarray(cosine.uniform(round)))


def one_round(cosine, theta, phi, data, weights, present, round, alpha, beta, damping):
    """Algorithm 1 with blocks mean(x²)∇s∇sᵀ + εI, inverted by Sherman and Morrison; J by differences."""
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
    [("mean", False, ("blocks", "products", "peers")), ("symmetric", True, ("peers",))],
    ids=["mean", "symmetric"],
)
def test_all_forms_follow_algorithm_1(passed, loops, forms):
    """A graph that changes: everybody, then somebody absent, then another graph."""
    other = nx.to_numpy_array(nx.cycle_graph(N))
    present = np.ones((3, N), bool)
    present[1, 2] = False
    graph = hp.Graph(np.stack([CLIQUES, CLIQUES, other]), present)
    cosine = hp.Cosine(graph, 2.5, passed, loops, seed=3)
    data, theta, phi = setting()
    expected = theta, phi
    for k in range(4):
        step = 0.05 / (k + 1) ** 0.6, 0.03 / (k + 1) ** 0.4
        weights = np.asarray(graph.weights[k % 3], float)
        expected = one_round(cosine, *expected, data, weights, present[k % 3], k, *step, 0.2)
    found = {}
    for form in forms:
        steps = hp.Power(0.05, 0.6), hp.Power(0.03, 0.4)
        found[form] = run(BiGFed(4, *steps, cosine, form, damping=0.2))
        np.testing.assert_allclose(found[form].params, expected[0], atol=1e-6)
        np.testing.assert_allclose(found[form].hypers, np.broadcast_to(expected[1], (N, W, W)), atol=1e-6)
    if len(forms) == 1:
        return
    for form in ("products", "peers"):  # without differences in between they agree much better
        np.testing.assert_allclose(found[form].hypers, found["blocks"].hypers, atol=1e-11)
    d, h = 2 * W, W * W
    # The hypers once to agree on a start; the round, φ, θ and both blocks; what is shown, and a part of dF/dφ.
    assert found["blocks"].floats == h + 4 * (1 + h + d + d * d + h * d)
    assert found["products"].floats == h + 4 * (1 + d + h)
    assert found["peers"].floats == 4 * (d + (d + 1) + d + (h + 1))


@pytest.mark.parametrize(("passed", "loops"), [("mean", False), ("symmetric", True)])
def test_the_expected_cost_has_the_mean_number_of_negatives(passed, loops):
    """Pair by pair with r_u in place of floor(r_u + U); links of all weights, somebody absent."""
    generator = np.random.default_rng(5)
    weights = np.triu(CLIQUES * generator.uniform(0.5, 2, (N, N)), 1)
    weights += weights.T
    present = np.ones((1, N), bool)
    present[0, 1] = False
    cosine = hp.Cosine(hp.Graph(weights, present), 2.5, passed, loops)
    weights = np.float32(weights).astype(float) * present[0] * present[0][:, None]
    far = (weights == 0) & ~np.eye(N, dtype=bool) & present[0] & present[0][:, None]
    rates = 2.5 * weights.sum(1) / np.maximum(far.sum(1), 1)
    shown = generator.normal(size=(N, 4))
    expected = cost(shown, weights, far * rates[:, None], passing(weights, passed, loops), present[0])
    found = cosine.cost(jnp.asarray(shown), 7, expected=True)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found == cosine.cost(jnp.asarray(shown), 8, expected=True)
    assert found != cosine.cost(jnp.asarray(shown), 8)


@pytest.mark.parametrize("graph", [nx.karate_club_graph(), nx.star_graph(4)], ids=["club", "star"])
def test_numbers_of_negatives(graph):
    """Where all show the same every negative costs 1 and links nothing, so that n·F counts them: 5 per link on average.

    The middle of a star has no strangers: only the links of the leaves are counted.
    """
    weights = (nx.to_numpy_array(graph) > 0).astype(float)
    n, rounds = len(weights), 400
    far = (weights == 0) & ~np.eye(n, dtype=bool)
    drawing = far.any(1)
    cosine = hp.Cosine(hp.Graph(weights), 5.0, seed=2)
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
    """A server where there is one in the program; matrices where a message holds p×p numbers."""
    _, params, kernel = setting()
    data = hp.Data(jax.tree.map(lambda part: part[0], setting()[0]), None)
    for form in ("blocks", "products", "peers"):
        algorithm = BiGFed(2, 0.1, 0.1, hp.Cosine(hp.Graph(CLIQUES)), form)
        places = sendings(algorithm.program(PROBLEM), hp.Bilevel(params[0], kernel), data, N)
        central = any(isinstance(place.node, Server) or getattr(place.node, "by", "") == "exact" for place in places)
        assert (algorithm.declares.network == "a server") == central
        assert algorithm.declares.matrices == any(place.floats > (2 * W) ** 2 for place in places)
        assert ("own params" if form == "blocks" else "what is shown") in algorithm.declares.sends
        assert ON_GRAPHS[f"BiGFed, {form}"] == algorithm.declares


# ------------------------------------------------- the implicit function


def test_parts_add_up_to_the_derivative_of_the_damped_problem():
    """d/dφ F(φ, θ*(φ)), θ_i* = argmin g_i + ½ε‖θ − θ_i^k‖², at stationary θ^k: by blocks, by products, by Newton."""
    data, params, kernel = setting(1)
    damping, cosine = 0.3, hp.Cosine(hp.Graph(CLIQUES), 2.0)
    x, y = jnp.asarray(data[0][..., 0]), jnp.asarray(data[1])
    # Stationary: scale every θ_i so that its slope is the least-squares fit.
    best = jnp.mean(x * y, axis=1) / jnp.mean(x**2, axis=1)
    slopes = jax.vmap(coefficients, (0, None))(jnp.asarray(params), jnp.asarray(kernel))
    at = jnp.asarray(params).at[..., 1].multiply(best[:, None] / slopes)

    def damped(theta, phi, start, batch):
        return PROBLEM.inner(theta, phi, batch) + 0.5 * damping * jnp.sum((theta - start) ** 2)

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
    hypers = np.broadcast_to(kernel, (N, W, W))
    for algorithm in (  # with an inner step that moves nothing, as θ is stationary
        BiGFed(1, 1.0, 1e-3, cosine, "blocks", "hessian", damping),
        BiGFed(1, 1.0, 1e-3, cosine, "products", "gauss-newton", damping),
    ):
        found = hp.optimise(PROBLEM, algorithm, EVERYBODY, at, hypers, data, None, jax.random.key(0))
        np.testing.assert_allclose(kernel - found.hypers[0], truth, atol=1e-9)


def test_only_gauss_newton_has_no_negative_eigenvalue():
    """Away from the fit the Hessian of a product of layers is indefinite; at it, of rank 1, and both are the same."""
    data, params, kernel = setting(2)
    batch, kernel = tuple(jnp.asarray(part[0]) for part in data), jnp.asarray(kernel)
    best = np.mean(data[0][0, :, 0] * data[1][0]) / np.mean(data[0][0] ** 2)
    away = jnp.asarray(params[0])
    fitted = away.at[:, 1].multiply(best / coefficients(away, kernel)[0])

    @jax.jit
    def blocks(at):
        return [Bend(PROBLEM, curvature, 0.0, at, kernel, batch).blocks()[0] for curvature in CURVATURES]

    (hessian, newton), (there, also) = (map(np.linalg.eigvalsh, blocks(at)) for at in (away, fitted))
    assert hessian.min() < -0.1
    for values in (newton, there):
        assert values.max() > 0.1
        np.testing.assert_allclose(values[:-1], 0, atol=1e-9)
    np.testing.assert_allclose(there, also, atol=1e-9)


# ------------------------------------------------------- own costs, no graph


def test_without_a_graph_it_ends_where_own_hypergradients_are_zero():
    """x_L by NumPy, with a server and with peers at falling steps; several inner steps, blocks after them."""
    problem, params, hypers, first, second = quadratic(4, 2)
    end = outer_fixed_points(first, second)["x_L"]
    exact = BiGFed(300, 0.3, 0.2, curvature="hessian", damping=0.0, inner_steps=2, blocks_at="after")
    network, key = hp.networks.FullyConnected(4), jax.random.key(0)
    found = hp.optimise(problem, exact, network, params, hypers, first, second, key)
    np.testing.assert_allclose(found.hypers, np.broadcast_to(end, hypers.shape), atol=1e-8)
    peers = BiGFed(4000, hp.Power(0.5, 0.6), 0.2, form="peers", curvature="hessian", damping=0.0, rounds=3)
    alone = hp.optimise(problem, peers, hp.networks.DirectedRing(4), params, hypers, first, second, key)
    assert np.abs(alone.hypers - end).max() < 0.02 * np.abs(np.asarray(hypers) - end).max()


def test_own_costs_are_added_to_the_graphs():
    """One step along the sum of both: with either alone, the same θ, so that changes of φ add up."""
    data, _, kernel = setting()
    cosine = hp.Cosine(hp.Graph(CLIQUES), 1.0)

    def outer(params, hyper, batch):
        return jnp.sum(residuals(params, hyper, batch) ** 2)

    both = hp.GraphProblem.least_squares(residuals, represent, outer)
    changes = [
        np.asarray(run(BiGFed(1, 0.1, 0.02, graph, "blocks"), outer=data, problem=problem).hypers)[0] - kernel
        for graph, problem in ((cosine, both), (cosine, PROBLEM), (None, both))
    ]
    assert np.abs(changes[2]).max() > 1e-3
    np.testing.assert_allclose(changes[0], changes[1] + changes[2], atol=1e-12)


# ----------------------------------------------------------------- engines


@pytest.mark.parametrize("engine", [hp.simulate.run, hp.shard.run, hp.peer.run])
def test_stacked_messages_are_told_apart(engine):
    """Every receiver weighs senders by their number; those it does not hear are rows of zeros."""
    links = np.random.default_rng(0).random((N, N)) < 0.5
    links |= np.roll(np.eye(N, dtype=bool), 1, axis=1)  # a ring, so that all are joined
    np.fill_diagonal(links, False)
    sent = np.arange(2.0 * N).reshape(N, 2) + 1

    def receive(state, inbox, ctx):
        return jnp.arange(1.0, N + 1) @ inbox.total

    program = Exchange(lambda state, ctx: state, receive, "ones", "stack")
    network = hp.networks.Trace(N, links[None])
    found = engine(program, network, jnp.asarray(sent), jnp.zeros(N), jax.random.key(0))
    np.testing.assert_allclose(found.states, links.T @ (np.arange(1, N + 1)[:, None] * sent))
    assert found.floats == 2


def test_weights_of_stacked_messages_are_refused():
    with pytest.raises(hp.InvalidInput, match=r"Exchange\.weights.*push.*ones"):
        Exchange(lambda state, ctx: state, lambda state, inbox, ctx: state, reduce="stack")


def test_peers_say_the_same_by_bytes_and_survive_loss():
    network = hp.networks.RandomDirected(N, (0.5, 0.9), seed=1)
    algorithm = BiGFed(5, 0.05, 0.03, hp.Cosine(hp.Graph(CLIQUES), 2.0), "peers", rounds=2)
    simulated = run(algorithm, network)
    np.testing.assert_allclose(run(algorithm, network, run=hp.peer.run).hypers, simulated.hypers, atol=1e-9)
    assert np.ptp(simulated.hypers, axis=0).max() > 1e-6  # on such links peers agree only in the long run
    lossy = run(BiGFed(200, hp.Power(0.05, 1), 0.03, algorithm.cosine, "peers"), network, faults=hp.Faults(loss=0.2))
    assert np.ptp(lossy.hypers, axis=0).max() < 0.05
    assert np.abs(np.asarray(lossy.hypers) - setting()[2]).max() > 0.05
    with pytest.raises(hp.InvalidInput, match=r"faults.*reliable"):
        run(BiGFed(1, 0.1, 0.1, algorithm.cosine), faults=hp.Faults(loss=0.1))


class Shown(eqx.Module):
    shown: jax.Array
    scale: jax.Array


def test_some_strangers_stand_for_all():
    """Two neighbours who hear two of four strangers at a time step, on average, along what a server computes."""
    weights = np.zeros((N, N))
    weights[0, 1] = weights[1, 0] = 1
    cosine = hp.Cosine(hp.Graph(weights), 4.0, self_loops=True)  # r = 1: every stranger is drawn once
    shown, found = jnp.asarray(np.random.default_rng(3).normal(size=(N, 4))), []
    program = Sequence(*message_passing(cosine))
    for absent in itertools.combinations(range(2, N), 2):
        links = ~np.eye(N, dtype=bool)
        links[np.ix_(absent, (0, 1))] = links[np.ix_((0, 1), absent)] = False
        network = hp.networks.Trace(N, links[None])
        states = Shown(shown, jnp.zeros(N))
        found.append(hp.simulate.run(program, network, states, jnp.zeros(N), jax.random.key(0)).states.shown[:2])
    np.testing.assert_allclose(np.mean(found, axis=0), jax.grad(cosine.cost)(shown, 0)[:2], atol=1e-9)
    assert np.ptp(found, axis=0).max() > 1e-3


# ----------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "field", "allowed"),
    [
        (lambda: BiGFed(-1, 0.1, 0.1), "BiGFed.iterations", "from 0"),
        (lambda: BiGFed(1, 0.0, 0.1), "BiGFed.outer_step", "above 0"),
        (lambda: BiGFed(1, 0.1, float("nan")), "BiGFed.inner_step", "above 0"),
        (lambda: BiGFed(1, 0.1, 0.1, damping=-1), "BiGFed.damping", "0 or more"),
        (lambda: BiGFed(1, 0.1, 0.1, inner_steps=0), "BiGFed.inner_steps", "from 1"),
        (lambda: BiGFed(1, 0.1, 0.1, batch=0), "BiGFed.batch", "from 1"),
        (lambda: BiGFed(1, 0.1, 0.1, rounds=0), "BiGFed.rounds", "from 1"),
        (lambda: BiGFed(1, 0.1, 0.1).program(hp.Problem(PROBLEM.inner, PROBLEM.outer)), "BiGFed.curvature", "hessian"),
        (
            lambda: BiGFed(1, 0.1, 0.1, hp.Cosine(hp.Graph(CLIQUES)), curvature="hessian").program(
                hp.Problem(PROBLEM.inner, PROBLEM.outer)
            ),
            "problem",
            "GraphProblem",
        ),
        (lambda: run(BiGFed(1, 0.1, 0.1, hp.Cosine(hp.Graph(np.ones((3, 3)) - np.eye(3))))), "graph", "6"),
        (lambda: hp.Cosine(hp.Graph(CLIQUES), -1), "Cosine.negatives", "above 0"),
        (lambda: hp.Cosine(hp.Graph(CLIQUES), seed=-1), "Cosine.seed", "from 0"),
        (lambda: hp.Graph(np.ones((2, 3))), "graph.weights", "n×n"),
        (lambda: hp.Graph(np.eye(3)), "graph.weights", "diagonal"),
        (lambda: hp.Graph(np.triu(np.ones((3, 3)), 1)), "graph.weights", "undirected"),
        (lambda: hp.Graph(-CLIQUES), "graph.weights", "0 or more"),
        (lambda: hp.Graph(CLIQUES, np.ones((2, N), bool)), "graph.present", "1, 6"),
        (lambda: hp.Graph(CLIQUES, np.zeros((1, N), bool)), "graph.present", "somebody"),
    ],
)
def test_what_cannot_be_used_is_refused(make, field, allowed):
    with pytest.raises(hp.InvalidInput) as refused:
        make()
    assert refused.value.field == field
    assert allowed in refused.value.allowed


@pytest.mark.parametrize("options", [{"form": "star"}, {"curvature": "fisher"}, {"blocks_at": "now"}])
def test_unknown_choices_are_named(options):
    # Under beartype a wrong literal is refused before the option's own check; both name what was given.
    with pytest.raises((hp.InvalidInput, TypeCheckError), match=next(iter(options.values()))):
        BiGFed(1, 0.1, 0.1, **options)
