"""Hypers tied by a graph: closed forms on quadratics, all engines, and refused options."""

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from closed_forms import data, least_squares
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.algorithms import Ties
from hyperpush.methods.registry import build, table
from hyperpush.tasks.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")

N = 4
LINKS = [(0, 1), (1, 2, 0.5), ("3", "1", 2.0)]
WEIGHTS = np.array([[0, 1, 0, 0], [1, 0, 0.5, 2], [0, 0.5, 0, 0], [0, 2, 0, 0]])
LAPLACIAN = np.diag(WEIGHTS.sum(1)) - WEIGHTS
FULL = hp.networks.FullyConnected(N)


def sgd(rate):
    return hp.optimizer("sgd", learning_rate=rate)


def shared(strength, steps=150, **options):
    return hp.PDBO(hp.SGP(60, 0.4), hp.HGP(60, 1, 0.4), sgd(0.5), steps, ties=Ties(LINKS, strength), **options)


def alone(graph=LINKS, strength=0.05, steps=600):
    return hp.PDBO(
        hp.LocalSGD(80, 0.4), hp.hypergradients.LocalGradient(8), sgd(0.1), steps, ties=Ties(graph, strength)
    )


def tied_optimum(made, strength):
    """Return the minimizer of F̄ + s·Σ a_uv‖λ_u − λ_v‖².

    It solves (1/n)Rᵀ(Rλ − r) + 2s·Lλ = 0, where L is the graph's Laplacian.
    """
    rows, right = least_squares(made)
    ties = 2 * strength * np.kron(LAPLACIAN, np.eye(made.hypers.shape[1]))
    return np.linalg.solve(rows.T @ rows / N + ties, rows.T @ right / N).reshape(made.hypers.shape)


def tied_optimum_alone(made, strength):
    """Return the tied optimum for separate inner problems: client i's params are A_i⁻¹(b_i − C_iᵀλ_i)."""
    first, second = data(made)
    inverse, h = np.linalg.inv(first["hessian"]), made.hypers.shape[1]
    system, right = 2 * strength * np.kron(LAPLACIAN, np.eye(h)), np.zeros((N, h))
    for i in range(N):
        slope = -second["map"][i] @ inverse[i] @ first["coupling"][i].T
        misfit = second["target"][i] - second["map"][i] @ inverse[i] @ first["linear"][i]
        system[i * h : (i + 1) * h, i * h : (i + 1) * h] += slope.T @ slope + np.eye(h)
        right[i] = slope.T @ misfit + second["hyper_target"][i]
    return np.linalg.solve(system, right.ravel()).reshape(N, h)


def test_neighbors_meet_at_the_optimum_of_the_penalty():
    made = quadratic(N, 1)
    best = tied_optimum(made, 0.05)
    assert np.linalg.norm(best - tied_optimum(made, 0.0)) > 0.2
    found = hp.solve(made, shared(0.05), FULL, key=0)
    np.testing.assert_allclose(found.hypers, best, atol=1e-7)
    free = hp.solve(made, shared(0.0, steps=2), FULL, key=0)
    without = hp.solve(made, shared(0.0, steps=2).with_options(ties=None), FULL, key=0)
    np.testing.assert_array_equal(free.hypers, without.hypers)
    # Each of two steps takes one round with three hypers.
    assert free.costs.rounds == without.costs.rounds + 2
    assert free.costs.floats == without.costs.floats + 2 * 3
    assert free.costs.bytes > without.costs.bytes


@pytest.mark.parametrize("loss", [0.0, 0.4])
@pytest.mark.long
def test_directed_links_that_come_go_and_lose_messages_end_at_the_same_point(loss):
    """The last received value stands for a silent neighbor, so the fixed point does not depend on the links."""
    made, engine = quadratic(N, 2), hp.Simulate(faults=hp.Faults(loss=loss) if loss else None)
    best = tied_optimum_alone(made, 0.05)
    assert np.linalg.norm(best - tied_optimum_alone(made, 0.0)) > 0.2
    found = hp.solve(made, alone(), hp.networks.RandomDirected(N, probability=(0.2, 0.6)), key=0, engine=engine)
    np.testing.assert_allclose(found.hypers, best, atol=1e-7)


