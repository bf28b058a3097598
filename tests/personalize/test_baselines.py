"""Baselines against what is known: equivalences, closed forms of quadratics, mixtures whose parts are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.errors import InvalidInput
from hyperpush.inner.step import Trained
from hyperpush.models.dense import MLP
from hyperpush.personalize.baselines import ClusteredFL, FedAvgPlus, FedEM, FedProx, PFedMe
from hyperpush.personalize.baselines.clustered import parted
from hyperpush.personalize.recipe import stacked
from hyperpush.personalize.recipes import MTL, Shared
from hyperpush.program import program_of

N, D = 4, 3
NETWORK = hp.networks.FullyConnected(N)
KEY = jax.random.key(0)
GENERATOR = np.random.default_rng(0)
CURVATURES, CENTRES = GENERATOR.uniform(0.5, 2, (N, D)), GENERATOR.normal(size=(N, D))


def cost(params, hyper, batch):
    """½(x − c)ᵀA(x − c), A diagonal; one example per client."""
    return 0.5 * jnp.sum(batch["curvature"] * (params - batch["centre"]) ** 2)


QUADRATIC = hp.Problem(cost, cost)
DATA = {"curvature": jnp.asarray(CURVATURES[:, None]), "centre": jnp.asarray(CENTRES[:, None])}


def trained(solver, problem, params, hypers, data, network=NETWORK):
    """Params and hypers after a solver's program."""
    data = hp.Data(data, data)
    return hp.simulate.run(program_of(solver, problem), network, Trained(params, hypers), data, KEY).states


def on_quadratics(solver):
    return np.asarray(trained(solver, QUADRATIC, jnp.zeros((N, D)), jnp.zeros(N), DATA).params)


def test_fedprox_is_near_fedavg():
    """One round of T steps x ← x − γ(A(x − c) + μ(x − x0)), by NumPy; without penalty it is FedAvg's."""
    mu, rate, epochs = 0.7, 0.2, 5
    x = np.zeros((N, D))
    for _ in range(2):
        start, x = x, x.copy()
        for _ in range(epochs):
            x = x - rate * (CURVATURES * (x - CENTRES) + mu * (x - start))
        x = np.broadcast_to(x.mean(0), x.shape)
    np.testing.assert_allclose(on_quadratics(FedProx(2, rate, mu, epochs)), x, rtol=1e-5)
    fedavg = on_quadratics(hp.FedAvg(2, rate, epochs))
    np.testing.assert_array_equal(on_quadratics(FedProx(2, rate, 0, epochs)), fedavg)
    assert np.abs(fedavg - x).max() > 0.01
    # FedAvg+ goes on alone from there.
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
    """θ_i(w) = (A + p)^{-1}(Ac + pw), and w where the mean of w − θ_i(w) is 0."""
    pull = 2.0
    keep = CURVATURES / (CURVATURES + pull)  # w − θ_i(w) = keep·(w − c)
    w = (keep * CENTRES).sum(0) / keep.sum(0)
    own = w - keep * (w - CENTRES)
    solver = PFedMe(150, 0.2, pull, common_rate=0.3, steps=20, local_rounds=1, mixing=0.9)
    np.testing.assert_allclose(on_quadratics(solver), own, atol=1e-4)


def test_groups_part_by_the_norm_and_the_direction_of_changes():
    sizes, far = np.array([1.0, 1, 1, 1]), 2.0
    changes = far * np.array([[1, 0], [1, 0.1], [-1, 0], [-1, 0.1]])  # no entry is above 2, the norms are
    one = np.zeros(4, np.int32)
    halves = parted(sizes, changes, one, still=0.4, moving=2.005)
    assert halves.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert parted(sizes, changes, one, still=0.4, moving=2.02).tolist() == [0] * 4  # all stand still
    assert parted(sizes, changes, one, still=0.05, moving=1.0).tolist() == [0] * 4  # the group still moves
    assert parted(np.array([3.0, 3, 1, 1]), changes, one, 0.4, 1.0).tolist() == [0] * 4  # large clients move it
    assert parted(sizes, changes, halves, 0.4, 1.0).tolist() == halves.tolist()  # like-minded ones stay together


