"""What every registered hypergradient estimator has to do. A new one is tested by being there."""

import dataclasses
import tomllib
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.registry import build, registered, table

CLIENTS, EXAMPLES, SIZE = 4, 6, 3
METHODS = {name: each.example() for name, each in registered("hypergradients").items()}
ENGINES = {"batched": hp.Simulate(clients_per_batch=2), "shard": hp.Shard(devices=2), "threads": hp.Threads()}
pytestmark = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def losses(x, log_rate, batch):
    inputs, targets = batch
    return 0.5 * (inputs @ x - targets) ** 2


def penalty(x, log_rate):
    return 0.5 * jnp.exp(log_rate) * jnp.sum(x**2)


def outer_penalty(x, log_rate):
    return 0.5 * log_rate**2


@cache
def numbers():
    generator = np.random.default_rng(0)
    data = [
        (generator.normal(size=(CLIENTS, EXAMPLES, SIZE)), generator.normal(size=(CLIENTS, EXAMPLES))) for _ in range(2)
    ]
    return *data, np.linspace(-1, 1, CLIENTS)


@cache
def task(wide=False):
    """Ridge regressions with a rate for each client; everybody starts elsewhere."""
    train, validation, log_rates = numbers()
    params = np.random.default_rng(1).normal(size=(CLIENTS, SIZE))
    train, validation, log_rates, params = jax.tree.map(jnp.asarray, (train, validation, log_rates, params))
    return hp.Task(
        inner=losses,
        penalty=penalty,
        outer=losses,
        outer_penalty=outer_penalty,
        params=hp.per_client(params),
        hypers=hp.per_client(log_rates),
        train=train,
        validation=validation,
    )


def closed_form():
    """x*, λ_max of the mean Hessian, and (1/n)λ_i − e^{λ_i} x*ᵀ(Σ H_k)⁻¹ (1/n)Σ_j ∂_xF_j by NumPy."""
    (inputs, targets), (others, wanted), log_rates = numbers()
    hessian = np.einsum("nmi,nmj->ij", inputs, inputs) / EXAMPLES + np.exp(log_rates).sum() * np.eye(SIZE)
    x = np.linalg.solve(hessian, np.einsum("nmi,nm->i", inputs, targets) / EXAMPLES)
    source = np.einsum("nmi,nm->i", others, others @ x - wanted) / EXAMPLES / CLIENTS
    value = log_rates / CLIENTS - np.exp(log_rates) * (x @ np.linalg.solve(hessian, source))
    return x, np.linalg.eigvalsh(hessian)[-1] / CLIENTS, value


@cache
def estimate(method, engine=None):
    kind = hp.networks.RandomUndirected if method.info.network == "undirected" else hp.networks.RandomDirected
    return hp.hypergradient(task(), method, kind(CLIENTS), key=3, engine=engine or hp.Simulate())


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_engines_agree(method, engine):
    expected, found = estimate(method), estimate(method, engine)
    assert np.linalg.norm(expected.value) > 0.1  # zeros would agree, too
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-4, atol=1e-5)
    assert found.costs == expected.costs


def test_mini_batches_are_the_same_on_every_engine(method):
    if not hasattr(method, "batch_size"):
        pytest.skip("it takes all examples")
    method = method.with_options(batch_size=2)
    expected, found = estimate(method), estimate(method, hp.Threads())
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-4, atol=1e-5)
    assert np.abs(expected.value - estimate(method.with_options(batch_size=None)).value).max() > 1e-4


def test_the_same_key_gives_the_same_bits_and_a_new_number_compiles_nothing(method):
    expected, compiled = estimate(method), []

    def listen(event, duration_secs, **kwargs):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    other = jax.tree.map(lambda leaf: 0.9 * leaf if isinstance(leaf, float) else leaf, method)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        again, changed = estimate.__wrapped__(method), estimate.__wrapped__(other)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    np.testing.assert_array_equal(again.value, expected.value)
    assert np.all(changed.value == expected.value) == (other == method or not any(_steps(method)))


def _steps(method):
    """Numbers that matter in a short run: a damping of 0 stays 0."""
    return [leaf for leaf in jax.tree.leaves(method) if isinstance(leaf, float) and leaf > 0]


