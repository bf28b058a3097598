"""Properties of every registered method: examples, comparison, checked options and traced numbers."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hyperpush as hp
from hyperpush.base.checks import check_integer, check_positive
from hyperpush.deploy.train_first import TrainFirst
from hyperpush.methods.base import Method
from hyperpush.methods.registry import registered

KINDS = ("inner", "hypergradients", "algorithms", "baselines", "big_fed")
CLASSES: dict[str, Any] = {name: each for kind in KINDS for name, each in registered(kind).items()}
# FedEM is left out: its model is a Python object, which examples in the registry cannot contain.
METHODS: dict[str, Method] = {name: each.example() for name, each in CLASSES.items() if name != "FedEM"}
everyone = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@everyone
def test_equal_ones_are_equal_and_others_are_not(method):
    again = type(method).example()
    assert method == again
    assert hash(method) == hash(again)
    for field in dataclasses.fields(method):
        name, value = field.name, getattr(method, field.name)
        if type(value) is float and not field.metadata.get("static"):
            other = dataclasses.replace(method, **{name: value / 2 if value else 0.5})
            assert other != method
            assert jax.tree.structure(other) == jax.tree.structure(method)


@everyone
def test_numbers_are_leaves_and_structure_is_not(method):
    leaves = jax.tree.leaves(method)
    assert all(type(leaf) is not int for leaf in leaves)
    numbers, rest = eqx.partition(method, lambda leaf: isinstance(leaf, float))
    traced = jax.tree.map(jnp.asarray, numbers)
    assert jax.tree.structure(eqx.combine(traced, rest)) == jax.tree.structure(method)


@everyone
def test_an_option_of_the_wrong_kind_is_named(method):
    for name, value in method.options().items():
        if type(value) in (int, float, bool, str):
            with pytest.raises(hp.InvalidInput) as refused:
                dataclasses.replace(method, **{name: [object()]})
            assert refused.value.field == f"{type(method).__name__}.{name}"


@everyone
def test_info_is_complete(method):
    assert method.info.sends
    assert method.info.paper
    assert type(method).__doc__


ITD = cast(Any, hp.hypergradients.ITDBackward)
HGP = cast(Any, hp.HGP)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HGP(3, 1, 0.1, averaging="psh"), r"HGP.averaging: got 'psh'.*did you mean 'push'"),
        (lambda: HGP(3.0, 1, 0.1), "HGP.steps: got 3.0; allowed: a whole number"),
        (lambda: HGP(True, 1, 0.1), "HGP.steps: got True; allowed: a whole number"),
        (lambda: HGP("3", 1, 0.1), "HGP.steps: got '3'; allowed: a whole number"),
        (lambda: HGP(3, 1, "fast"), "HGP.step_size: got 'fast'; allowed: a finite number"),
        (lambda: HGP(3, 1, True), "HGP.step_size: got True; allowed: a finite number"),
        (lambda: HGP(3, 1, float("nan")), "HGP.step_size: got nan; allowed: a finite number"),
        (lambda: HGP(3, 1, np.ones(2)), "HGP.step_size: got array"),
        (lambda: HGP(3, 1, 0.1, keep_mass=1), "HGP.keep_mass: got 1; allowed: true or false"),
        (lambda: HGP(3, 1, 0.1, batch_size="all"), "HGP.batch_size: got 'all'; allowed: a whole number or None"),
        (
            lambda: ITD(hp.SGP),
            r"ITDBackward.solver: .*such as SGP\(steps=…, step_size=…\), not the class SGP",
        ),
        (lambda: ITD("SGP"), r"ITDBackward.solver: got 'SGP'; allowed: an object such as SGP\(steps=…, step_size=…\)"),
        (lambda: hp.SGP(3), r"SGP.step_size: got None; allowed: a number or hp.schedule\(…\).*or else an optimizer"),
        (lambda: hp.SGP(3, 0.1, optimizer=optax.sgd(0.1)), "SGP.step_size: got 0.1; allowed: None where an optimizer"),
        (lambda: hp.SGP(3, optimizer=cast(Any, "adam")), r"SGP.optimizer: got 'adam'.*hp.optimizer\(\"adam\""),
        (lambda: hp.SGP(3, cast(Any, optax.adam(0.1))), "SGP.step_size: got GradientTransformation"),
    ],
)
def test_wrong_options_say_what_would_be_right(make, message):
    with pytest.raises(hp.InvalidInput, match=message):
        make()


def test_whole_numbers_become_floats_and_traced_ones_stay():
    assert type(hp.HGP(3, 1, 1).step_size) is float
    assert type(hp.HGP(3, 1, np.float32(0.5)).step_size) is float
    held = jnp.asarray(0.5)
    assert hp.HGP(3, 1, held).step_size is held
    shape = jax.eval_shape(lambda step: hp.HGP(3, 1, step), 0.5)
    assert shape.step_size.shape == ()
    assert check_positive("x", jnp.asarray(-1.0)) == -1  # JAX arrays were checked before they were traced


def test_checks_of_what_may_be_missing():
    assert check_positive("x", None, optional=True) is None
    assert check_integer("x", None, 1, optional=True) is None
    with pytest.raises(hp.InvalidInput, match="x: got 0; allowed: a whole number from 1, or None"):
        check_integer("x", 0, 1, optional=True)
    with pytest.raises(hp.InvalidInput, match="x: got None; allowed: a finite number above 0"):
        check_positive("x", None)


def test_facts_may_depend_on_options():
    class Either(hp.SGP):
        info = hp.extend.info_by_options(
            hp.SGP.info, lambda self, usual: dataclasses.replace(usual, network="any" if self.steps else "none")
        )

    assert Either.info == hp.SGP.info
    assert [Either(steps, 0.1).info.network for steps in (1, 0)] == ["any", "none"]
    assert Either.usage() == hp.SGP.usage().replace("SGP", "Either")


def test_a_training_before_an_estimate_has_the_facts_of_the_estimator():
    first = TrainFirst(hp.SGP(3, 0.1), hp.TreeCG())
    assert first.info == hp.TreeCG.info
    assert TrainFirst.usage().startswith("TrainFirst(")
