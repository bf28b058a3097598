"""Globals or closures that a loss, a metric or a schedule reads may change between two calls in one process."""

import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.fingerprint import fingerprint
from hyperpush.engines.compiled import compile

SCALE, RATE = {"train": 1.0, "metric": 1.0}, [0.25]
NETWORK = hp.networks.FullyConnected(3)


@pytest.fixture(autouse=True)
def fresh():
    SCALE.update(train=1.0, metric=1.0)
    RATE[0] = 0.25


def loss(x, hyper, a):
    return (x - SCALE["train"] * a) ** 2


def metric(x, hyper, a):
    return SCALE["metric"] * x


def rate(step):
    return RATE[0]


def run():
    ones = jnp.ones((3, 4))
    task = hp.Task(inner=loss, outer=loss, params=0.0, hypers=0.0, train=ones, validation=ones)
    return hp.train(task, hp.SGP(40, rate), NETWORK, key=0, metrics={"twice": metric}, every=40)


@pytest.mark.long
def test_a_loss_is_read_anew():
    np.testing.assert_allclose(run().params, 1.0, rtol=1e-5)
    SCALE["train"] = 3.0
    np.testing.assert_allclose(run().params, 3.0, rtol=1e-5)


def measured():
    history = run().history
    assert history is not None
    return history.metrics["twice"][-1]


@pytest.mark.long
def test_a_metric_is_read_anew():
    np.testing.assert_allclose(measured(), 1.0, rtol=1e-5)
    SCALE["metric"] = 2.0
    np.testing.assert_allclose(measured(), 2.0, rtol=1e-5)


def test_a_schedule_is_read_anew():
    np.testing.assert_allclose(run().params, 1.0, rtol=1e-5)
    RATE[0] = 0.0  # the remaining distance is (1 − 2η)^40 = 1 of the initial one
    np.testing.assert_allclose(run().params, 0.0, atol=1e-6)


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.long
def test_a_closure_over_an_array_is_read_anew(size):
    def train_with(shift):
        ones = jnp.ones((3, 4))
        moved = {"by": shift}
        task = hp.Task(
            inner=lambda x, h, a: (x - a - moved["by"][0]) ** 2,
            outer=loss,
            params=0.0,
            hypers=0.0,
            train=ones,
            validation=ones,
        )
        first = hp.train(task, hp.SGP(40, 0.25), NETWORK, key=0).params
        moved["by"] = shift + 1
        return first, hp.train(task, hp.SGP(40, 0.25), NETWORK, key=0).params

    first, second = train_with(np.zeros(size, np.float32))
    np.testing.assert_allclose(first, 1.0, rtol=1e-5)
    np.testing.assert_allclose(second, 2.0, rtol=1e-5)


def test_nothing_compiles_where_nothing_changed():
    run()
    with compile.counting() as counts:
        run()
    assert counts.compilations == 0


class Shifted(eqx.Module):
    """A cost with a numeric field."""

    by: float

    def __call__(self, x, hyper, a):
        return SCALE["train"] * (x - a - self.by) ** 2


def test_a_number_of_a_cost_compiles_nothing_and_what_its_code_reads_does():
    def run(by):
        ones = jnp.ones((3, 4))
        task = hp.Task(inner=Shifted(by), outer=loss, params=0.0, hypers=0.0, train=ones, validation=ones)
        return hp.train(task, hp.SGP(40, 0.25), NETWORK, key=0, metrics={"off": Shifted(by)}, every=40)

    run(0.0)
    with compile.counting() as counts:
        np.testing.assert_allclose(run(2.0).params, 3.0, rtol=1e-5)
    assert counts.compilations == 0
    SCALE["train"] = 0.0
    np.testing.assert_array_equal(run(2.0).params, 0.0)


class Settings:
    """An object whose attributes the costs read."""

    scale = 1.0  # a class attribute

    def __init__(self):
        self.own = 1.0

    @property
    def doubled(self):
        return 2 * self.own

    def tripled(self):
        return 3 * self.own


class Slotted:
    __slots__ = ("scale",)


SETTINGS, SLOTTED, MODULE = Settings(), Slotted(), types.ModuleType("somebodys_settings")
ARRAY, NAMES, FLAG = np.ones(3), {"a"}, [1.0]


def nested(x, hyper, a):
    def inside(x):
        return FLAG[0] * x

    return jax.vmap(lambda b: inside(x) - b)(a)


def helper(x):
    return FLAG[0] * x


def by_default(x, hyper, a, scale=FLAG):
    return scale[0] * x - a


def by_keyword(x, hyper, a, *, scale=FLAG):
    return scale[0] * x - a


class Helped:
    """A callable whose code is in another method."""

    def __call__(self, x, hyper, a):
        return self.work(x) - a

    def work(self, x):
        return FLAG[0] * x


compiled = jax.jit(helper)
recursion = lambda x, hyper, a: recursion(x, hyper, a)  # noqa: E731
FUNCTIONS = {
    "an attribute of a class": (lambda x, h, a: Settings.scale * x - a, lambda: setattr(Settings, "scale", 3.0)),
    "an attribute of an object": (lambda x, h, a: SETTINGS.own * x - a, lambda: setattr(SETTINGS, "own", 3.0)),
    "a class attribute of an object": (lambda x, h, a: SETTINGS.scale * x - a, lambda: setattr(Settings, "scale", 4.0)),
    "a property": (lambda x, h, a: SETTINGS.doubled * x, lambda: setattr(Settings, "doubled", property(lambda s: 5.0))),
    "a method": (lambda x, h, a: SETTINGS.tripled() * x, lambda: setattr(Settings, "tripled", lambda s: 5.0)),
    "a slot": (lambda x, h, a: SLOTTED.scale * x - a, lambda: setattr(SLOTTED, "scale", 3.0)),
    "a module": (lambda x, h, a: MODULE.scale * x - a, lambda: setattr(MODULE, "scale", 3.0)),
    "an array": (lambda x, h, a: ARRAY[0] * x - a, lambda: ARRAY.__setitem__(0, 3.0)),
    "a set": (lambda x, h, a: len(NAMES) * x - a, lambda: NAMES.add("b")),
    "a nested function": (nested, lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
    "a helper": (lambda x, h, a: helper(x) - a, lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
    "a compiled helper": (lambda x, h, a: compiled(x) - a, lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
    "a default": (by_default, lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
    "a keyword": (by_keyword, lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
    "another method": (Helped(), lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
    "a partial": (functools.partial(by_default, scale=FLAG), lambda: FLAG.__setitem__(0, FLAG[0] + 1)),
}


@pytest.mark.parametrize(("cost", "change"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_way_in_is_part_of_the_digest(cost, change):
    SLOTTED.scale = 1.0
    vars(MODULE)["scale"] = 1.0
    before = fingerprint(cost, quick=True)
    assert fingerprint(cost, quick=True) == before
    change()
    assert fingerprint(cost, quick=True) != before


def test_functions_that_refer_to_themselves_end():
    assert fingerprint(recursion) == fingerprint(recursion)
