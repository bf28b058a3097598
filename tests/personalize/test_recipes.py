"""Recipes against NumPy: what they predict, what they cost, and that nothing is personal at the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.errors import InvalidInput
from hyperpush.personalize.recipes import DA, MTL, PL, Head, Interpolation, Shared
from hyperpush.personalize.scores import scores, summary
from hyperpush.studies.models.dense import MLP

MODEL = MLP(4, 3, (5,))
GENERATOR = np.random.default_rng(0)
INPUTS, LABELS = GENERATOR.normal(size=(7, 4)).astype(np.float32), np.array([0, 1, 2, 2, 1, 0, 2])
BATCH = (jnp.asarray(INPUTS), jnp.asarray(LABELS))
L2 = 0.3


def posed(recipe, l2=0.0, clients=1, key=0):
    """The recipe's task of clients who all have the same examples."""
    return recipe.task(MODEL, train=[BATCH] * clients, validation=[BATCH] * clients, key=key, l2=l2)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits(layers):
    hidden = np.maximum(INPUTS @ np.asarray(layers["dense1"]["weight"]) + np.asarray(layers["dense1"]["bias"]), 0)
    return hidden @ np.asarray(layers["dense2"]["weight"]) + np.asarray(layers["dense2"]["bias"])


def square(tree):
    return sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(tree))


def pl(params, hyper):
    return softmax(logits(params) * 3 * softmax(hyper)), np.ones(3), 0.5 * square(hyper)


def mtl(params, hyper):
    models = [jax.tree.map(lambda leaf, k=k: leaf[k], params) for k in range(2)]
    return (
        sum(w * softmax(logits(own)) for w, own in zip(softmax(hyper), models, strict=True)),
        np.ones(3),
        square(hyper),
    )


def da(params, hyper):
    return softmax(logits(params)), 3 * softmax(hyper["labels"]), 2 * square(hyper["labels"])


def mtl_da(params, hyper):
    chances, _, penalty = mtl(params, hyper["of"])
    return chances, 3 * softmax(hyper["labels"]), penalty + 2 * square(hyper["labels"])


def head(params, hyper):
    return softmax(logits({**params, "dense2": hyper})), np.ones(3), 0.5 * square(hyper)


def interpolation(params, hyper):
    both = [softmax(logits(own)) for own in (params, hyper["own"])]
    return (
        sum(w * p for w, p in zip(softmax(hyper["weights"]), both, strict=True)),
        np.ones(3),
        square(hyper["weights"]),
    )


CASES = [
    (PL(l2=1), pl),
    (MTL(models=2, l2=2), mtl),
    (DA(l2=4), da),
    (DA(l2=4, of=MTL(models=2, l2=2)), mtl_da),
    (Head(l2=1), head),
    (Interpolation(l2=2), interpolation),
]


@pytest.mark.parametrize(("recipe", "truth"), CASES)
def test_costs_are_those_of_numpy(recipe, truth):
    key = jax.random.key(1)
    params, hyper = recipe.params(MODEL, key), recipe.hyper(MODEL, key)
    hyper = jax.tree.map(lambda leaf: leaf + jnp.linspace(-1, 1, leaf.size).reshape(leaf.shape), hyper)
    chances, weights, penalty = truth(params, jax.tree.map(np.asarray, hyper))
    each = -np.log(chances[np.arange(7), LABELS])
    np.testing.assert_allclose(jnp.exp(recipe.log_probs(MODEL, params, hyper, BATCH[0])), chances, rtol=1e-5)
    problem = posed(recipe, L2).problem
    inner = np.mean(weights[LABELS] * each) + 0.5 * L2 * square(params)
    np.testing.assert_allclose(problem.inner_cost(params, hyper, BATCH), inner, rtol=1e-5)
    np.testing.assert_allclose(problem.outer_cost(params, hyper, BATCH), np.mean(each) + penalty, rtol=1e-5)
    # Padding counts for nothing.
    padded = hp.Batch(jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:2]]), BATCH), jnp.r_[jnp.ones(7), 0, 0])
    np.testing.assert_allclose(problem.inner_cost(params, hyper, padded), inner, rtol=1e-5)
    assert posed(recipe, L2).problem == problem
    assert hash(posed(recipe, L2).problem) == hash(problem)


@pytest.mark.parametrize("recipe", [PL(), DA()])
def test_nothing_is_personal_at_the_start(recipe):
    key = jax.random.key(2)
    params, shared = recipe.params(MODEL, key), Shared()
    plain = posed(shared).problem.inner_gradient(params, shared.hyper(MODEL, key), BATCH)
    own = posed(recipe).problem.inner_gradient(params, recipe.hyper(MODEL, key), BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own, plain)


def test_what_is_not_to_move_has_no_gradient():
    recipe, key = Interpolation(), jax.random.key(3)
    params, hyper = recipe.params(MODEL, key), recipe.hyper(MODEL, jax.random.key(4))
    along = posed(recipe).problem.outer_gradients(params, hyper, BATCH)[1]
    assert square(along["own"]) == 0
    assert square(along["weights"]) > 0
    own = recipe.with_own(hyper, lambda: params)
    np.testing.assert_allclose(
        recipe.log_probs(MODEL, params, own, BATCH[0]), np.log(softmax(logits(params))), rtol=1e-4, atol=1e-5
    )
    # λ of DA changes training only.
    da = DA(l2=2)
    hyper = {"labels": jnp.arange(3.0), "of": jnp.zeros(1)}
    np.testing.assert_allclose(posed(da).problem.outer_gradients(params, hyper, BATCH)[1]["labels"], 2 * np.arange(3))


def test_scores_by_hand():
    made = summary(np.array([0.5, 1.0, 0.25, 0.75]), np.array([2, 1, 4, 1]))
    assert made.average == pytest.approx((1 + 1 + 1 + 0.75) / 8)
    assert made.p10 == 0.25  # ⌈4/10⌉ = 1: the lowest
    assert summary(np.arange(20) / 20, np.ones(20)).p10 == 0.05  # ⌈20/10⌉ = 2: the second lowest
    assert summary(np.arange(21) / 20, np.ones(21)).p10 == 0.1
    with pytest.raises(InvalidInput, match="at least 1 example"):
        summary(np.ones(2), np.array([1, 0]))
    start = posed(Shared(), clients=2, key=5)
    params, hypers = start.params, start.hypers
    right = np.argmax(logits(jax.tree.map(lambda leaf: leaf[0], params)), 1)
    labels = [right[:4], np.where(np.arange(5) < 2, right[:5], (right[:5] + 1) % 3)]
    data = hp.programs.ragged([(INPUTS[: len(own)], own) for own in labels])
    np.testing.assert_allclose(scores(Shared(), MODEL, params, hypers, data).each, [1, 0.4])
    assert scores(Shared(), MODEL, params, hypers, data).average == pytest.approx(6 / 9)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: DA(l2=float("nan")), "DA.l2"),
        (lambda: Head(layer="dense7").params(MODEL, jax.random.key(0)), "Head.layer"),
        (lambda: Head().params(MLP(4, 3), jax.random.key(0)), "Head.layer"),  # nothing but a head
        (lambda: posed(PL(), -1.0), "l2"),
        (lambda: Head().task(MLP(4, 3), train=[BATCH], outer_on="train", key=0), "recipe"),
    ],
)
def test_bad_options_are_named(make, field):
    with pytest.raises(InvalidInput) as error:
        make()
    assert error.value.field == field
