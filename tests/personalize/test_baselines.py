"""Baselines compared with known results: equivalences, closed forms of quadratics, and mixtures of known parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import Layered

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.personalize import DA, MTL, Product, Shared
from hyperpush.personalize.baselines import ClusteredFL, FedAvgPlus, FedEM, FedProx, PFedMe
from hyperpush.personalize.baselines.clustered import part_groups

N, D = 4, 3
NETWORK = hp.networks.FullyConnected(N)
KEY = jax.random.key(0)
GENERATOR = np.random.default_rng(0)
CURVATURES, CENTRES = GENERATOR.uniform(0.5, 2, (N, D)), GENERATOR.normal(size=(N, D))


def cost(params, hyper, batch):
    """Return ½(x − c)ᵀA(x − c) with diagonal A; each client has one example."""
    return 0.5 * jnp.sum(batch["curvature"] * (params - batch["centre"]) ** 2, axis=1)


def quadratics(curvatures, centres):
    data = {"curvature": jnp.asarray(curvatures[:, None]), "centre": jnp.asarray(centres[:, None])}
    start = jnp.zeros(centres.shape[1])
    return hp.Task(inner=cost, outer=cost, params=start, hypers=0.0, train=data, outer_on="train")


TASK = quadratics(CURVATURES, CENTRES)


def on_quadratics(solver, task=TASK):
    return np.asarray(hp.train(task, solver, NETWORK, key=KEY).params)


def test_fedprox_is_near_fedavg():
    """One round of T steps x ← x − γ(A(x − c) + μ(x − x0)), by NumPy; without penalty FedProx equals FedAvg."""
    mu, rate, epochs = 0.7, 0.2, 5
    x = np.zeros((N, D))
    for _ in range(2):
        start, x = x, x.copy()
        for _ in range(epochs):
            x = x - rate * (CURVATURES * (x - CENTRES) + mu * (x - start))
        x = np.broadcast_to(x.mean(0), x.shape)
    np.testing.assert_allclose(on_quadratics(FedProx(2, rate, epochs, penalty=mu)), x, rtol=1e-5)
    fedavg = on_quadratics(hp.FedAvg(2, rate, epochs))
    np.testing.assert_array_equal(on_quadratics(FedProx(2, rate, epochs, penalty=0)), fedavg)
    assert np.abs(fedavg - x).max() > 0.01
    # FedAvg+ continues with local steps from FedAvg's params.
    np.testing.assert_allclose(
        on_quadratics(FedAvgPlus(hp.FedAvg(2, rate, epochs), 0.1)),
        fedavg - 0.1 * CURVATURES * (fedavg - CENTRES),
        rtol=1e-5,
    )
    np.testing.assert_array_equal(on_quadratics(FedAvgPlus(hp.FedAvg(2, rate, epochs), 0.1, 0)), fedavg)


def test_gossip_of_all_with_all_is_the_servers_mean():
    by_server = on_quadratics(hp.FedAvg(3, 0.2, 2, weighted=False))
    np.testing.assert_allclose(on_quadratics(hp.FedAvg(3, 0.2, 2, averaging="gossip")), by_server, rtol=1e-5)


def test_pfedme_ends_at_the_minimum_of_the_envelopes():
    """The local models are θ_i(w) = (A + p)^{-1}(Ac + pw); at the minimum w, the mean of w − θ_i(w) is 0."""
    pull = 2.0
    keep = CURVATURES / (CURVATURES + pull)  # w − θ_i(w) = keep·(w − c)
    w = (keep * CENTRES).sum(0) / keep.sum(0)
    own = w - keep * (w - CENTRES)
    solver = PFedMe(150, 0.2, pull, common_step_size=0.3, inner_steps=20, local_steps=1, mixing=0.9)
    np.testing.assert_allclose(on_quadratics(solver), own, atol=1e-4)


def test_groups_part_by_the_norm_and_the_direction_of_changes():
    sizes, far = np.array([1.0, 1, 1, 1]), 2.0
    # all entries are at most 2, but the norms are larger
    changes = far * np.array([[1, 0], [1, 0.1], [-1, 0], [-1, 0.1]])
    one = np.zeros(4, np.int32)
    halves = part_groups(sizes, changes, one, still=0.4, moving=2.005)
    assert halves.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert part_groups(sizes, changes, one, still=0.4, moving=2.02).tolist() == [0] * 4  # no client changes much
    # the group as a whole still changes
    assert part_groups(sizes, changes, one, still=0.05, moving=1.0).tolist() == [0] * 4
    # large clients dominate the group's change
    assert part_groups(np.array([3.0, 3, 1, 1]), changes, one, 0.4, 1.0).tolist() == [0] * 4
    assert part_groups(sizes, changes, halves, 0.4, 1.0).tolist() == halves.tolist()  # similar clients stay together


def test_clustered_learning_finds_the_clusters():
    """Two pairs of clients end at their own two centers; one model for all would end between."""
    centres = np.array([[3.0, 0], [-3.0, 1], [3.0, 0], [-3.0, 1]])
    task = quadratics(np.ones((4, 2)), centres)
    found = on_quadratics(ClusteredFL(40, 0.3, still=0.05, moving=0.5), task)
    np.testing.assert_allclose(found, centres, atol=0.01)
    never = on_quadratics(ClusteredFL(40, 0.3, still=0.05, moving=10), task)
    together = on_quadratics(hp.FedAvg(40, 0.3), task)
    np.testing.assert_allclose(never, together, rtol=1e-5)
    np.testing.assert_allclose(together, np.broadcast_to(centres.mean(0), (4, 2)), atol=1e-3)


def test_who_is_drawn_to_another_model_leaves_padding_out():
    """Clients have 1 to 4 examples in padded rows; a step from 0 is the step size times their mean, plus pull."""
    rows = [np.full((count, 1), float(count)) for count in (1, 2, 3, 4)]
    task = hp.Task(
        inner=lambda x, hyper, c: 0.5 * jnp.sum((x - c) ** 2, axis=1),
        outer=lambda x, hyper, c: 0.5 * jnp.sum((x - c) ** 2, axis=1),
        params=jnp.zeros(1),
        hypers=0.0,
        train=rows,
        outer_on="train",
    ).with_l2(1.0)
    x = np.zeros(4)
    for _ in range(3):  # steps of θ: towards c by f, and towards 0 by the penalty and by the common model
        x = x - 0.1 * ((x - np.arange(1.0, 5)) + x + 2 * x)
    own = hp.train(task, PFedMe(1, 0.1, 2.0, inner_steps=3, local_steps=1), NETWORK, key=0)
    np.testing.assert_allclose(own.params[:, 0], x, rtol=1e-5)
    mean = np.average(x, weights=np.arange(1, 5))
    together = hp.train(task, FedProx(1, 0.1, 3, penalty=2.0), NETWORK, key=0)
    np.testing.assert_allclose(together.params[:, 0], mean, rtol=1e-5)


@pytest.fixture(scope="module")
def mixture():
    """Return examples of two rules, x₁ > 0 and x₁ < 0: clients 0 and 1 follow the first, 2 and 3 the second."""
    inputs = GENERATOR.normal(size=(4, 40, 2)).astype(np.float32)
    labels = (inputs[..., 0] > 0).astype(np.int64)
    labels[2:] = 1 - labels[2:]
    return [(x[:size], y[:size]) for x, y, size in zip(inputs, labels, (40, 30, 25, 40), strict=True)]


MODEL = Layered(2, 2)


def posed(recipe, train, l2=0.0):
    return recipe.task(MODEL, train=train, outer_on="train", key=jax.random.key(3), l2=l2)


@pytest.mark.parametrize(("averaging", "network"), [("server", NETWORK), ("gossip", hp.networks.Ring(4))])
def test_fedem_recovers_a_mixture_with_known_parts(mixture, averaging, network):
    solver = FedEM(60, 0.5, batch_size=10, averaging=averaging)
    found = hp.train(posed(MTL(models=2), mixture), solver, network, key=KEY)
    own = np.exp(np.asarray(found.task.hypers["mtl"]))
    np.testing.assert_allclose(own.sum(1), 1, rtol=1e-5)
    assert own.max(1).min() > 0.95
    chosen = own.argmax(1)
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]


@pytest.mark.long
def test_fedem_with_one_model_is_fedavg(mixture):
    shared = posed(Shared(), mixture, 0.01)
    mixed = posed(MTL(models=1), mixture, 0.01)
    mixed = mixed.at(params=jax.tree.map(lambda leaf: leaf[:, None], shared.params))
    for averaging in ("server", "gossip"):
        found = hp.train(mixed, FedEM(2, 0.5, batch_size=10, averaging=averaging), NETWORK, key=KEY)
        plain = hp.train(shared, hp.FedAvg(2, 0.5, batch_size=10, averaging=averaging), NETWORK, key=KEY)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:, 0], b, atol=1e-6), found.params, plain.params)
        np.testing.assert_allclose(found.task.hypers["mtl"], 0, atol=1e-6)


def test_fedem_takes_tasks_of_mtl_only(mixture):
    for task, given in ((posed(Product([MTL(), DA()]), mixture), r"DA \+ MTL"), (TASK, "function")):
        with pytest.raises(InvalidInput, match=rf"task: got 'a task of {given}'; allowed: .*MTL\(\).task"):
            hp.train(task, FedEM(1, 0.1), NETWORK, key=0)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FedProx(1, 0.1, penalty=-1), "FedProx.penalty"),
        (lambda: FedProx(-1, 0.1, penalty=1), "FedProx.steps"),
        (lambda: FedAvgPlus(hp.FedAvg(1, 0.1), 0.1, -1), "FedAvgPlus.epochs"),
        (lambda: PFedMe(1, 0.1, pull=0), "PFedMe.pull"),
        (lambda: PFedMe(1, 0.1, inner_steps=0), "PFedMe.inner_steps"),
        (lambda: ClusteredFL(1, 0.1, moving=-1), "ClusteredFL.moving"),
        (lambda: FedEM(1, 0.1, epochs=0), "FedEM.epochs"),
    ],
)
def test_bad_options_are_named(make, field):
    with pytest.raises(InvalidInput) as error:
        make()
    assert error.value.field == field
