"""Settings beside the tables of the papers, typed off by hand."""

from typing import Any

import pytest

from hyperpush.errors import InvalidInput
from hyperpush.personalize.recipes import DA, MTL, PL
from hyperpush.studies.personalize.config import Outer
from hyperpush.studies.personalize.methods import NAMES, RECIPES, recipe_of
from hyperpush.studies.personalize.settings import of_paper, small


# Table 2 of "Personalized decentralized bilevel optimization over stochastic and directed networks": (rate, L2).
@pytest.mark.parametrize(
    ("network", "by", "models"),
    [("fully-connected", "server", 1.0), ("static-undirected", "gossip", 1.0), ("random-undirected", "push", 0.1)],
)
def test_personalized_moves_hypers_as_its_table_says(network, by, models):
    made = of_paper("personalized", "emnist", network, by)
    assert made.outer["da"] == (0.1, 0, None, None)
    assert made.outer["mtl"] == (models, 0.01, None, None)
    assert made.outer["mtl-da"] == (models, 0.01, 0.1, 0.0005)
    assert (made.outer_steps, made.order, made.betas, made.clusters) == (20, 200, (0.9, 0.999), False)
    assert made.estimator == ("vr-hgp" if by == "push" else "directed-rb")
    assert made.again is None  # from the start before every outer step
    assert [round(share * 600) for share in made.falls] == [500, 550]
    if by == "push":
        assert (made.steps, made.rate, made.ensemble_rate, made.batch, made.l2) == (600, 0.05, 0.25, 128, 1e-3)


# Table 2 of "Cooperative personalized bilevel optimization over random directed networks".
@pytest.mark.parametrize(
    ("data", "steps", "rate", "outer_steps", "order"),
    [
        ("emnist", 600, 0.5, 5, 200),
        ("cifar10", 1200, 0.1, 10, 20),
        ("cifar100", 1200, 0.2, 10, 20),
        ("shakespeare", 1200, 10, 10, 20),
    ],
)
def test_cooperative_is_as_its_table_says(data, steps, rate, outer_steps, order):
    made = of_paper("cooperative", data, "random-directed", "push")
    assert (made.steps, made.ensemble_rate, made.outer_steps, made.order) == (steps, rate, outer_steps, order)
    assert (made.outer["mtl"], made.betas, made.batch, made.l2) == (Outer(1.0, 0.01), (0.9, 0.99), 128, 1e-3)
    assert made.clusters
    assert [round(share * steps) for share in made.falls] == [steps - 100, steps - 50]  # "at the last 100 and 50 steps"
    other = of_paper("personalized", data, "random-directed", "push")
    assert other.outer_steps == 20  # "the same … parameters", but M = 20
    assert other.order == order


# Tables 6 and 7 of "Decentralized hypergradient computation over time-varying directed networks".
@pytest.mark.parametrize(
    ("network", "by", "pl", "mtl", "rates"),
    [
        ("fully-connected", "server", (0.1, 0.01), (1.0, 0.01), (10**-1.5, 10**-1)),
        ("random-directed", "push", (0.1, 0.001), (0.1, 0.01), (0.1, 0.5)),
    ],
)
def test_hyper_gradient_is_as_its_tables_say(network, by, pl, mtl, rates):
    made = of_paper("hypergradient", "emnist", network, by)
    assert (made.outer["pl"][:2], made.outer["mtl"][:2]) == (pl, mtl)
    assert (made.rate, made.ensemble_rate) == pytest.approx(rates, rel=1e-2)
    assert (made.outer_steps, made.order, made.clusters, made.estimator) == (5, 10, True, "hgp")


def test_what_a_paper_does_not_have_is_refused():
    wanted: Any = (
        ("hypergradient", "cifar10", "random-directed", "push", "data: got 'cifar10'"),
        ("cooperative", "digits", "random-directed", "push", "data: got 'digits'"),
        ("cooperative", "emnist", "random-undirected", "push", "network: got 'random-undirected'"),
        ("personalized", "shakespeare", "static-undirected", "gossip", "network: got 'static-undirected'"),
        ("personalized", "emnist", "ring", "gossip", "network: got 'ring'"),
    )
    for *given, said in wanted:
        with pytest.raises(InvalidInput, match=f"{said}; allowed: what the paper has"):
            of_paper(*given)


def test_recipes_are_found_and_made_with_the_settings_penalties():
    assert set(RECIPES) == {"pl", "mtl", "da", "mtl-da", "head", "interpolation"}
    assert len(set(NAMES)) == len(NAMES)
    setting = of_paper("hypergradient", "emnist", "fully-connected", "server")
    assert recipe_of("pl", setting) == (PL(0.01), Outer(0.1, 0.01), False)
    assert recipe_of("pl-direct", small("emnist"))[0] == PL(0.001)
    recipe, outer, _ = recipe_of("mtl-da", of_paper("personalized", "emnist", "static-undirected", "gossip"))
    assert recipe == DA(0.0005, MTL(l2=0.01))
    assert outer == (1.0, 0.01, 0.1, 0.0005)
    assert recipe_of("mtl-da", small("emnist").model_copy(update={"outer_rate": 0.7}))[1] == (0.7, 0.01, 0.7, 0.0005)
    assert recipe_of("local-mtl", setting)[1:] == (None, True)