@pytest.mark.long
def test_private_clients_on_links_that_lose_messages_end_where_clean_ones_do():
    """Without noise and clipping to speak of, both take the same steps over the same links."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(N, 4, 2)))
    made = hp.Task(
        inner=lambda x, h, a: jnp.sum((x - h - a) ** 2 * (1 + a**2), axis=-1) / 4,
        outer=lambda x, h, a: jnp.sum((x - a - 1) ** 2, axis=-1),
        params=jnp.zeros(2), hypers=jnp.zeros(2), train=rows, validation=rows[:, ::-1],
    )  # fmt: skip
    method = hp.PDBO(
        hp.SGP(40, 0.1), hp.TrackedHGP(steps=60, step_size=0.4, pushes=3), sgd(0.5), 10,
        ties=Ties([(0, 1), (1, 2, 0.5), (2, 3, 2.0)], 0.05),
    )  # fmt: skip
    private = made.private(clip=1e3, curvature=1e3, coupling=1e3, noise=hp.privacy.Gaussian(1e-16))
    engine = hp.Simulate(faults=hp.Faults(loss=0.2))
    clean, quiet = (hp.solve(task, method, hp.networks.Ring(N), key=0, engine=engine) for task in (made, private))
    assert np.linalg.norm(clean.hypers) > 0.1
    np.testing.assert_allclose(quiet.hypers, clean.hypers, atol=1e-6)
    assert quiet.status.converged is not True


@pytest.mark.parametrize("engine", [hp.Shard(devices=2), hp.Threads()], ids=["shard", "threads"])
def test_engines_agree(engine):
    made, network, method = quadratic(N, 1), hp.networks.RandomDirected(N), alone(steps=3)
    expected = hp.solve(made, method, network, key=0)
    found = hp.solve(made, method, network, key=0, engine=engine)
    np.testing.assert_allclose(found.hypers, expected.hypers, rtol=1e-9)
    assert found.costs == expected.costs


def test_a_party_needs_its_own_links_only():
    """With only the links of client u, u moves as with the whole graph."""
    made = quadratic(N, 1)
    whole = hp.solve(made, alone(steps=1), FULL, key=0).hypers
    links = [link for link in LINKS if "3" in map(str, link[:2])]
    own = hp.solve(made, alone(links, steps=1), FULL, key=0).hypers
    np.testing.assert_array_equal(own[3], whole[3])
    assert np.abs(own[0] - whole[0]).max() > 1e-3


def test_entries_are_tied_by_name_and_weights_of_examples_never():
    hypers = {"own": jnp.zeros(()), "tied": jnp.zeros(2), "examples": hp.per_example(jnp.zeros((3, 2)))}
    task = hp.Task(
        inner=lambda x, h, a: (x - a) ** 2 * (1 + h["examples"]),
        outer=lambda x, h, b: jnp.sum((h["tied"] - b[:, None]) ** 2, -1) + (h["own"] - b) ** 2,
        params=0.0, hypers=hypers, train=jnp.zeros((3, 2)), validation=jnp.array([[0.0], [3.0], [7.0]]),
    )  # fmt: skip
    method = hp.PDBO(hp.LocalSGD(1, 0.1), hp.hypergradients.LocalGradient(), sgd(0.1), 150)

    def solve(entries):
        ties = Ties(nx.path_graph(2), 1.0, entries=entries)
        return hp.solve(task, method.with_options(ties=ties), hp.networks.Ring(3), key=0).hypers

    named = solve(("tied",))
    np.testing.assert_allclose(named["tied"], [[1, 1], [2, 2], [7, 7]], atol=1e-6)
    np.testing.assert_allclose(named["own"], [0, 3, 7], atol=1e-6)
    tied = Ties([(0, 1)], 1.0).select(task.hypers, task.by_example)
    assert [name for name, each in tied.items() if each is not None] == ["own", "tied"]
    with pytest.raises(hp.InvalidInput, match=r"ties\.entries: got \['examples'\]"):
        solve(("examples",))
    with pytest.raises(hp.InvalidInput, match=r"ties\.entries: got 'tide'"):
        solve(("tide",))


def test_a_strength_is_chosen_on_a_holdout_set():
    """Two clients have noisy validation examples of the same truth; on other examples a strong tie is better."""
    draws = np.random.default_rng(0).normal(size=(2, 3))
    task = hp.Task(
        inner=lambda x, own, a: (x - a) ** 2, outer=lambda x, own, b: (own - b) ** 2, params=0.0, hypers=0.0,
        train=jnp.zeros((2, 1)), validation=jnp.asarray(draws), holdout=jnp.zeros((2, 1)),
    )  # fmt: skip
    method = hp.PDBO(hp.LocalSGD(1, 0.1), hp.hypergradients.LocalGradient(), sgd(0.02), 400, ties=Ties([(0, 1)], 0.0))
    strengths = [0.0, 1.0, 10.0]
    found = hp.tune(task, method, hp.networks.Ring(2), key=0, over={"ties.strength": strengths}, on="holdout")
    half, middle = np.diff(draws.mean(1)) / 2, draws.mean()
    expected = [np.mean((middle + np.array([-1, 1]) * half / (1 + 2 * s)) ** 2) for s in strengths]
    np.testing.assert_allclose([row.score for row in found.rows], expected, rtol=1e-5)
    assert found.best_row.values["ties.strength"] == strengths[int(np.argmin(expected))] == 10.0


def test_strengths_of_ties_among_inner_params_are_learned():
    """The personal params form one array: client i owns row i, and its hyper is the logarithm of its tie's strength.

    Client i has the inner cost ½(x_i − a_i)² + ½·e^s_i·(x_1 − x_2)². Hence x_1 − x_2 = (a_1 − a_2)/(1 + 2t) with
    t = e^s_1 + e^s_2, and the mean of x_1 and x_2 does not depend on t. If the targets b_i have the same mean, the
    optimum satisfies 1 + 2t = (a_1 − a_2)/(b_1 − b_2).
    """

    def inner(x, log_strength, batch):
        client, value = batch
        own = x[client]
        return 0.5 * (own - value) ** 2 + 0.5 * jnp.exp(log_strength) * (own - x[1 - client]) ** 2

    def outer(x, log_strength, batch):
        client, value = batch
        return 0.5 * (x[client] - value) ** 2

    numbers = jnp.array([[0], [1]])
    task = hp.Task(
        inner=inner, outer=outer, params=jnp.zeros(2), hypers=-1.0,
        train=(numbers, jnp.array([[0.0], [8.0]])), validation=(numbers, jnp.array([[3.0], [5.0]])),
    )  # fmt: skip
    method = hp.PDBO(hp.SGP(200, 0.3), hp.HGP(200, 1, 0.3), sgd(0.4), 200)
    found = hp.solve(task, method, hp.networks.FullyConnected(2), key=0)
    assert np.exp(np.asarray(found.hypers)).sum() == pytest.approx((8 / 2 - 1) / 2, rel=1e-4)
    np.testing.assert_allclose(found.params[0], [3, 5], rtol=1e-4)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ([("0", "south")], r"ties\.graph: got 'south'"),
        ([(0, 7)], r"ties\.graph: got '7'"),
        ([(1, 1)], r"a link 1 – 1"),
        ([(0, 1), (1, 0)], "again"),
        ([(0, 1, 0.0), (1, 0)], "again"),
        (hp.networks.Graph(np.ones((3, 3)) - np.eye(3)), "a graph of 3 parties.*one of 4"),
        (nx.path_graph(["a", "b"]), r"ties\.graph: got 'a'"),
        (nx.empty_graph(7), r"ties\.graph: got '4'"),
        ([(0, 2)], "'0' – '2', which ring does not carry both ways"),
    ],
)
def test_a_graph_of_other_parties_is_refused(graph, said):
    made = quadratic(N, 1)
    with pytest.raises(hp.InvalidInput, match=said):
        hp.solve(made, alone(graph, steps=1), hp.networks.Ring(N), key=0)


def test_what_is_no_graph_is_refused():
    for graph in ([(0,)], [(0, 1, -1.0)], [(0, 1, float("nan"))], nx.DiGraph([(0, 1)]), "ring", [0, 1]):
        with pytest.raises(hp.InvalidInput, match=r"Ties\.graph"):
            Ties(graph, 1.0)
    with pytest.raises(hp.InvalidInput, match=r"^Ties\.graph: got array\(.*a list or an object of Graph of networkx$"):
        Ties(np.eye(40), 1.0)  # type: ignore
    with pytest.raises(hp.InvalidInput, match=r"Ties\.entries: got \(\); allowed: names"):
        Ties([(0, 1)], 1.0, entries=())
    with pytest.raises(hp.InvalidInput, match=r"ties\.entries: got \('x',\); allowed: None, because"):
        Ties([(0, 1)], 1.0, entries=("x",)).among(quadratic(N, 1))
    assert Ties([(np.int64(0), np.int32(1), np.float32(0.5))], 1.0) == Ties([(0, 1, 0.5)], 1.0)
    with pytest.raises(hp.InvalidInput, match=r"CDBO\.ties.*PDBO"):
        hp.CDBO(hp.SGP(1, 0.1), hp.HGP(1, 1, 0.1), sgd(0.1), 1, ties=Ties(LINKS, 1.0))
    weights = {"own": hp.per_example(jnp.zeros((2, 3)))}
    task = hp.Task(
        inner=lambda x, h, a: (x - a) ** 2 * h["own"], outer=lambda x, h, b: (x - b) ** 2, params=0.0, hypers=weights,
        train=jnp.zeros((2, 3)), validation=jnp.zeros((2, 1)),
    )  # fmt: skip
    with pytest.raises(hp.InvalidInput, match=r"ties\.entries.*per training example"):
        hp.solve(task, alone([(0, 1)], steps=1), hp.networks.Ring(2), key=0)


def test_a_table_says_the_same():
    method = alone([["0", "1"], ["1", "2", 0.5]])
    assert build("algorithms", table(method), "method") == method
