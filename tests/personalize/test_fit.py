"""Personal models from a user's model (Equinox modules, objects, pairs of functions), with recipes and baselines."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import Layered

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.personalize import DA, MTL, PL, Clean, FedEM, FedProx, Head, Interpolation, Shared, fit
from hyperpush.personalize.fit import _choose as choose

NETWORK = hp.networks.Ring(4)
GENERATOR = np.random.default_rng(0)


def examples(*sizes):
    """Return examples of two rules, x₁ > 0 and x₁ < 0: clients 0 and 1 follow the first, 2 and 3 the second."""
    inputs = [GENERATOR.normal(size=(size, 2)).astype(np.float32) for size in sizes]
    return [(x, (x[:, 0] > 0).astype(np.int64) ^ (client > 1)) for client, x in enumerate(inputs)]


SETS: Any = {name: examples(*sizes) for name, sizes in (("train", (40, 30, 25, 40)), ("validation", (20, 9, 20, 20)))}
TEST = examples(50, 50, 50, 50)
SHORT: Any = {"inner": hp.SGP(10, 0.5), "hypergradient": hp.HGP(2, 2, 0.1), "steps": 1, "key": 0}


def equinox(key=None):
    key = jax.random.key(1) if key is None else key
    return eqx.nn.MLP(2, 2, width_size=4, depth=1, key=key)


class FlaxLike:
    """An object whose `init` needs inputs, as Flax's does."""

    def init(self, key, *inputs):
        assert inputs[0].ndim == 2
        return {"params": {"kernel": jax.random.normal(key, (inputs[0].shape[1], 2))}}

    def apply(self, variables, inputs):
        return inputs @ variables["params"]["kernel"]


class Plain(NamedTuple):
    """A named pair of functions."""

    init: Any = lambda key: jax.random.normal(key, (2, 2))
    apply: Any = lambda params, inputs: inputs @ params


@pytest.mark.long
def test_an_equinox_model_with_several_personal_ones_learns_each_rule():
    steps: Any = {"inner": hp.SGP(30, 1.0), "hypergradient": hp.HGP(5, 5, 0.3), "steps": 8}
    steps["outer"] = hp.optimizer("adam", learning_rate=0.3)
    found = fit(equinox(), MTL(models=2), NETWORK, **SETS, test=TEST, names=["a", "b", "c", "d"], key=3, **steps)
    assert isinstance(found, hp.Solution)
    scores = found.scores()
    assert scores.each.min() > 0.9  # one common model is right for half of the examples
    own = found.client("c")
    right = np.asarray(own.predict(TEST[2][0]) == TEST[2][1])
    assert right.mean() == pytest.approx(scores.each[2])
    np.testing.assert_allclose(jnp.exp(own.log_probabilities(TEST[2][0])).sum(1), 1, rtol=1e-5)
    models = jax.tree.leaves(found.task.params)[0][0]
    assert not np.allclose(models[0], models[1])
    assert own.hyper["mtl"].shape == (2,)


@pytest.mark.parametrize("model", [equinox(), equinox, FlaxLike(), Plain(), tuple(Plain()), Layered(2, 2)])
@pytest.mark.long
def test_any_model_gives_what_a_recipes_task_gives(model):
    found = fit(model, PL(), NETWORK, **SETS, **SHORT)
    task = PL().task(model, **SETS, key=0, l2=1e-3)
    method = hp.PDBO(
        inner=SHORT["inner"],
        hypergradient=SHORT["hypergradient"],
        outer=hp.optimizer("by-name", pl=hp.optimizer("adam", learning_rate=0.1)),
        steps=1,
        restart=False,
    )
    expected = hp.solve(task, method, NETWORK, key=0)
    assert isinstance(found, hp.Solution)
    np.testing.assert_array_equal(found.hypers["pl"], expected.hypers["pl"])
    assert np.abs(np.asarray(found.hypers["pl"])).max() > 0.05  # Adam's first step has the length of its rate
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_an_equinox_module_starts_from_its_own_numbers_and_several_from_others_of_the_kind():
    model = equinox()
    numbers = eqx.filter(model, eqx.is_inexact_array)
    one = PL().task(model, **SETS, key=0)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), one.params, numbers)
    several = MTL(models=2).task(model, **SETS, key=0)

    def shuffled(stacked, own):
        for k in range(2):
            np.testing.assert_array_equal(np.sort(np.ravel(stacked[0, k])), np.sort(np.ravel(own)))

    jax.tree.map(shuffled, several.params, numbers)
    drawn = MTL(models=2).task(equinox, **SETS, key=0)
    weights = drawn.params.layers[0].weight[0]
    assert not np.intersect1d(weights[0], weights[1]).size
    # Another start has the same costs, so nothing is compiled twice.
    assert PL().task(equinox(jax.random.key(7)), **SETS, key=0).problem == one.problem


