"""Settings of the personalization study, compared with the papers' tables as typed in here."""

from dataclasses import replace
from typing import Any

import pytest

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.personalize import DA, MTL, Product
from hyperpush_papers.personalize.config import Outer
from hyperpush_papers.personalize.methods import RECIPES, product_of
from hyperpush_papers.personalize.settings import of_paper, small


def moves(name, setting):
    """Return the rate and the penalty of each recipe of a method."""
    product = product_of(name, setting)
    return {each.name: (each.outer.options()["learning_rate"], each.l2) for each in product.recipes}


# Table 2 of "Personalized decentralized bilevel optimization over stochastic and directed networks": (rate, L2).
@pytest.mark.parametrize(
    ("network", "by", "models"),
    [("fully-connected", "server", 1.0), ("static-undirected", "gossip", 1.0), ("random-undirected", "push", 0.1)],
)
def test_personalized_moves_hypers_as_its_table_says(network, by, models):
    made = of_paper("personalized", "emnist", network, by)
    for methods, expected in (
        ("da", {"da": (0.1, 0)}),
        ("mtl", {"mtl": (models, 0.01)}),
        ("mtl+da", {"mtl": (models, 0.01), "da": (0.1, 0.0005)}),
    ):
        assert moves(methods, made) == expected
    assert (made.outer_steps, made.order, made.betas, made.clusters) == (20, 200, (0.9, 0.999), False)
    assert made.estimator == ("vr-hgp" if by == "push" else "directed-rb")
    assert made.network_options == ({"mixing": "fastest-mixing"} if network == "static-undirected" else {})
    assert made.again is None  # retrain from the start before every outer step
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
    other = of_paper("personalized", data, "random-directed", "push")  # "the same … parameters", but M = 20
    assert (other.steps, other.rate, other.ensemble_rate) == (600, 0.05, 0.25)
    assert (other.outer_steps, other.order) == (20, order)
    assert ([round(share * 600) for share in other.falls], other.betas) == ([500, 550], (0.9, 0.999))


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
    assert set(RECIPES) == {"pl", "mtl", "da", "head", "interpolation", "clean", "l2rates"}
    setting = of_paper("hypergradient", "emnist", "fully-connected", "server")
    assert moves("pl-direct", setting) == {"pl": (0.1, 0.01)}
    assert moves("pl", small("emnist")) == {"pl": (0.1, 0.001)}
    assert moves("da+pl+mtl", small("emnist")) == {"da": (0.1, 0.0), "pl": (0.1, 0.001), "mtl": (1.0, 0.01)}
    assert moves("da+mtl", replace(small("emnist"), outer_rate=0.7)) == {
        "da": (0.7, 0.0005),
        "mtl": (0.7, 0.01),
    }
    options = {"models": 4, "recipes": {"da": {"normalized": False, "outer": {"name": "sgd", "learning_rate": 2.0}}}}
    made = product_of("mtl+da", replace(small("emnist"), **options))
    assert made == Product(
        [
            MTL(4, l2=0.01, outer=hp.optimizer("adam", learning_rate=0.1, b1=0.9, b2=0.999)),
            DA(False, l2=0.0005, outer=hp.optimizer("sgd", learning_rate=2.0)),
        ]
    )
    # The paper's other betas are those of every recipe here.
    adam = product_of("pl+head", of_paper("cooperative", "emnist", "random-directed", "push")).recipes[1].outer
    assert adam == hp.optimizer("adam", learning_rate=0.003, b1=0.9, b2=0.99)
