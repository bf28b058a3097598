"""Schedules compared with Optax's, optimizers by name, and both with traced numbers."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hyperpush as hp
from hyperpush.base.schedules import SCHEDULES, Power
from hyperpush.methods import registry
from hyperpush.methods.optimizers import Optimizer, _optimizers, build
from hyperpush.methods.registry import table

STEPS = np.arange(0, 40)
PAIRS = {
    "milestones": (
        hp.schedule("milestones", 0.3, at=(5, 20), factor=0.2),
        optax.piecewise_constant_schedule(0.3, {5: 0.2, 20: 0.2}),
    ),
    "exponential": (hp.schedule("exponential", 0.3, factor=0.9, every=4), optax.exponential_decay(0.3, 4, 0.9)),
    "staircase": (
        hp.schedule("exponential", 0.3, factor=0.9, every=4, staircase=True),
        optax.exponential_decay(0.3, 4, 0.9, staircase=True),
    ),
    "linear": (hp.schedule("linear", 0.3, steps=30, final=0.1), optax.linear_schedule(0.3, 0.1, 30)),
    "warm-up": (hp.schedule("linear", 0.0, steps=30, final=0.1), optax.linear_schedule(0.0, 0.1, 30)),
    "cosine": (hp.schedule("cosine", 0.3, steps=30, final=0.03), optax.cosine_decay_schedule(0.3, 30, alpha=0.1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_schedules_are_those_of_optax(name):
    ours, theirs = PAIRS[name]
    expected = np.array([theirs(step) for step in STEPS])
    np.testing.assert_allclose(np.array([ours(step) for step in STEPS]), expected, rtol=1e-5, atol=1e-8)
    # The values stay the same if everything is traced.
    found = jax.jit(lambda schedule, steps: jax.vmap(schedule)(steps))(ours, jnp.asarray(STEPS))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


def test_power_works_for_plain_numbers_and_arrays():
    falling = Power(2, 0.5)
    assert falling == hp.schedule("power", 2.0, exponent=0.5)
    assert falling(3) == 1.0
    np.testing.assert_allclose(falling(np.array([0, 3, 15])), [2, 1, 0.5])
    assert falling.times(3) == Power(6, 0.5)


def test_new_numbers_compile_nothing():
    compiled = 0

    @jax.jit
    def step(solver, x):
        nonlocal compiled
        compiled += 1
        transform = build(solver.step_size, solver.optimizer)
        updates, _ = transform.update(x, transform.init(x), x)
        return optax.apply_updates(x, updates)

    x = jnp.ones(3)
    np.testing.assert_allclose(step(hp.SGP(1, 0.1), x), 0.9 * x, rtol=1e-6)
    np.testing.assert_allclose(step(hp.SGP(1, 0.2), x), 0.8 * x, rtol=1e-6)
    assert compiled == 1
    for value in (0.1, 0.2):
        step(hp.SGP(1, hp.schedule("cosine", value, steps=3)), x)
        step(hp.SGP(1, optimizer=hp.optimizer("adam", learning_rate=value, b2=0.99)), x)
    assert compiled == 3


@pytest.mark.parametrize("name", _optimizers())
def test_every_optimizer_takes_a_traced_learning_rate(name):
    made = hp.optimizer(name, learning_rate=0.05)
    assert made == hp.optimizer(name, learning_rate=0.05)
    assert hash(made) == hash(hp.optimizer(name, learning_rate=0.05))
    assert made != hp.optimizer(name, learning_rate=0.06)
    x, gradient = jnp.array([1.0, -2.0]), jnp.array([0.3, 0.4])

    def moved(transform):
        memory, updates = transform.init(x), x
        for _ in range(3):
            updates, memory = transform.update(gradient, memory, x)
        return updates

    expected = moved(getattr(optax, name)(learning_rate=0.05))
    np.testing.assert_allclose(jax.jit(lambda made: moved(made.build()))(made), expected, rtol=1e-5, atol=1e-7)


def test_decay_constants_stay_pythons():
    made = hp.optimizer("adamw", learning_rate=0.1, weight_decay=0.01, b2=0.9999, eps=1e-6)
    assert sorted(jax.tree.leaves(made)) == [0.01, 0.1]
    assert made.options() == {"learning_rate": 0.1, "weight_decay": 0.01, "b2": 0.9999, "eps": 1e-6}


BY_NAME = hp.optimizer(
    "by-name",
    a=hp.optimizer("sgd", learning_rate=2.0),
    b=hp.optimizer("adam", learning_rate=hp.schedule("power", 0.1)),
)


def test_entries_move_by_their_own_optimizers():
    params = {"a": jnp.array([1.0, 2.0]), "b": {"c": jnp.array(3.0)}}
    gradient = {"a": jnp.array([1.0, -3.0]), "b": {"c": jnp.array(-0.5)}}
    moved: Any = jax.jit(lambda made: made.build().update(gradient, made.build().init(params), params)[0])(BY_NAME)
    np.testing.assert_allclose(moved["a"], [-2.0, 6.0])
    np.testing.assert_allclose(moved["b"]["c"], 0.1, rtol=1e-5)  # Adam's first step has the sign of the gradient
    written = {"name": "PDBO", "steps": 1, "inner": {"name": "SGP", "steps": 1, "step_size": 0.1}}
    written |= {"hypergradient": {"name": "HGP", "steps": 1, "pushes": 1, "step_size": 0.1}, "outer": table(BY_NAME)}
    assert registry.build("algorithms", written, "method").outer == BY_NAME
    written["outer"]["b"]["learning_rate"] = -1
    with pytest.raises(hp.InvalidInput, match=r"^method\.outer\.b\.learning_rate: got -1"):
        registry.build("algorithms", written, "method")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hp.schedule("cosin", 0.1, steps=3), "schedule: got 'cosin'.*did you mean 'cosine'"),
        (lambda: hp.schedule("cosine", 0.1, step=3), "schedule.step: got 'step'.*did you mean 'steps'"),
        (lambda: hp.schedule("cosine", 0.1), "schedule.steps: got None; allowed: a value"),
        (lambda: hp.schedule("cosine", 0.1, 3, 0.0, 1), "schedule: got .*too many"),
        (lambda: hp.schedule("cosine", "fast", steps=3), "schedule.value: got 'fast'; allowed: a finite number"),
        (lambda: hp.schedule("milestones", 0.1, at=3), "schedule.at: got 3"),
        (lambda: hp.schedule("milestones", 0.1, at=(-1,)), "schedule.at: got -1"),
        (lambda: hp.schedule("power", -1.0), "schedule.scale: got -1.0"),
        (lambda: hp.optimizer("admw", learning_rate=0.1), "optimizer: got 'admw'.*did you mean 'adamw'"),
        (lambda: hp.optimizer("lbfgs", learning_rate=0.1), "optimizer: got 'lbfgs'"),
        (lambda: hp.optimizer("adam", rate=0.1), "optimizer.adam.rate: got 'rate'.*did you mean 'learning_rate'"),
        (lambda: hp.optimizer("adam"), "optimizer.adam.learning_rate: got None"),
        (lambda: hp.optimizer("adam", learning_rate=0), "optimizer.adam.learning_rate: got 0; allowed: .*above 0"),
        (lambda: hp.optimizer("adam", learning_rate=0.1, b1=np.ones(2)), "optimizer.adam.b1: got array"),
        (lambda: hp.optimizer("adamw", learning_rate=0.1, weight_decay=-1), "optimizer.adamw.weight_decay: got -1"),
        (lambda: hp.optimizer("by-name", pl=0.1), "optimizer.by-name.pl: got 0.1; allowed: an optimizer such as"),
        (lambda: BY_NAME.build().init({"a": 0.0}), r"by-name: got \['a', 'b'\]; allowed: .* each entry of \['a'\]"),
        (lambda: BY_NAME.build().init(0.0), "by-name: got .*each entry of a float"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(hp.InvalidInput, match=message):
        make()


def test_raw_transformations_pass():
    raw = optax.chain(optax.clip(1.0), optax.sgd(0.1))
    assert build(None, raw) is raw
    assert isinstance(hp.SGP(1, optimizer=hp.optimizer("sgd", learning_rate=0.1)).optimizer, Optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_make_them_again(name):
    options = {"value": 0.1, "scale": 0.1, "steps": 5, "at": (1, 2), "factor": 0.5}
    kind = SCHEDULES[name]
    made = kind(**{key: cast(Any, options[key]) for key in kind.__dataclass_fields__ if key in options})
    written = table(made)
    assert written.pop("name") == name
    assert hp.schedule(name, **written) == made
