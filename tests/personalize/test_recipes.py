"""Recipes compared with NumPy: predictions, costs, and no personal effect at the start."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layered import Layered

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.personalize import DA, MTL, PL, Clean, Head, Interpolation, L2Rates, Product, Recipe, Shared
from hyperpush.personalize.scores import scores, summary

MODEL = Layered(4, 3, (5,))
GENERATOR = np.random.default_rng(0)
INPUTS, LABELS = GENERATOR.normal(size=(7, 4)).astype(np.float32), np.array([0, 1, 2, 2, 1, 0, 2])
BATCH = (jnp.asarray(INPUTS), jnp.asarray(LABELS))
L2 = 0.3


def posed(recipe, l2=0.0, clients=1, key=0):
    """Return the recipe's task with the same examples for all clients."""
    return recipe.task(MODEL, train=[BATCH] * clients, validation=[BATCH] * clients, key=key, l2=l2)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits(layers):
    hidden = np.maximum(INPUTS @ np.asarray(layers["dense1"]["weight"]) + np.asarray(layers["dense1"]["bias"]), 0)
    return hidden @ np.asarray(layers["dense2"]["weight"]) + np.asarray(layers["dense2"]["bias"])


def square(tree):
    return sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(tree))


def chances(params, hyper):
    """Return the class probabilities by the guide's equation, in NumPy."""
    whole = {**params, "dense2": hyper["head"]} if "head" in hyper else params
    shares = softmax(hyper["mtl"]) if "mtl" in hyper else [1.0]
    models = [jax.tree.map(lambda leaf, k=k: leaf[k], whole) for k in range(2)] if "mtl" in hyper else [whole]
    scales = 3 * softmax(hyper["pl"]) if "pl" in hyper else 1.0
    mixed = sum(share * softmax(scales * logits(own)) for share, own in zip(shares, models, strict=True))
    if "interpolation" not in hyper:
        return mixed
    together, alone = softmax(hyper["interpolation"]["weights"])
    return together * mixed + alone * softmax(logits(hyper["interpolation"]["own"]))


def weights(hyper, normalized):
    found = np.ones(7)
    if "da" in hyper:
        found *= (3 * softmax(hyper["da"]) if normalized else np.exp(hyper["da"]))[LABELS]
    return found * 2 / (1 + np.exp(-hyper["clean"])) if "clean" in hyper else found


def inner_penalty(params, hyper):
    if "l2rates" not in hyper:
        return 0.0
    arrays = jax.tree.leaves(params)
    return sum(0.5 * 0.25 * np.exp(rate) * square(own) for rate, own in zip(hyper["l2rates"], arrays, strict=True))


CASES = [
    [PL(l2=1)],
    [MTL(models=2, l2=2)],
    [DA(l2=4)],
    [DA(False, l2=4)],
    [MTL(models=2, l2=2), DA(l2=4)],  # the paper's MTL&DA
    [Head(l2=1)],
    [Interpolation(l2=2)],
    [Clean(l2=1)],
    [L2Rates(0.25, l2=1)],
    [Clean(), PL(l2=1), MTL(models=2, l2=2)],
    [Interpolation(l2=2), Head(l2=3), PL(l2=1), MTL(models=2, l2=2), DA(l2=4), Clean(l2=1), L2Rates(0.25, l2=1)],
]


def moved(recipes):
    """Return a product, its params, and one client's hypers away from their start."""
    product = Product(recipes)
    params, hyper = product.start(MODEL, jax.random.key(1))
    hyper = {**hyper, "clean": jnp.zeros(7)} if "clean" in hyper else hyper
    return product, params, jax.tree.map(lambda leaf: leaf + jnp.linspace(-1, 1, leaf.size).reshape(leaf.shape), hyper)


@pytest.mark.parametrize("recipes", CASES, ids=lambda recipes: Product(recipes).title)
def test_costs_are_those_of_numpy(recipes):
    product, params, hyper = moved(recipes)
    own: Any = jax.tree.map(np.asarray, hyper)
    expected: Any = chances(params, own)
    each = -np.log(expected[np.arange(7), LABELS])
    np.testing.assert_allclose(jnp.exp(product.log_probs(MODEL, params, hyper, BATCH[0])), expected, rtol=1e-5)
    problem = posed(product, L2).problem
    normalized = all(getattr(recipe, "normalized", True) for recipe in recipes)
    inner = np.mean(weights(own, normalized) * each) + 0.5 * L2 * square(params) + inner_penalty(params, own)
    np.testing.assert_allclose(problem.inner_cost(params, hyper, BATCH), inner, rtol=1e-5)
    penalty = sum(0.5 * recipe.l2 * square(own[recipe.name]) for recipe in recipes)
    if "interpolation" in own:  # the locally trained model is not penalized
        penalty -= square(own["interpolation"]["own"])
    np.testing.assert_allclose(problem.outer_cost(params, hyper, BATCH), np.mean(each) + penalty, rtol=1e-5)
    if "clean" not in own:  # padding has no effect
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:2]]), BATCH)
        padded = hp.Batch(rows, jnp.r_[jnp.ones(7), 0, 0])
        np.testing.assert_allclose(problem.inner_cost(params, hyper, padded), inner, rtol=1e-5)
    assert posed(product, L2).problem == problem
    assert hash(posed(product, L2).problem) == hash(problem)
    assert Product(recipes[::-1]).task(MODEL, train=[BATCH], outer_on="train", key=0).hypers.keys() == hyper.keys()