def test_toml_round_trip(method):
    written = tomllib.loads(tomli_w.dumps({"method": table(method)}))["method"]
    assert build("hypergradients", written, "method") == method


def test_status_gives_a_reason(method):
    assert estimate(method).status.reason


def test_options_out_of_range_are_named(method):
    numeric = [each.name for each in dataclasses.fields(method) if type(getattr(method, each.name)) in (int, float)]
    unset = [each.name for each in dataclasses.fields(method) if getattr(method, each.name) is None]
    wrong = dict.fromkeys((*numeric, *unset), -1)
    zeros = {name: 0 for name in ("batch_size", "pushes", "step_size", "tolerance") if hasattr(method, name)}
    undefined = {name: np.nan for name in numeric if type(getattr(method, name)) is float}
    for name, given in [*wrong.items(), *zeros.items(), *undefined.items()]:
        with pytest.raises(hp.InvalidInput, match=rf"{type(method).__name__}\.{name}: got {given}"):
            dataclasses.replace(method, **{name: given})


@pytest.mark.usefixtures("float64")
def test_generous_settings_give_the_closed_form(method):
    """Where all hear all, averages are exact at once, and SGP's fixed point is the inner solution."""
    if method.info.target != "global":
        pytest.skip(f"its target is {method.info.target}")
    x, largest, truth = closed_form()
    step_size = float(0.5 / largest)
    generous = {"steps": 600, "step_size": step_size, "solver": hp.SGP(600, step_size), "alpha": 1.0, "beta": 0.0}
    method = method.with_options(**{name: given for name, given in generous.items() if hasattr(method, name)})
    # Not the cached task: its numbers are float32.
    start = task.__wrapped__() if method.trains else task.__wrapped__().at(params=np.broadcast_to(x, (CLIENTS, SIZE)))
    found = hp.hypergradient(start, method, hp.networks.FullyConnected(CLIENTS), key=0)
    np.testing.assert_allclose(found.value, truth, rtol=1e-8, atol=1e-10)


def test_on_a_private_task_every_access_is_a_release_or_it_is_refused(method):
    noise = {"noise": hp.privacy.Gaussian(1.0), "clip": 1.0, "curvature": 1.0, "coupling": 1.0}
    hidden = task().private(**noise)
    if method.info.matrices or method.exact:  # derivatives of gradients, which would have to be released one by one
        with pytest.raises(hp.InvalidInput, match=r"tolerates no noise" if method.exact else r"\.py:\d+.*derivative"):
            hp.privacy.budget(hidden, method)
        return
    releases, accesses = hp.privacy.budget(hidden, method).releases, estimate(method).costs.accesses
    # Losses of the outer cost do not contain the hypers here: ∂_λF is the penalty's alone, and needs no noise.
    assert releases.get("validation", 0) == (method.info.target != "direct")
    assert accesses["validation"] > 0
    if hasattr(method, "singular"):  # noise leaves nothing to tell of a system, so it looks at less
        accesses = hp.hypergradient(hidden, method, hp.networks.RandomDirected(CLIENTS), key=3).costs.accesses
    if not method.info.private:  # its program is the same, with noise
        assert releases.get("train", 0) == accesses.get("train", 0)


def flat(x, hyper, rows):
    """Losses whose derivatives are zero, so that what is left is noise."""
    return 0.0 * jnp.sum(rows * x, axis=-1) * hyper


def test_noise_of_zero_gradients_has_the_variance_of_a_release(method):
    """One release of ∂_λF is part of the estimate; Jacobian products are clipped to next to nothing."""
    if not method.info.private:
        pytest.skip("it has no private form of its own")
    clients, scale = 500, 2.0
    rows, noise = jnp.zeros((clients, 10, 2)), hp.privacy.Gaussian(scale)
    quiet = hp.Task(inner=flat, outer=flat, params=jnp.zeros(2), hypers=0.0, train=rows, validation=rows)
    quiet = quiet.private(noise=noise, clip=5.0, curvature=0.1, coupling=1e-9)  # 2·5/10 is a sensitivity of 1
    found = hp.hypergradient(quiet, method, hp.networks.FullyConnected(clients), key=0)
    assert np.var(clients * np.asarray(found.value)) == pytest.approx(scale**2, rel=0.2)