@pytest.mark.long
def test_baselines_are_trained():
    server = hp.networks.FullyConnected(4)
    given = FedProx(3, 0.5, penalty=0.1)
    found = fit(equinox(), given, server, train=SETS["train"], test=TEST, key=0)
    assert isinstance(found, hp.Training)
    expected = hp.train(
        Shared().task(equinox(), train=SETS["train"], outer_on="train", key=0, l2=1e-3), given, server, key=0
    )
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert found.client(1).predict(TEST[1][0]).shape == (50,)
    mixed = fit(Plain(), FedEM(40, 1.0), server, **SETS, test=TEST, key=0)
    assert isinstance(mixed, hp.Training)
    assert mixed.scores("test").each.min() > 0.9
    assert mixed.client(0).hyper["mtl"].shape == (3,)


@pytest.mark.long
def test_the_best_step_is_chosen_where_nobody_fits():
    more: Any = {**SHORT, "steps": 2}
    held = fit(Plain(), PL(), NETWORK, **SETS, holdout=TEST, **more)
    assert isinstance(held, hp.Solution)
    assert held.history.watched is not None
    assert held.best_step == int(np.argmax(held.history.watched[:, 0]))
    assert held.scores("holdout").average == pytest.approx(held.history.watched[:, 0].max(), rel=1e-4)
    papers = fit(Plain(), PL(), NETWORK, **SETS, outer_on="train", **more)
    assert isinstance(papers, hp.Solution)
    assert papers.task.outer_on == "train"
    assert papers.history.watched is not None


def test_personal_parts_are_fitted_privately():
    """Each gradient and product of M steps is one release, and so is each evaluation of the held-out accuracy."""
    bounds = {"clip": 1.0, "curvature": 1.0, "coupling": 1.0, "noise": hp.privacy.Gaussian(9.0)}
    estimator = hp.TrackedHGP(3, 0.1, tolerance=None)
    more: Any = {**SETS, **SHORT, "steps": 2, "hypergradient": estimator, "inner": hp.SGP(10, 0.5)}
    found = fit(Plain(), [PL(), Clean()], NETWORK, holdout=TEST, private=bounds, **more)
    assert found.privacy.releases == {"train": 3 * 10 + 2 * 3, "holdout": 3, "validation": 2}
    wrong("recipes", "train a model alone: that training adds no noise", recipes=Interpolation(), private=bounds)
    wrong("task.private.clips", "did you mean 'clip'", private={"clips": 1})


@pytest.mark.long
def test_what_a_recipe_needs_beforehand_is_trained():
    found = fit(Plain(), Interpolation(), NETWORK, **SETS, **SHORT)
    assert isinstance(found, hp.Solution)
    alone = Shared().task(Plain(), **SETS, key=0, l2=1e-3)
    expected = hp.train(alone, hp.LocalSGD(10, 0.5), NETWORK, key=0).params
    np.testing.assert_array_equal(found.hypers["interpolation"]["own"], expected)


class Forest(MTL):
    """A second recipe that trains several models."""


def wrong(field, said, **changes: Any):
    with pytest.raises(InvalidInput) as error:
        fit(**{"model": Plain(), "recipes": PL(), "network": NETWORK, **SETS, **SHORT, **changes})
    assert error.value.field == field
    assert said in str(error.value)