def test_derivatives_of_a_product_are_those_of_costs_written_by_hand():
    product, params, hyper = moved([Clean(l2=1), PL(l2=2), MTL(models=2, l2=3)])

    def loss(params, hyper):
        scales = 3 * jnp.exp(hyper["pl"]) / jnp.sum(jnp.exp(hyper["pl"]))
        shares = jnp.exp(hyper["mtl"]) / jnp.sum(jnp.exp(hyper["mtl"]))
        total = 0.0
        for k in range(2):
            hidden = jnp.maximum(INPUTS @ params["dense1"]["weight"][k] + params["dense1"]["bias"][k], 0)
            scores = jnp.exp(scales * (hidden @ params["dense2"]["weight"][k] + params["dense2"]["bias"][k]))
            total += shares[k] * (scores / scores.sum(1, keepdims=True))[jnp.arange(7), LABELS]
        return -jnp.log(total)

    def inner(params, hyper):
        l2 = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return jnp.mean(2 / (1 + jnp.exp(-hyper["clean"])) * loss(params, hyper)) + 0.5 * L2 * l2

    def outer(params, hyper):
        penalties = (rate / 2 * jnp.sum(hyper[name] ** 2) for name, rate in (("clean", 1), ("pl", 2), ("mtl", 3)))
        return jnp.mean(loss(params, hyper)) + sum(penalties)

    problem = posed(product, L2).problem

    @jax.jit
    def pairs(params, hyper):
        vector = jax.tree.map(jnp.cos, params)
        gradients = jax.grad(inner, argnums=(0, 1))
        products = jax.jvp(lambda x: gradients(x, hyper), (params,), (vector,))[1]
        return (
            (problem.inner_gradient(params, hyper, BATCH), jax.grad(inner)(params, hyper)),
            (problem.outer_gradients(params, hyper, BATCH), jax.grad(outer, argnums=(0, 1))(params, hyper)),
            (problem.products(params, hyper, BATCH, vector), products),
        )

    for found, expected in pairs(params, hyper):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), found, expected)


@pytest.mark.long
def test_mtl_and_da_take_the_steps_of_one_adam_with_two_rates():
    """Compare with the paper's MTL&DA as one task, whose hypers share one Adam with steps scaled by part."""
    network, size = hp.networks.Ring(2), {"steps": 3, "restart": False}
    size |= {"inner": hp.SGP(4, 0.2), "hypergradient": hp.HGP(2, 2, 0.1)}
    product = Product(
        [
            MTL(2, l2=0.02, outer=hp.optimizer("adam", learning_rate=1.0)),
            DA(l2=5e-3, outer=hp.optimizer("adam", learning_rate=0.1)),
        ]
    )
    task = posed(product, 0.1, clients=2)

    def losses(params, hyper, batch):
        both = jax.nn.softmax(jax.vmap(MODEL.apply, (0, None))(params, batch[0]))
        return -jnp.log(jnp.tensordot(jax.nn.softmax(hyper["of"]), both, 1)[jnp.arange(7), batch[1]])

    def scaled(updates, _):
        return {"labels": -0.1 * updates["labels"], "of": -1.0 * updates["of"]}

    by_hand = hp.Task(
        inner=lambda params, hyper, batch: 3 * jax.nn.softmax(hyper["labels"])[batch[1]] * losses(params, hyper, batch),
        outer=losses,
        penalty=lambda params, hyper: 0.05 * jnp.asarray(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))),
        outer_penalty=lambda params, hyper: 2.5e-3 * jnp.sum(hyper["labels"] ** 2) + 0.01 * jnp.sum(hyper["of"] ** 2),
        params=hp.per_client(task.params),
        hypers={"labels": jnp.zeros(3), "of": jnp.zeros(2)},
        train=[BATCH] * 2,
        validation=[BATCH] * 2,
    )
    adam = optax.chain(optax.scale_by_adam(), optax.stateless(scaled))
    expected = hp.solve(by_hand, hp.PDBO(outer=adam, **size), network, key=0)
    found = hp.solve(task, hp.PDBO(outer=product.outer, **size), network, key=0)
    assert np.abs(expected.hypers["labels"]).max() > 0.1
    np.testing.assert_allclose(found.hypers["da"], expected.hypers["labels"], rtol=1e-4)
    np.testing.assert_allclose(found.hypers["mtl"], expected.hypers["of"], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.params, expected.params)


