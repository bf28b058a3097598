"""Properties of every registered recipe, alone and with others. A new one is tested as soon as it is registered."""

from typing import Any

import jax
import numpy as np
import pytest
from common_suite import CLIENTS, ENGINE, NETWORK, CommonSuite, compiled  # noqa: F401
from layered import Layered

import hyperpush as hp
from hyperpush.methods.registry import registered

GENERATOR = np.random.default_rng(0)
MODEL = Layered(3, 3, (4,))
DATA: Any = {
    name: (GENERATOR.normal(size=(CLIENTS, 6, 3)).astype(np.float32), GENERATOR.integers(0, 3, (CLIENTS, 6)))
    for name in ("train", "validation")
}
SOLVER = hp.SGP(3, 0.1)
FITTED: Any = {"inner": SOLVER, "hypergradient": hp.HGP(2, 1, 0.1), "steps": 2}
# Effects must show after two steps; hypers that occur only in training move less, so they get larger rates.
RATES = {"Clean": 20.0, "L2Rates": 20.0}
RECIPES: Any = {
    name: each(l2=0.5, outer=hp.optimizer("sgd", learning_rate=RATES.get(name, 2.0)))
    for name, each in registered("recipes").items()
    if name != "Shared"
}
RECIPES["L2Rates"] = RECIPES["L2Rates"].with_options(rate=1.0)


class Fitted(CommonSuite):
    @staticmethod
    def run(method, engine=ENGINE, network=NETWORK):
        return hp.personalize.fit(MODEL, method, network, **DATA, **FITTED, key=0, engine=engine)

    @staticmethod
    def values(result):
        return result.hypers

    @pytest.mark.parametrize("engine", [hp.Threads()], ids=["Threads"])
    def test_engines_agree(self, method, engine):
        """A recipe only builds a task with personal hypers; all engines are compared for the methods that fit it."""
        super().test_engines_agree(method, engine)


class TestRecipes(Fitted):
    METHODS = RECIPES
    FEW = ("PL",)
    # Products of recipes, below, test all of them.
    REPEATED = (
        "test_engines_agree",
        "test_same_key_gives_the_same_bits_and_a_new_number_compiles_nothing",
        "test_status_has_a_reason",
    )


# Together these contain all recipes, and each stage next to each other stage.
BESIDE = [("PL", "MTL", "Clean", "Head"), ("DA", "Interpolation", "Head", "L2Rates")]
PRODUCTS: Any = {"+".join(names): tuple(map(RECIPES.get, names)) for names in BESIDE}


@pytest.mark.long  # the parts are tested above
class TestProducts(Fitted):
    METHODS = PRODUCTS
    FEW = ()

    test_toml_round_trip: Any = None  # tested for the single recipes above
    test_an_option_out_of_range_is_named: Any = None

    def test_every_part_moves(self, method):
        start = hp.personalize.Product(method).task(MODEL, **DATA, key=0).hypers
        found = self.reference(method).hypers
        assert set(found) == {each.name for each in method}
        for name, own in found.items():
            leaves = zip(*map(jax.tree.leaves, (own, start[name])), strict=True)
            assert any(np.abs(a - b).max() > 1e-4 for a, b in leaves), name


def test_nothing_is_personal_in_a_shared_model():
    """`Shared` has no options and no effective hypers, so its result is that of plain training."""
    shared = hp.personalize.Shared()
    found = hp.personalize.fit(MODEL, shared, NETWORK, **DATA, method=SOLVER, key=0)
    trained = hp.train(shared.task(MODEL, **DATA, key=0, l2=1e-3), SOLVER, NETWORK, key=0)
    np.testing.assert_array_equal(found.client(0).params["dense1"]["weight"], trained.params["dense1"]["weight"][0])
