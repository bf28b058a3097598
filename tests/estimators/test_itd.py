"""Iterative differentiation against automatic differentiation of the same run of SGP, written here in plain JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_forms import setting
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.data.batches import draw
from hyperpush.engine import keys
from hyperpush.estimators.itd import check_solver
from hyperpush.program import Role, leaf_key

pytestmark = pytest.mark.usefixtures("float64")
KEY = jax.random.key(6)
CLIENTS, STEPS = 4, 5
RATES = [0.4, 0.4, 0.2, 0.2, 0.1]
NETWORK = hp.networks.RandomDirected(CLIENTS)


def misfit(params, batch):
    inputs, targets = batch
    return jnp.mean((jnp.tanh(inputs @ params["slope"]) + params["offset"] - targets) ** 2)


def inner(params, hyper, batch):
    squares = jnp.append(params["slope"] ** 2, params["offset"] ** 4)
    return misfit(params, batch) + 0.5 * jnp.exp(hyper) @ squares


def outer(params, hyper, batch):
    return misfit(params, batch) + 0.1 * jnp.sum(hyper**2)


PROBLEM = hp.Problem(inner, outer)


def instance():
    """Params (every client starts elsewhere), hypers, inner and outer data."""
    generator = np.random.default_rng(0)

    def data():
        return jnp.asarray(generator.normal(size=(CLIENTS, 7, 2))), jnp.asarray(generator.normal(size=(CLIENTS, 7)))

    params = {
        "slope": jnp.asarray(generator.normal(size=(CLIENTS, 2))),
        "offset": jnp.asarray(generator.normal(size=CLIENTS)),
    }
    return params, jnp.asarray(generator.normal(size=(CLIENTS, 3))), data(), data()


@partial(jax.jit, static_argnums=1)
def recorded(first, size):
    """The network's matrices and everyone's mini-batches, by step."""
    steps = jnp.arange(STEPS)
    push = jax.vmap(lambda step: hp.networks.matrix(NETWORK, keys.network_key(KEY), step))(steps)
    own = jax.vmap(lambda client: leaf_key(keys.program_key(KEY), Role.ENTER, client))(jnp.arange(CLIENTS))
    batches = jax.vmap(
        lambda step: jax.vmap(lambda data, key: draw(data, size, jax.random.fold_in(key, step)))(first, own)
    )(steps)
    return push, batches


def unrolled(params, hypers, push, batches, second, order):
    """The mean outer cost where SGP ends, and where that is."""

    def read(z, mass):
        return {"slope": z["slope"] / mass[:, None], "offset": z["offset"] / mass}

    def step(held, now):
        (z, mass), (push, batch, rate) = held, now
        gradients = jax.vmap(jax.grad(inner))(read(z, mass), hypers, batch)
        before = rate if order == "gradient-first" else 0
        z = {name: push @ (z[name] - before * gradients[name]) - (rate - before) * gradients[name] for name in z}
        return (z, push @ mass), None

    held, _ = jax.lax.scan(step, (params, jnp.ones(CLIENTS)), (push, batches, jnp.asarray(RATES)))
    return jnp.mean(jax.vmap(outer)(read(*held), hypers, second)), read(*held)


def where(run, ctx):
    return run.params


def differentiate(estimator, order, size, run=hp.simulate.run):
    solver = hp.SGP(STEPS, hp.milestones(0.4, (2, 4), 0.5), order, size)
    return hp.hypergradient(PROBLEM, estimator(solver), NETWORK, *instance(), KEY, run=run, record={"SGP": where})


@pytest.mark.parametrize(("order", "size"), [("gradient-first", 3), ("gradient-after", None)])
def test_both_modes_are_automatic_differentiation(order, size):
    params, hypers, first, second = instance()
    push, batches = recorded(first, size)
    slope = jax.grad(lambda hypers: unrolled(params, hypers, push, batches, second, order), has_aux=True)
    truth, end = jax.jit(slope)(hypers)
    assert np.all(np.abs(truth - 0.2 * hypers / CLIENTS).max(1) > 1e-3)  # what goes through the params
    numbers, inputs = 3, CLIENTS * 3
    for estimator, rounds, floats, products in (
        (hp.ITDBackward, 2 * STEPS, STEPS * (numbers + 1) + STEPS * (numbers + CLIENTS), STEPS),
        (hp.ITDForward, STEPS + 1, STEPS * (numbers + 1 + inputs * numbers) + inputs, STEPS * inputs),
    ):
        found = differentiate(estimator, order, size)
        np.testing.assert_allclose(found.value, truth, rtol=1e-11, atol=1e-13)
        for name, values in found.history["SGP"].items():
            np.testing.assert_allclose(values[-1], end[name], rtol=1e-11, atol=1e-13)
        assert (found.rounds, found.floats, found.hessian_products) == (rounds, floats, products)


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ((hp.ITDBackward, "gradient-first", 3), hp.peer.run),
        ((hp.ITDForward, "gradient-after", None), partial(hp.shard.run, devices=jax.devices()[:3])),
    ],
    ids=["backward-peer", "forward-shard"],
)
def test_other_engines_give_the_same(options, run):
    truth, found = differentiate(*options), differentiate(*options, run=run)
    np.testing.assert_allclose(found.value, truth.value, rtol=1e-9)
    assert (found.rounds, found.floats) == (truth.rounds, truth.floats)


def test_a_long_run_on_the_complete_network_gives_the_closed_form_as_part_of_a_bilevel_run():
    """There SGP is gradient descent on the mean cost, so x(T) and its derivative tend to those of the solution."""
    problem, _, hypers, first, second, truth, largest = setting(3, 7)
    solver = hp.SGP(200, float(1 / largest))
    found = hp.solve(
        problem,
        hp.networks.FullyConnected(3),
        inner=solver,
        hypergradient=hp.ITDBackward(solver),
        outer=optax.sgd(0.1),
        outer_steps=1,
        params=jnp.zeros((3, 4)),
        hypers=hypers,
        inner_data=first,
        outer_data=second,
        key=KEY,
    )
    assert found.hypergradients is not None
    np.testing.assert_allclose(found.hypergradients[0], truth, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.hypers, hypers - 0.1 * truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: check_solver("ITDForward", hp.DSGD(5, 0.1)), r"ITDForward\.solver: got DSGD.*allowed: an SGP"),
        (lambda: hp.ITDForward(hp.SGP(5, optax.adam(0.1))), r"ITDForward\.solver\.rate.*Optax.*a number or a schedule"),
        (lambda: hp.ITDBackward(hp.SGP(5, optax.adam(0.1))), r"ITDBackward\.solver\.rate.*Optax"),
        (lambda: hp.ITDForward(hp.SGP(5, 0.1, privacy=hp.Noise(hp.Laplace(1), 1.0))), r"ITDForward\.solver\.privacy"),
        (lambda: hp.ITDBackward(hp.SGP(0, 0.1)), r"ITDBackward\.solver\.steps: got 0; allowed: a whole number from 1"),
    ],
    ids=["solver", "forward-rate", "backward-rate", "noise", "steps"],
)
def test_what_cannot_be_differentiated_is_refused(make, message):
    with pytest.raises(hp.InvalidInput, match=message):
        make()


def test_a_server_needs_reliable_links():
    method = hp.ITDBackward(hp.SGP(2, 0.1))
    with pytest.raises(hp.InvalidInput, match=r"faults.*reliable links"):
        hp.hypergradient(PROBLEM, method, NETWORK, *instance(), KEY, faults=hp.Faults(loss=0.1))
