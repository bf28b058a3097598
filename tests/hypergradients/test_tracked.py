"""Tracked HGP has no bias on any network; HGP has one at the same number of pushes, which the tests detect."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import setting, with_data
from systems import system
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.engines.simulate import evaluate
from hyperpush.hypergradients import HypergradientState, oracles
from hyperpush.programs import program_of
from hyperpush.tasks.logistic import logistic
from hyperpush.tasks.quadratic import quadratic

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("network", "steps", "step", "pushes"),
    [
        (hp.networks.FullyConnected(8), 200, 0.5, 1),
        (hp.networks.RandomDirected(8), 400, 0.3, 1),
        (hp.networks.KOut(8, k=3), 800, 0.1, 1),
        (hp.networks.StaticUndirected(8), 800, 0.1, 2),
        (hp.networks.OnePeerExponential(8), 800, 0.1, 3),
        (hp.networks.DirectedRing(8), 1500, 0.05, 20),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_no_bias_on_any_network(network, steps, step, pushes):
    task, _, _, truth, largest = setting(8, 6)
    estimator = hp.TrackedHGP(steps, step / largest, pushes, tolerance=None, acceleration=0)
    found = hp.hypergradient(task, estimator, network, key=1)
    np.testing.assert_allclose(found.value, truth, rtol=1e-8, atol=1e-8)
    assert (found.costs.rounds, found.costs.floats) == (steps * pushes, steps * pushes * (4 + 1 + 4))


@pytest.mark.parametrize("engine", [hp.Simulate, hp.Threads])
@pytest.mark.long
def test_no_bias_where_messages_get_lost(engine):
    task, _, _, truth, largest = setting(4, 5)
    steps, network = 1500 if engine is hp.Simulate else 40, hp.networks.RandomDirected(4)
    estimator = hp.TrackedHGP(steps, 0.05 / largest, 1, tolerance=None, acceleration=0)
    faults = hp.Faults(loss=0.3, duplicate=0.1, delay=2)

    def estimate(engine):
        return hp.hypergradient(task, estimator, network, key=1, engine=engine(faults=faults)).value

    found = estimate(engine)
    if engine is hp.Simulate:
        np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_allclose(found, estimate(hp.Simulate), rtol=1e-8)


@pytest.mark.parametrize(
    "network",
    [
        hp.networks.RandomDirected(8),
        pytest.param(hp.networks.KOut(8, k=3), marks=pytest.mark.long),
        hp.networks.OnePeerExponential(8),
        pytest.param(hp.networks.StaticUndirected(8), marks=pytest.mark.long),
        pytest.param(hp.networks.DirectedRing(8), marks=pytest.mark.long),
    ],
    ids=lambda network: network.name,
)
def test_nothing_needs_to_be_set(network):
    task, _, _, truth, _ = setting(8, 6)
    found = hp.hypergradient(task, hp.TrackedHGP(tolerance=1e-9), network, key=1)
    np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-7)
    # The number of rounds is far below the limit, so the clients agreed to end.
    assert found.costs.rounds < 500 * network.flood_rounds()


def test_unlike_clients_and_indefinite_costs_need_nothing_either():
    """Hessians differ by a factor of 100, and some are indefinite; only their mean is positive definite."""
    task, first, *_ = setting(8, 6)
    generator = np.random.default_rng(0)
    scales = 10 ** generator.uniform(-1, 1, 8)
    noise = generator.normal(size=(8, 4, 4)) * 0.5
    hessian = first["hessian"] * scales[:, None, None] + noise + noise.transpose(0, 2, 1)
    assert np.linalg.eigvalsh(hessian)[:, 0].min() < 0 < np.linalg.eigvalsh(hessian.mean(0))[0]
    task = with_data(task, {**first, "hessian": hessian})
    truth = oracles.dense(task.problem, task.params, task.hypers, task.data)
    found = hp.hypergradient(task, hp.TrackedHGP(tolerance=1e-9), hp.networks.OnePeerExponential(8), key=1)
    np.testing.assert_allclose(found.value, truth, rtol=1e-6, atol=1e-7)


def test_mini_batch_noise_falls_with_the_number_of_steps():
    made = logistic(3, 0, examples=8)
    network = hp.networks.RandomDirected(3)
    states = HypergradientState(made.params + 0.3, made.hypers, jnp.zeros_like(made.hypers))
    truth = oracles.dense(made.problem, states.params, made.hypers, made.data)

    def error(steps):
        def one(key):
            program = hp.TrackedHGP(steps, batch_size=2, pushes=1).program(made.problem)
            return evaluate(program, network, states, made.data, key)[0].value

        found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 40)))
        return np.sqrt(np.mean((found - truth) ** 2))

    # Noise is independent in every step: sixteen times the steps reduce the error to a quarter.
    assert error(1600) < 0.4 * error(100)


def test_an_outer_step_starts_where_the_last_one_ended():
    """For the same problem, the second outer step only needs to vote."""
    task, _, _, truth, _ = setting(4, 5)
    estimator, network = hp.TrackedHGP(tolerance=1e-9), hp.networks.RandomDirected(4)
    program = program_of(estimator, task.problem)
    memory = jax.vmap(estimator.memory)(task.params, task.hypers)
    states = HypergradientState(task.params, task.hypers, jnp.zeros_like(task.hypers), memory=memory)
    cold = hp.Simulate().run(program, network, states, task.data, jax.random.key(0))
    warm = hp.Simulate().run(program, network, cold.states, task.data, jax.random.key(1), step=cold.step)
    assert warm.rounds < cold.rounds / 2
    np.testing.assert_allclose(warm.states.value, truth, rtol=1e-7, atol=1e-8)


def test_too_large_a_step_is_reported():
    task, *_, largest = setting(4, 5)
    estimator = hp.TrackedHGP(3000, 9 / largest, 1, tolerance=None, acceleration=0)
    with pytest.raises(hp.Diverged, match=r"TrackedHGP diverged \(NaN or infinity\) in round \d+"):
        hp.hypergradient(task, estimator, hp.networks.RandomDirected(4), key=1)


def test_acceleration_that_makes_things_worse_is_given_up():
    """Acceleration misleads a client whose Hessian is zero; plain steps bring all clients back."""
    task = quadratic(3, 0)
    task = with_data(task, {**task.train, "hessian": task.train["hessian"].at[0].set(0)})
    network = hp.network("random-directed", 3, 0)
    truth = hp.hypergradient(task, hp.hypergradients.Dense(), network, key=0).value
    record = {"TrackedHGP": lambda state, ctx: jnp.linalg.norm(state.slope)}
    found = hp.hypergradient(task, hp.TrackedHGP(1500, pushes=3, tolerance=None), network, key=0, record=record)
    slopes = found.history["TrackedHGP"]
    # The size of the deviation depends on rounding, and so on the machine. Rounding changes the trackers' sum, which
    # should be conserved, by about the rounding error of the largest tracker. More steps do not repair that.
    assert np.all(slopes[-1] < 1e-12 * slopes[0])
    error = np.abs(found.value - truth).max()
    assert error < 100 * np.finfo(float).eps * np.max(slopes)


SIZE = 10


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("like", "tolerance"), ("zero clients", "tolerance"), ("low rank", None), ("condition 1e6", None)],
)
@pytest.mark.long
def test_no_wrong_result_without_a_word(kind, reason):
    made = system(kind, d=SIZE)
    for network in (hp.networks.RandomDirected(6), hp.networks.DirectedRing(6)):
        found = hp.hypergradient(made.task, hp.TrackedHGP(), network, key=0)
        error, known = made.error(found.value), found.status.error
        assert reason in (None, found.status.reason)
        assert found.status.converged == (known is not None and known <= 1e-5)
        assert known is None or error < known


@pytest.mark.parametrize("kind", ["singular", "indefinite"])
def test_mean_hessians_without_a_minimum_are_ill_posed(kind):
    task = system(kind, d=SIZE).task
    found = hp.hypergradient(task, hp.TrackedHGP(), hp.networks.StaticUndirected(6), key=0)
    assert (found.status.converged, found.status.reason) == (False, "ill-posed")


def test_one_large_negative_curvature_among_small_ones_is_seen():
    """Accelerated steps soon solve that direction, so few of the changes lie along it."""
    made = system("like", d=SIZE)
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))
    mean = basis * np.array([-100.0, *np.ones(SIZE - 1)]) @ basis.T
    hessians = mean + 0.02 * (made.hessians - made.hessians.mean(0))
    for network in (hp.networks.StaticUndirected(6), hp.networks.RandomDirected(6)):
        found = hp.hypergradient(made._replace(hessians=hessians).task, hp.TrackedHGP(), network, key=0)
        assert (found.status.converged, found.status.reason) == (False, "ill-posed")


def test_differences_between_clients_are_not_taken_for_curvature():
    """Costs that cancel in the mean have 1e8 times the curvature, so the mean gradient hardly decreases.

    In float32 the clients' disagreement looks like a curvature for which even the small decrease would be enough.
    """
    for seed in range(6):
        made = system("indefinite clients", seed, d=SIZE)
        mean = made.hessians.mean(0)
        with jax.enable_x64(False):
            task = made._replace(hessians=mean + 1e8 * (made.hessians - mean)).task
            found = hp.hypergradient(task, hp.TrackedHGP(), hp.networks.StaticUndirected(6), key=0)
        assert found.status.converged is False


@pytest.mark.parametrize(
    ("options", "converged", "reason"),
    [
        ({"steps": 10}, False, "limit"),
        ({"steps": 10, "tolerance": None}, None, "fixed-length"),
        ({"steps": 10, "batch_size": 1}, None, "fixed-length"),
        ({"steps": 0}, None, "fixed-length"),
    ],
)
def test_the_status_says_why_it_ended(options, converged, reason):
    task = system("like", d=SIZE).task
    found = hp.hypergradient(task, hp.TrackedHGP(**options), hp.networks.FullyConnected(6), key=0)
    assert (found.status.converged, found.status.reason) == (converged, reason)


def test_six_vectors_are_held():
    """The six vectors exclude the params and the outer gradient, whose sizes differ from theirs here."""
    held = []

    def count(state, ctx):
        vectors = jax.tree.leaves(replace(state, params=None, hyper=None, direct=None))
        held.append(sum(leaf.size // SIZE for leaf in vectors))
        return jnp.zeros(())

    task = system("like", d=SIZE).task
    estimator = hp.TrackedHGP()
    hp.hypergradient(task, estimator, hp.networks.FullyConnected(6), key=0, record={"TrackedHGP": count})
    assert set(held) == {6}


def test_differences_serve_costs_without_second_derivatives():
    @jax.custom_vjp
    def cost(x, hyper, batch):
        return 0.5 * x @ batch[0][0] @ x + hyper @ batch[1][0] @ x + jnp.sum(jnp.cos(x))

    def backward(kept, scale):
        x, hyper, (hessian, mixed) = kept
        along_x = hessian[0] @ x + hyper @ mixed[0] - jnp.sin(x)
        return scale * along_x, scale * (mixed[0] @ x), jax.tree.map(jnp.zeros_like, (hessian, mixed))

    cost.defvjp(lambda x, hyper, batch: (cost(x, hyper, batch), (x, hyper, batch)), backward)
    made = system("like", d=SIZE)
    # At 0 the cosine's second derivative is −1.
    task = made._replace(hessians=made.hessians + np.eye(SIZE)).with_cost(cost)
    states = HypergradientState(task.params, task.hypers, jnp.zeros_like(task.hypers))

    def estimate(**options):
        program = program_of(hp.TrackedHGP(**options), task.problem)
        return hp.Simulate().run(program, hp.networks.RandomDirected(6), states, task.data, jax.random.key(0)).states

    found = estimate(products="difference")
    assert found.report.status().converged
    assert made.error(found.value) < 1e-6
    with pytest.raises(TypeError, match="custom_vjp"):
        estimate()


def test_without_cooperation():
    task, first, second, *_ = setting(4, 5)
    network = hp.networks.FullyConnected(4)
    direct = hp.hypergradient(task, hp.hypergradients.DirectGradient(), network, key=1)
    np.testing.assert_allclose(direct.value, task.hypers - second["hyper_target"])
    local = hp.hypergradient(task, hp.hypergradients.LocalGradient(20, damping=0.3), network, key=1)
    for i in range(4):
        pull = second["map"][i].T @ (second["map"][i] @ np.asarray(task.params[i]) - second["target"][i])
        damped = first["hessian"][i] + 0.3 * np.eye(len(pull))
        expected = direct.value[i] - first["coupling"][i] @ np.linalg.solve(damped, pull)
        np.testing.assert_allclose(local.value[i], expected, rtol=1e-8)
    assert direct.costs.rounds == local.costs.rounds == 0


@pytest.mark.parametrize(
    ("network", "pushes"),
    [(hp.networks.FullyConnected(4), 1), (hp.networks.FullyConnected(1), 1), (hp.networks.DirectedRing(4), None)],
)
def test_complete_networks_need_no_search_for_pushes(network, pushes):
    assert hp.TrackedHGP().bind(network, hp.Simulate()).pushes == pushes
    assert hp.TrackedHGP(pushes=3).bind(network, hp.Simulate()).pushes == 3


def test_a_private_estimate_keeps_what_lossy_links_lose():
    """x* and v_i by hand: with curvatures w_i = mean(1 + a²) and B_i = −w_i, v_i = w_i (Σ_k w_k)⁻¹ mean_j ∂_x F_j."""
    clients, rows = 5, np.random.default_rng(0).normal(size=(5, 4))
    task = hp.Task(
        inner=lambda x, h, a: (x - h - a) ** 2 * (1 + a**2) / 2, outer=lambda x, h, a: (x - a - 3) ** 2 / 2,
        params=0.5, hypers=0.0, train=jnp.asarray(rows), validation=jnp.asarray(rows),
    )  # fmt: skip
    curvatures = np.mean(1 + rows**2, axis=1)
    truth = curvatures / curvatures.sum() * np.mean(0.5 - rows - 3)
    private = task.private(clip=1e3, curvature=1e3, coupling=1e3, noise=hp.privacy.Gaussian(1e-16))
    method, engine = hp.TrackedHGP(150, 0.3, pushes=1), hp.Simulate(faults=hp.Faults(loss=0.3))
    for made in (task, private):
        found = hp.hypergradient(made, method, hp.networks.Ring(clients), key=0, engine=engine, certify=False)
        np.testing.assert_allclose(found.value, truth, rtol=1e-6)