def test_what_does_not_fit_is_named():
    with pytest.raises(InvalidInput, match=r"recipes: got 'fedprox'; allowed: objects such as .*FedProx\(…\)"):
        choose("fedprox", None)
    for given in (PL, [PL]):
        with pytest.raises(InvalidInput, match=r"recipes: got 'the class PL'; allowed: objects such as .*PL\(\)"):
            choose(given, None)
    wrong("recipes", "method=hp.SGP(…)", recipes=Shared())
    wrong("recipes", "a dict of layers", recipes=[PL(), Head()])
    wrong("hypergradient", "no prediction", recipes=[DA(), Clean()], hypergradient=hp.hypergradients.DirectGradient())
    wrong("recipes", "'dnse2') is none of the layers dense1, dense2", recipes=Head("dnse2"), model=Layered(2, 2, (5,)))
    wrong("recipes", "one of each name; more claim ['pl']", recipes=[PL(), MTL(), PL(l2=0.5)])
    wrong("recipes", "at least one", recipes=[])
    wrong("recipes", "at most one that trains several models", recipes=[MTL(), Forest()])
    wrong("method", "None: SGP is the method", recipes=hp.SGP(1, 0.1), method=hp.SGP(1, 0.1))
    wrong("model", "the class Layered", model=Layered)
    wrong("model", "a pair of these two functions", model=3)
    wrong("model", "a function that returns a int", model=lambda key: 3)
    wrong(
        "model", "one row of logits per input", model=(lambda key: jnp.zeros(2), lambda params, inputs: inputs @ params)
    )
    wrong("model", "fails with", model=(lambda key: jnp.zeros(3), lambda params, inputs: inputs @ params))
    wrong("classes", "2, as many logits as the model has", classes=3)
    wrong("train", "a pair (inputs, labels)", train=[own[0] for own in SETS["train"]])
    wrong("validation, labels", "0 to 1", validation=[(x, y + 1) for x, y in SETS["validation"]])
    regression = {"train": [(x, x[:, 0]) for x, _ in SETS["train"]], "recipes": [DA(), MTL()]}
    wrong("train, labels", "'numbers of type float32, for DA + MTL'; allowed: whole numbers", **regression)
    wrong("train, labels", "hp.Task takes the costs of a regression", **regression)
    wrong("model", "hp.Task takes the costs of a regression", model=Layered(2, 1))
    nothing = [(x[:0], y[:0]) if client == 1 else (x, y) for client, (x, y) in enumerate(SETS["validation"])]
    wrong("validation", "'no examples of client 1'; allowed: at least 1 example per client", validation=nothing)
    named = {"names": ["a", "b", "c", "d"], "outer_on": "validation", "validation": [None, *nothing[1:]]}
    wrong("validation", "\"no examples of client 'a'\"; allowed: at least 1 example", **named)
    wrong("validation", "or outer_on='train' and no validation", **named)
    wrong("validation", "the examples that the outer level fits", validation=None)


class TooFewLogits(Layered):
    """A model that declares three classes but returns two logits."""

    def apply(self, params, inputs):
        return super().apply(params, inputs)[:, :2]


def test_a_model_that_does_not_keep_its_word_is_named():
    wrong("model", "2 logits per input", model=TooFewLogits(2, 3))
    wrong("inputs", "with 3 numbers each", model=Layered(3, 2))
    own = fit(Plain(), PL(), NETWORK, **SETS, **SHORT).client(0)
    with pytest.raises(InvalidInput, match=r"^inputs: got .*\(5, 3\).* fails with TypeError"):
        own.predict(np.ones((5, 3), np.float32))


@pytest.mark.parametrize("option", ["inner", "hypergradient", "outer", "steps"])
def test_a_baseline_refuses_what_it_would_ignore(option):
    given: Any = {"outer": hp.optimizer("adam", learning_rate=0.1), **SHORT}
    baseline = FedProx(3, 0.5, penalty=0.1)
    server = hp.networks.FullyConnected(4)
    with pytest.raises(InvalidInput, match=f"^{option}: got .*FedProx does the fitting.*epochs.*penalty"):
        fit(Plain(), baseline, server, train=SETS["train"], key=0, **{option: given[option]})
    method = {"method": hp.SGP(3, 0.5), option: given[option]}
    with pytest.raises(InvalidInput, match=f"^{option}: got .*SGP does the fitting"):
        fit(Plain(), PL(), server, train=SETS["train"], key=0, **method)