def test_clustered_learning_finds_the_clusters():
    """Two pairs of clients with two centres: each pair ends at its own, all together they would end between."""
    centres = np.array([[3.0, 0], [-3.0, 1], [3.0, 0], [-3.0, 1]])
    data = {"curvature": jnp.ones((4, 1, 2)), "centre": jnp.asarray(centres[:, None])}
    start = jnp.zeros((4, 2)), jnp.zeros(4)
    found = trained(ClusteredFL(40, 0.3, still=0.05, moving=0.5), QUADRATIC, *start, data).params
    np.testing.assert_allclose(found, centres, atol=0.01)
    never = trained(ClusteredFL(40, 0.3, still=0.05, moving=10), QUADRATIC, *start, data).params
    together = trained(hp.FedAvg(40, 0.3), QUADRATIC, *start, data).params
    np.testing.assert_allclose(never, together, rtol=1e-5)
    np.testing.assert_allclose(together, np.broadcast_to(centres.mean(0), (4, 2)), atol=1e-3)


@pytest.fixture(scope="module")
def mixture():
    """Two rules for the label, x₁ > 0 and x₁ < 0: clients 0 and 1 follow the first, 2 and 3 the second."""
    inputs = GENERATOR.normal(size=(4, 40, 2)).astype(np.float32)
    labels = (inputs[..., 0] > 0).astype(np.int64)
    labels[2:] = 1 - labels[2:]
    return hp.ragged([(x[:size], y[:size]) for x, y, size in zip(inputs, labels, (40, 30, 25, 40), strict=True)])


MODEL = MLP(2, 2)


@pytest.mark.parametrize(("averaging", "network"), [("server", NETWORK), ("gossip", hp.networks.Ring(4))])
def test_fedem_recovers_a_mixture_with_known_parts(mixture, averaging, network):
    params, hypers = stacked(MTL(models=2), MODEL, 4, jax.random.key(3))
    solver = FedEM(MODEL, 60, 0.5, batch=10, averaging=averaging)
    found = trained(solver, MTL(models=2).problem(MODEL), params, hypers, mixture, network)
    own = np.exp(np.asarray(found.hyper))
    np.testing.assert_allclose(own.sum(1), 1, rtol=1e-5)
    assert own.max(1).min() > 0.95
    chosen = own.argmax(1)
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]


def test_fedem_with_one_model_is_fedavg(mixture):
    shared, hypers = stacked(Shared(), MODEL, 4, jax.random.key(3))
    one = jax.tree.map(lambda leaf: leaf[:, None], shared)
    for averaging in ("server", "gossip"):
        em = FedEM(MODEL, 2, 0.5, batch=10, l2=0.01, averaging=averaging)
        found = trained(em, MTL(models=1).problem(MODEL), one, jnp.zeros((4, 1)), mixture)
        fedavg = hp.FedAvg(2, 0.5, batch=10, averaging=averaging)
        plain = trained(fedavg, Shared().problem(MODEL, 0.01), shared, hypers, mixture)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:, 0], b, atol=1e-6), found.params, plain.params)
        np.testing.assert_allclose(found.hyper, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FedProx(1, 0.1, -1), "FedProx.penalty"),
        (lambda: FedProx(-1, 0.1, 1), "FedProx.rounds"),
        (lambda: FedAvgPlus(hp.FedAvg(1, 0.1), 0.1, -1), "FedAvgPlus.epochs"),
        (lambda: PFedMe(1, 0.1, pull=0), "PFedMe.pull"),
        (lambda: PFedMe(1, 0.1, steps=0), "PFedMe.steps"),
        (lambda: ClusteredFL(1, 0.1, moving=-1), "ClusteredFL.moving"),
        (lambda: FedEM(MODEL, 1, 0.1, epochs=0), "FedEM.epochs"),
    ],
)
def test_bad_options_are_named(make, field):
    with pytest.raises(InvalidInput) as error:
        make()
    assert error.value.field == field
