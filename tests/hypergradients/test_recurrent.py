"""Recurrent backpropagation compared with B̄(I − Ā)^{-1}c_x + c_λ, built in NumPy from the network's means."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from repeats import some
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.deploy.train_first import TrainFirst
from hyperpush.engines.simulate import evaluate
from hyperpush.hypergradients import HypergradientState
from hyperpush.hypergradients.recurrent import known_links
from hyperpush.tasks.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")
VARIANTS = ["gradient-first", "gradient-after"]


def series(made, means, step, variant, terms=None):
    """Return c_λ + B̄ Σ_{m<terms} Ā^m c_x of the quadratics at their params; `terms=None` takes the whole series."""
    first, second, x, hypers = jax.tree.map(np.asarray, (made.train, made.validation, made.params, made.hypers))
    n, h, d = first["coupling"].shape
    mass = means.stationary()
    along_x = np.einsum("nij,ni->nj", second["map"], np.einsum("nij,nj->ni", second["map"], x) - second["target"])
    source = (along_x / n / mass[:, None]).ravel()
    mix = np.kron(means.weights, np.eye(d))  # row i: Σ_j p̄_{i→j} u_j
    block = np.zeros((n * d, n * d))
    down = np.zeros((n * h, n * d))
    for i in range(n):
        block[i * d : i * d + d, i * d : i * d + d] = step / mass[i] * first["hessian"][i]
        down[i * h : i * h + h, i * d : i * d + d] = -step * first["coupling"][i]
    forward = mix - block if variant == "gradient-after" else (np.eye(n * d) - block) @ mix
    down = down if variant == "gradient-after" else down @ mix
    if terms is None:
        total = np.linalg.solve(np.eye(n * d) - forward, source)
    else:
        total, power = np.zeros(n * d), source
        for _ in range(terms):
            total, power = total + power, forward @ power
    return (hypers - second["hyper_target"]) / n + (down @ total).reshape(n, h)


def setting(clients, seed=0):
    made = quadratic(clients, seed)
    return made.at(params=made.params + jnp.asarray(np.random.default_rng(1).normal(size=made.params.shape)))


def draws(made, estimator, network, count, seed=3):
    """Return `count` independent estimates."""
    estimator = estimator.with_options(links="means").bind(network)
    links = known_links(estimator, network, None, made)
    states = HypergradientState(made.params, made.hypers, jnp.zeros_like(made.hypers), links)

    def one(key):
        return evaluate(estimator.program(made.problem), network, states, made.data, key)[0].value

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), count)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["DirectedRB", "VRHGP", "ExactRB"])
def test_without_chance_the_series_converges_to_the_target(kind, variant):
    made, network = setting(5), hp.networks.StaticUndirected(5, probability=0.6)
    truth = series(made, network.means(), 0.1, variant)
    estimator = getattr(hp.hypergradients, kind)(3000, 0.1, variant=variant)
    found = hp.hypergradient(made, estimator, network, key=0)
    assert np.linalg.norm(truth) > 0.1
    np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-8)
    assert found.costs.floats == 3000 * 4 * (2 if kind == "VRHGP" else 1)


@pytest.mark.parametrize("variant", [VARIANTS[0], pytest.param(VARIANTS[1], marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("estimator", "network"),
    [
        (partial(hp.hypergradients.DirectedRB, 12, 0.1), hp.networks.RandomDirected(4)),
        (partial(hp.hypergradients.DirectedRB, 12, 0.1, independent_batches=True), hp.networks.RandomDirected(4)),
        (partial(hp.hypergradients.DirectedRB, 12, 0.1), hp.networks.KOut(4, k=2)),
        (partial(hp.hypergradients.VRHGP, 12, 0.1, 1.0, 0.0), hp.networks.RandomDirected(4)),
        (partial(hp.hypergradients.ExactRB, 12, 0.1), hp.networks.RandomUndirected(4)),
    ],
    ids=["shared", "separate", "k-out", "vr-1-0", "exact"],
)
def test_estimates_are_unbiased_for_the_truncated_series(estimator, network, variant):
    made = setting(4)
    found = draws(made, estimator(variant=variant), network, 4000)
    truth = series(made, network.means(), 0.1, variant, terms=12)
    error, spread = np.abs(found.mean(0) - truth), found.std(0) / np.sqrt(len(found))
    assert np.all(spread > 0)
    assert np.all(error < 4 * spread)
    # The statistics are sharp enough to notice one term more or less.
    assert np.abs(series(made, network.means(), 0.1, variant, terms=11) - truth).max() > 4.5 * spread.max()


def test_weights_one_and_zero_give_directed_rb():
    made, network = setting(4), hp.networks.RandomDirected(4)
    plain = draws(made, hp.hypergradients.DirectedRB(30, 0.1), network, 3)
    weighted = draws(made, hp.hypergradients.VRHGP(30, 0.1, alpha=1, beta=0), network, 3)
    np.testing.assert_allclose(weighted, plain, rtol=1e-10)


def test_variance_reduction_reduces_variance():
    made, network = setting(3), hp.networks.RandomUndirected(3)
    truth = series(made, network.means(), 0.1, "gradient-after")
    errors = {
        alpha: np.linalg.norm(
            draws(made, hp.hypergradients.VRHGP(600, 0.1, alpha, beta, variant="gradient-after"), network, 60) - truth,
            axis=(1, 2),
        ).mean()
        for alpha, beta in ((1.0, 0.0), (0.9, 0.1))
    }
    assert errors[0.9] < 0.6 * errors[1.0]


def test_links_seen_while_training_are_the_default_and_serve_as_well():
    made, network = setting(4), hp.networks.RandomDirected(4)
    method = hp.hypergradients.VRHGP(800, 0.1)
    with pytest.raises(hp.InvalidInput, match=r'links: got None.*run hp\.train.*VRHGP\(…, links="means"\)'):
        hp.hypergradient(made, method, network, key=0)
    trained = hp.train(made, hp.SGP(4000, 0.1), network, key=5)
    known = known_links(method.with_options(links="means"), network, None, made)
    assert trained.links is not None
    assert known is not None
    for name in ("sent", "heard", "mass"):
        np.testing.assert_allclose(getattr(trained.links, name), getattr(known, name), atol=0.05)
    truth = hp.hypergradient(trained.task, method.with_options(links="means"), network, key=0).value
    seen = hp.hypergradient(trained.task, method, network, key=0).value
    by_hand = hp.hypergradient(trained.task, method, network, key=0, links=trained.links).value
    assert 0 < np.linalg.norm(seen - truth) < 0.1 * np.linalg.norm(truth)
    np.testing.assert_array_equal(seen, by_hand)
    # A party's task contains only the links that this party observed, so it cannot know all means.
    own = made.for_client(2)
    with pytest.raises(hp.InvalidInput, match=r"VRHGP\.links: got 'means'; allowed: 'observed'.*own links only"):
        known_links(method.with_options(links="means"), network, None, own)
    with pytest.raises(hp.InvalidInput, match=r"run hp\.train"):
        known_links(method, hp.networks.Ring(4), None, own)


@pytest.mark.parametrize("solver", [hp.DSGD(1500, 0.1), hp.FedAvg(3, 0.1, averaging="gossip")], ids=["dsgd", "fedavg"])
@pytest.mark.parametrize("kind", ["DirectedRB", "VRHGP", "ExactRB"])
@pytest.mark.long
def test_after_gossip_the_weights_of_gossip_are_differentiated(kind, solver):
    """The two iterations differ most on a star: push-sum gives its hub another weight ω*, gossip does not."""
    made, network = setting(5), hp.networks.Star(5)
    trained = hp.train(made, solver, network, key=0)
    estimator = getattr(hp.hypergradients, kind)(3000, 0.1)
    after = made.at(params=trained.params)
    wanted, other = (series(after, network.means(by), 0.1, "gradient-first") for by in ("gossip", "push"))
    assert np.linalg.norm(wanted - other) > 0.02 * np.linalg.norm(wanted)
    told = hp.hypergradient(after, estimator.with_options(weights="gossip"), network, key=0)
    for found in (hp.hypergradient(trained.task, estimator, network, key=0), told):
        np.testing.assert_allclose(found.value, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", some({"sgp": hp.SGP(300, 0.1), "dsgd": hp.DSGD(300, 0.1)}, ["dsgd"]))
def test_within_an_algorithm_the_links_of_all_trainings_are_kept(solver):
    made, network = quadratic(3, 1), hp.networks.RandomUndirected(3)
    outer = hp.optimizer("sgd", learning_rate=0.1)
    found = hp.solve(made, hp.PDBO(solver, hp.hypergradients.DirectedRB(5, 0.1), outer, 3), network, key=0)
    assert found.task.point is not None
    links, means = found.task.point.links, network.means(solver.weights)
    assert links is not None
    np.testing.assert_array_equal(links.rounds, 4 * 300)
    # The tolerance is 4 standard deviations of a mean over 1,200 rounds; one number in [0, 1] deviates by at most 1/2.
    np.testing.assert_allclose(links.sent, means.weights, atol=4 * 0.5 / np.sqrt(1200))
    np.testing.assert_allclose(links.heard, means.up.T, atol=4 * 0.5 / np.sqrt(1200))
    if isinstance(solver, hp.DSGD):
        np.testing.assert_array_equal(links.mass, 1)


@pytest.mark.parametrize(
    ("kind", "variant", "steps"),
    [
        ("DirectedRB", "gradient-first", 6),
        pytest.param("DirectedRB", "gradient-after", 0, marks=pytest.mark.long),
        ("VRHGP", "gradient-after", 6),
        pytest.param("VRHGP", "gradient-first", 1, marks=pytest.mark.long),
        ("ExactRB", "gradient-after", 6),
    ],
)
@pytest.mark.long
def test_the_private_form_is_the_same_estimate(kind, variant, steps):
    """With all examples and almost no noise, B_i of the sum equals the sum of B_i."""
    rows, network = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 2))), hp.networks.RandomUndirected(3)
    made = hp.Task(
        inner=lambda x, h, a: jnp.sum((x - jnp.tanh(h) * a) ** 2 * (1 + a**2), axis=-1),
        outer=lambda x, h, a: jnp.sum((x - a) ** 2, axis=-1) * jnp.exp(h[0]),
        params=jnp.ones(2),
        hypers=jnp.ones(2) / 2,
        train=rows,
        validation=rows[:, ::-1],
    )
    quiet = made.private(clip=1e3, curvature=1e3, coupling=1e3, noise=hp.privacy.Gaussian(1e-15))
    method = getattr(hp.hypergradients, kind)(steps, 0.1, variant=variant, links="means")
    plain, private = (hp.hypergradient(each, method, network, key=0) for each in (made, quiet))
    np.testing.assert_allclose(private.value, plain.value, atol=1e-9)
    assert np.abs(plain.value).max() > 0.1
    products = (2 * steps - 1 if kind == "VRHGP" else steps) if steps else 0
    assert private.privacy.releases == {"validation": 1} | ({"train": products} if steps else {})


@pytest.mark.parametrize("solver", [hp.SGP, pytest.param(hp.DSGD, marks=pytest.mark.long)])
def test_the_iteration_that_trained_is_differentiated(solver):
    """The final step size, the variant and the weights come from the solver, alone and inside an algorithm."""
    made, network = setting(4), hp.networks.Star(4)
    inner = solver(300, hp.schedule("milestones", 0.2, (150,), 0.5), "gradient-after")
    trained = hp.train(made, inner, network, key=0)
    wanted = series(made.at(params=trained.params), network.means(inner.weights), 0.1, "gradient-after")
    untold = hp.hypergradients.DirectedRB(3000, links="means")
    found = hp.hypergradient(trained.task, untold, network, key=0)
    np.testing.assert_allclose(found.value, wanted, rtol=1e-6, atol=1e-8)
    method = hp.PDBO(inner, untold, hp.optimizer("sgd", learning_rate=1.0), 1)
    moved = made.hypers - hp.solve(made, method, network, key=0).hypers
    np.testing.assert_allclose(moved, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "gradient-after"},
            "variant: got 'gradient-after'; allowed: None, or 'gradient-first': SGP",
        ),
        ({"step_size": 0.2}, r"step_size: got 0\.2; allowed: None, or 0\.1: SGP trains"),
        ({"weights": "gossip"}, "weights: got 'gossip'; allowed: None, or 'push': SGP trains"),
    ],
)
def test_another_iteration_than_that_of_the_inner_solver_is_refused(options, message):
    made, network = setting(3), hp.networks.RandomUndirected(3)
    outer = hp.optimizer("sgd", learning_rate=0.1)
    for kind in ("DirectedRB", "VRHGP", "ExactRB"):
        estimator = getattr(hp.hypergradients, kind)(5, **options)
        with pytest.raises(hp.InvalidInput, match=f"{kind}.{message}"):
            hp.solve(made, hp.PDBO(hp.SGP(5, 0.1), estimator, outer, 1), network, key=0)
    with pytest.raises(hp.InvalidInput, match=r"VRHGP\.step_size: got None; allowed: a number above 0"):
        hp.hypergradient(made, hp.hypergradients.VRHGP(5), network, key=0)


def test_a_step_that_contradicts_a_schedule_is_refused():
    """The estimator differentiates the step of SGP, whose step size is the rate at its last step."""
    made, network = setting(4), hp.networks.Star(4)
    inner = hp.SGP(300, hp.schedule("milestones", 0.2, (150,), 0.5))
    trained, outer = hp.train(made, inner, network, key=0, certify=False).task, hp.optimizer("sgd", learning_rate=0.1)
    for kind in ("DirectedRB", "VRHGP", "ExactRB"):
        first = getattr(hp.hypergradients, kind)(5, 0.2)
        with pytest.raises(hp.InvalidInput, match=rf"{kind}\.step_size: got 0\.2; allowed: None, or 0\.1.*SGP trains"):
            hp.solve(made, hp.PDBO(inner, first, outer, 1), network, key=0)
        with pytest.raises(hp.InvalidInput, match=rf"{kind}\.step_size: got 0\.2; allowed: None, or 0\.1.*the solver"):
            hp.hypergradient(trained, first, network, key=0)
    last, none = (hp.hypergradients.DirectedRB(5, step, links="means") for step in (0.1, None))
    both = [hp.hypergradient(trained, each, network, key=0, certify=False).value for each in (last, none)]
    np.testing.assert_allclose(*both, rtol=1e-6)


def test_one_program_of_training_and_estimate_observes_as_two_do():
    """Peers run one program: TrainFirst observes links for the estimator, whatever the solver's option says."""
    made, network = setting(4), hp.networks.RandomDirected(4)
    solver, estimator = hp.SGP(50, 0.1), hp.hypergradients.DirectedRB(20, 0.1)
    trained = hp.train(made, solver, network, key=0)
    apart = hp.hypergradient(trained.task, estimator, network, key=0).value
    for each in (solver, solver.with_options(observe=False)):
        together = hp.hypergradient(made, TrainFirst(each, estimator), network, key=0).value
        np.testing.assert_allclose(together, apart, rtol=1e-10)


@pytest.mark.parametrize(
    ("estimator", "network", "message"),
    [
        (
            hp.hypergradients.DirectedRB(5, 0.1),
            hp.networks.DirectedRing(4),
            r"network: got 'directed-ring, which is directed'.*both ways.*HGP",
        ),
        (hp.hypergradients.VRHGP(5, 0.1), hp.networks.OnePeerExponential(4), r"one-peer-exponential.*both ways"),
        (
            hp.hypergradients.ExactRB(5, 0.1),
            hp.networks.RandomDirected(4),
            r"random-directed.*at once.*DirectedRB, HGP.*TrackedHGP, TreeCG, VRHGP",
        ),
    ],
    ids=["ring", "one-peer", "exact"],
)
def test_networks_that_cannot_be_reversed_are_refused(estimator, network, message):
    made = setting(4)
    with pytest.raises(hp.InvalidInput, match=message):
        hp.hypergradient(made, estimator, network, key=0)