class Bias(Recipe):
    """A user's recipe: logits + λ."""

    def hyper(self, model, params, key):
        return jnp.zeros(model.classes)

    def wrap(self, predict, model, hyper):
        return lambda params, inputs: predict(params, inputs) + hyper


class Misplaced(Bias):
    stage = "somewhere"  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


def test_recipes_of_ones_own_combine_in_the_order_of_the_list():
    params = MODEL.init(jax.random.key(0))
    hyper = {"pl": jnp.array([0.3, 0.0, -1.0]), "bias": jnp.array([1.0, -2.0, 0.5])}
    scales, plain = 3 * softmax(np.asarray(hyper["pl"])), logits(params)
    for recipes, expected in (
        ([PL(), Bias()], plain * scales + np.asarray(hyper["bias"])),
        ([Bias(), PL()], (plain + np.asarray(hyper["bias"])) * scales),
    ):
        found = Product(recipes).log_probs(MODEL, params, hyper, BATCH[0])
        np.testing.assert_allclose(np.exp(found), softmax(expected), rtol=1e-5)


@pytest.mark.parametrize("recipe", [PL(), DA(), DA(False), Clean()])
def test_nothing_is_personal_at_the_start(recipe):
    start, shared = posed(recipe), posed(Shared())
    params, hyper = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (start.params, start.hypers))
    plain = shared.problem.inner_gradient(params, {"shared": jnp.zeros(())}, BATCH)
    own = start.problem.inner_gradient(params, hyper, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own, plain)


def test_what_is_not_to_move_has_no_gradient():
    product, params, hyper = moved([Interpolation()])
    along = posed(product).problem.outer_gradients(params, hyper, BATCH)[1]["interpolation"]
    assert square(along["own"]) == 0
    assert square(along["weights"]) > 0
    own = product.with_own(hyper, lambda: params)
    np.testing.assert_allclose(
        product.log_probs(MODEL, params, own, BATCH[0]), np.log(softmax(logits(params))), rtol=1e-4, atol=1e-5
    )
    # The λ of DA affects only training.
    along = posed(DA(l2=2)).problem.outer_gradients(params, {"da": jnp.arange(3.0)}, BATCH)[1]
    np.testing.assert_allclose(along["da"], 2 * np.arange(3))


def test_of_several_models_each_has_a_head_of_the_clients_own():
    params, hypers = Product([Head(), MTL(2)]).start(MODEL, jax.random.key(0))
    whole, _ = Product([MTL(2)]).start(MODEL, jax.random.key(0))
    assert set(params) == {"dense1"}
    jax.tree.map(np.testing.assert_array_equal, {**params, "dense2": hypers["head"]}, whole)


def test_scores_by_hand():
    made = summary(np.array([0.5, 1.0, 0.25, 0.75]), np.array([2, 1, 4, 1]))
    assert made.average == pytest.approx((1 + 1 + 1 + 0.75) / 8)
    assert made.p10 == 0.25  # ⌈4/10⌉ = 1, the lowest
    assert summary(np.arange(20) / 20, np.ones(20)).p10 == 0.05  # ⌈20/10⌉ = 2, the second lowest
    assert summary(np.arange(21) / 20, np.ones(21)).p10 == 0.1
    with pytest.raises(InvalidInput, match="at least 1 example"):
        summary(np.ones(2), np.array([1, 0]))
    start = posed(Shared(), clients=2, key=5)
    params, hypers = start.params, start.hypers
    right = np.argmax(logits(jax.tree.map(lambda leaf: leaf[0], params)), 1)
    labels = [right[:4], np.where(np.arange(5) < 2, right[:5], (right[:5] + 1) % 3)]
    data = hp.extend.ragged([(INPUTS[: len(own)], own) for own in labels])
    np.testing.assert_allclose(scores(Shared(), MODEL, params, hypers, data).each, [1, 0.4])
    assert scores(Shared(), MODEL, params, hypers, data).average == pytest.approx(6 / 9)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: DA(l2=float("nan")), "DA.l2"),
        (lambda: posed(PL(), -1.0), "l2"),
        # the model has only a head
        (lambda: Head().task(Layered(4, 3), train=[BATCH], outer_on="train", key=0), "recipes"),
        (lambda: PL(outer=0.1), "PL.outer"),  # pyright: ignore[reportArgumentType]
        (lambda: Product(PL()), "Product.recipes"),  # pyright: ignore[reportArgumentType]
        (Misplaced, "Misplaced.stage"),
    ],
)
def test_bad_options_are_named(make, field):
    with pytest.raises(InvalidInput) as error:
        make()
    assert error.value.field == field
