"""Iterative differentiation compared with automatic differentiation of the same run of SGP, written in plain JAX."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_forms import setting
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.data.batches import minibatch
from hyperpush.engines import keys
from hyperpush.programs import Role, leaf_key

pytestmark = pytest.mark.usefixtures("float64")
KEY = jax.random.key(6)
CLIENTS, STEPS = 4, 5
RATES = [0.4, 0.4, 0.2, 0.2, 0.1]
NETWORK = hp.networks.RandomDirected(CLIENTS)


def losses(params, hyper, batch):
    inputs, targets = batch
    return (jnp.tanh(inputs @ params["slope"]) + params["offset"] - targets) ** 2


def penalty(params, hyper):
    squares = jnp.append(params["slope"] ** 2, params["offset"] ** 4)
    return 0.5 * jnp.exp(hyper) @ squares


def outer_penalty(params, hyper):
    return 0.1 * jnp.sum(hyper**2)


def inner(params, hyper, batch):
    return jnp.mean(losses(params, hyper, batch)) + penalty(params, hyper)


def outer(params, hyper, batch):
    return jnp.mean(losses(params, hyper, batch)) + outer_penalty(params, hyper)


def instance():
    """Return a task whose clients start at different params."""
    generator = np.random.default_rng(0)

    def data():
        return jnp.asarray(generator.normal(size=(CLIENTS, 7, 2))), jnp.asarray(generator.normal(size=(CLIENTS, 7)))

    params = {
        "slope": jnp.asarray(generator.normal(size=(CLIENTS, 2))),
        "offset": jnp.asarray(generator.normal(size=CLIENTS)),
    }
    return hp.Task(
        inner=losses,
        penalty=penalty,
        outer=losses,
        outer_penalty=outer_penalty,
        params=hp.per_client(params),
        hypers=hp.per_client(jnp.asarray(generator.normal(size=(CLIENTS, 3)))),
        train=data(),
        validation=data(),
    )


@partial(jax.jit, static_argnums=1)
def recorded(first, size):
    """Return the network's matrices and all clients' mini-batches by step."""
    steps = jnp.arange(STEPS)
    push = jax.vmap(lambda step: hp.networks.matrix(NETWORK, keys.network_key(KEY), step))(steps)
    own = jax.vmap(lambda client: leaf_key(keys.program_key(KEY), Role.ENTER, client))(jnp.arange(CLIENTS))
    batches = jax.vmap(
        lambda step: jax.vmap(lambda data, key: minibatch(data, size, jax.random.fold_in(key, step)))(first, own)
    )(steps)
    return push, batches


def unrolled(params, hypers, push, batches, second, variant):
    """Return the mean outer cost at the end of SGP, and the params there."""

    def read(z, mass):
        return {"slope": z["slope"] / mass[:, None], "offset": z["offset"] / mass}

    def step(held, now):
        (z, mass), (push, batch, rate) = held, now
        gradients = jax.vmap(jax.grad(inner))(read(z, mass), hypers, batch)
        before = rate if variant == "gradient-first" else 0
        z = {name: push @ (z[name] - before * gradients[name]) - (rate - before) * gradients[name] for name in z}
        return (z, push @ mass), None

    held, _ = jax.lax.scan(step, (params, jnp.ones(CLIENTS)), (push, batches, jnp.asarray(RATES)))
    return jnp.mean(jax.vmap(outer)(read(*held), hypers, second)), read(*held)


def where(run, ctx):
    return run.params


def differentiate(variant, size):
    method = hp.hypergradients.ITDBackward(hp.SGP(STEPS, hp.schedule("milestones", 0.4, (2, 4), 0.5), variant, size))
    return hp.hypergradient(instance(), method, NETWORK, key=KEY, record={"SGP": where})


@pytest.mark.parametrize(("variant", "size"), [("gradient-first", 3), ("gradient-after", None)])
def test_it_is_automatic_differentiation(variant, size):
    task = instance()
    params, hypers, second = task.params, task.hypers, task.validation
    push, batches = recorded(task.train, size)
    slope = jax.grad(lambda hypers: unrolled(params, hypers, push, batches, second, variant), has_aux=True)
    truth, end = jax.jit(slope)(hypers)
    assert np.all(np.abs(truth - 0.2 * hypers / CLIENTS).max(1) > 1e-3)  # the part that passes through the params
    found = differentiate(variant, size)
    np.testing.assert_allclose(found.value, truth, rtol=1e-11, atol=1e-13)
    for name, values in found.history["SGP"].items():
        np.testing.assert_allclose(values[-1], end[name], rtol=1e-11, atol=1e-13)
    numbers, costs = 3, found.costs
    floats = STEPS * (numbers + 1) + STEPS * (numbers + CLIENTS)
    assert (costs.rounds, costs.floats, costs.hessian_products) == (2 * STEPS, floats, STEPS)


def test_a_long_run_on_the_complete_network_gives_the_closed_form_as_part_of_a_bilevel_run():
    """On the complete network SGP is gradient descent, so x(T) and its derivative tend to the solution's."""
    task, _, _, truth, largest = setting(3, 7)
    task = task.at(params=jnp.zeros((3, 4)))
    solver = hp.SGP(200, float(1 / largest))
    estimator, outer = hp.hypergradients.ITDBackward(solver), hp.optimizer("sgd", learning_rate=0.1)
    found = hp.solve(task, hp.PDBO(solver, estimator, outer, 1), hp.networks.FullyConnected(3), key=KEY)
    assert found.history.hypergradient_norm is not None
    np.testing.assert_allclose(found.history.hypergradient_norm[1], np.linalg.norm(truth, axis=1), rtol=1e-8)
    np.testing.assert_allclose(found.hypers, task.hypers - 0.1 * truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hp.hypergradients.ITDBackward(cast(Any, hp.DSGD(5, 0.1))),
            r"ITDBackward\.solver: got DSGD.*allowed: an object such as SGP\(",
        ),
        (
            lambda: hp.hypergradients.ITDBackward(hp.SGP(5, optimizer=optax.adam(0.1))),
            r"ITDBackward\.solver\.optimizer.*plain SGD",
        ),
        (
            lambda: hp.hypergradients.ITDBackward(hp.SGP(0, 0.1)),
            r"ITDBackward\.solver\.steps: got 0; allowed: a whole number from 1",
        ),
    ],
    ids=["solver", "optimizer", "steps"],
)
def test_what_cannot_be_differentiated_is_refused(make, message):
    with pytest.raises(hp.InvalidInput, match=message):
        make()


def test_a_server_needs_reliable_links():
    method = hp.hypergradients.ITDBackward(hp.SGP(2, 0.1))
    with pytest.raises(hp.InvalidInput, match=r"faults.*reliable links"):
        hp.hypergradient(instance(), method, NETWORK, key=KEY, engine=hp.Simulate(faults=hp.Faults(loss=0.1)))
