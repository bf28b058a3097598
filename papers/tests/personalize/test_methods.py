"""Methods fitted on a small task, and what they must equal before their hypers have changed."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.personalize import MTL, Product, Shared
from hyperpush_papers.common.models.dense import MLP
from hyperpush_papers.personalize import methods
from hyperpush_papers.personalize.scenarios import scenario
from hyperpush_papers.personalize.settings import small

pytestmark = pytest.mark.long

SIZES = {"clients": 6, "steps": 12, "again": 4, "outer_steps": 2, "rounds": 2, "batch": 16, "order": 2}
SETTING = replace(small("digits"), **SIZES, rate=0.2, ensemble_rate=0.5)


def fitting(network, hidden=(), setting=SETTING):
    made = scenario("digits", 6, 0, examples=300)._replace(model=MLP(64, 10, hidden))
    return methods.Fitting(made, hp.network(network, 6), setting, jax.random.key(0), None)


def fitted(fitting, *names):
    return {name: fitting.fit(name, hp.HGP(2, 2, 0.1, 16, keep_mass=True)) for name in names}


@pytest.fixture(scope="module")
def pushed():
    names = ("sgp", "pl", "da", "head", "interpolation", "local")
    return fitted(fitting("random-directed", (8,)), *names)


def test_before_the_first_outer_step_recipes_are_the_shared_model(pushed):
    for name in ("pl", "da", "head"):
        assert pushed[name].curve[0] == pytest.approx(pushed["sgp"].curve[0], abs=1e-6), name
    # half of its prediction comes from a model trained alone
    assert pushed["interpolation"].curve[0] != pushed["sgp"].curve[0]


def test_label_weights_move_but_have_no_direct_gradient(pushed):
    assert pushed["da"].best_step > 0
    assert np.any(pushed["da"].hypers["da"])
    made = fitting("random-directed", ())
    reasons = [methods.why_not(f"{name}-direct", made.network, made.setting) for name in ("da+clean", "da+pl")]
    assert reasons == ["the direct gradient is zero: no part changes predictions", None]


def test_the_best_outer_step_is_taken_and_what_is_sent_is_counted(pushed):
    for name, each in pushed.items():
        assert each.best_step == int(np.argmax(each.curve)), name
        assert len(each.curve) == 3
        assert (each.floats > 0) == (name != "local")
    assert pushed["pl"].floats > pushed["sgp"].floats  # the hypergradient adds traffic
    assert pushed["head"].floats < pushed["pl"].floats  # one layer is not sent


def test_ensembles_alone_and_together_train_at_their_own_rate():
    made = fitting("random-directed")
    for alone in (True, False):
        for recipe, rate in ((MTL(), 0.5), (Shared(), 0.2)):
            solver: Any = made.solver(Product([recipe]), alone)
            assert float(solver.step_size(0)) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("network", "names"),
    [
        ("fully-connected", ("sgp", "fedprox", "fedavg+", "clustered-fl", "pfedme")),
        ("static-undirected", ("sgp-mtl", "mtl+da", "fedem")),
    ],
)
def test_methods_with_local_epochs_learn(network, names):
    made = fitting(network, setting=replace(SETTING, rounds=20))
    for name, each in fitted(made, *names).items():
        found = hp.personalize.scores(each.product, made.scenario.model, each.params, each.hypers, made.scenario.test)
        assert found.average > 0.2, name  # guessing is right for one example in ten
        assert each.rounds > 0
