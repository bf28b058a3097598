"""Meta-learning tasks: heads and hypergradients compared with NumPy, and the bounds that the tasks promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ridge import phi_of, ridge
from scipy.optimize import minimize
from wide import float64  # noqa: F401  (a fixture)

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush_papers.meta.representation import (
    Examples,
    curvature,
    draw_tasks,
    examples,
    few_shot_accuracy,
    fit_head,
    representation,
    shrink_images,
)

CLIENTS, TASKS, WAYS, SHOTS, QUERIES, SIZE, WIDTH, L2 = 3, 2, 3, 4, 3, 5, 4, 0.3


def closed_form(weight, bias, inputs, drawn):
    """Return the heads of all tasks, and the derivative of the mean outer cost by each client's own copy of the layer.

    Let G be the outer gradient by a head W, and Q = A^{-1}G. Then ⟨G, dW⟩ = ⟨dΦ, YQᵀ − ΦWQᵀ − ΦQWᵀ⟩/m.
    """
    heads, along_weight, along_bias = [], np.zeros((CLIENTS, *weight.shape)), np.zeros((CLIENTS, *bias.shape))
    for client, task in np.ndindex(CLIENTS, TASKS):
        chosen = drawn[client, task]
        support, query = inputs[chosen[:, :SHOTS].ravel()], inputs[chosen[:, SHOTS:].ravel()]
        wanted, aim = np.repeat(np.eye(WAYS), SHOTS, 0), np.repeat(np.eye(WAYS), QUERIES, 0)
        (phi, slope), (psi, tilt) = phi_of(weight, bias, support), phi_of(weight, bias, query)
        head, hessian = ridge(phi, wanted, L2)
        # The outer cost is a mean over clients and, for each client, over the examples of all its tasks.
        error = (psi @ head - aim) / (len(query) * TASKS * CLIENTS)
        q = np.linalg.solve(hessian, psi.T @ error)
        d_phi = ((wanted - phi @ head) @ q.T - phi @ q @ head.T) / len(support)
        for part, change, bent in ((support, d_phi, slope), (query, error @ head.T, tilt)):
            before = change[:, :-1] / np.sqrt(bias.size) * bent
            along_weight[client] += part.T @ before
            along_bias[client] += before.sum(0)
        heads.append(head)
    return np.stack(heads), along_weight, along_bias


@pytest.mark.long
def test_hypergradients_with_ridge_heads_are_the_closed_form():
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(CLIENTS * TASKS * WAYS * (SHOTS + QUERIES), SIZE))
    drawn = generator.permutation(len(inputs)).reshape(CLIENTS, TASKS, WAYS, SHOTS + QUERIES)
    with jax.enable_x64(True):
        made = representation(inputs, drawn, SHOTS, jax.random.key(1), widths=(WIDTH,), l2=L2, loss="squares")
        layer = jax.tree.map(lambda leaf: np.asarray(leaf[0]), made.hypers[0])
        heads, along_weight, along_bias = closed_form(layer["weight"], layer["bias"], inputs, drawn)
        at = jnp.broadcast_to(heads, made.params.shape)
        slopes = jax.vmap(made.problem.inner_gradient)(at, made.hypers, made.train)
        # the params solve the mean problem, but not any client's own problem
        np.testing.assert_allclose(slopes.mean(0), 0, atol=1e-12)
        assert np.abs(slopes).max() > 1e-3
        network = hp.networks.Ring(CLIENTS)
        found = hp.hypergradient(made.at(params=at), hp.hypergradients.Dense(), network, key=0)
        np.testing.assert_allclose(found.value[0]["weight"], along_weight, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(found.value[0]["bias"], along_bias, rtol=1e-8, atol=1e-12)
        assert np.abs(along_weight).max() > 1e-4


def one_task(seed=3, each=6):
    generator = np.random.default_rng(seed)
    weight, bias = generator.normal(size=(SIZE, WIDTH)), generator.normal(size=WIDTH)
    inputs, labels = generator.normal(size=(WAYS * each, SIZE)), np.repeat(np.arange(WAYS), each)
    hyper = ({"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)},)
    return hyper, weight, bias, inputs, labels


@pytest.mark.usefixtures("float64")
def test_heads_of_new_tasks_minimize_their_cost():
    hyper, weight, bias, inputs, labels = one_task()
    support = Examples(jnp.asarray(inputs), jnp.asarray(labels), jnp.zeros(len(labels), int))
    phi, wanted = phi_of(weight, bias, inputs)[0], np.eye(WAYS)[labels]
    np.testing.assert_allclose(fit_head(hyper, support, WAYS, 0.05, "squares"), ridge(phi, wanted, 0.05)[0], atol=1e-6)

    def cost(flat):
        scores = phi @ flat.reshape(-1, WAYS)
        log_sum = np.log(np.exp(scores).sum(1))
        return np.mean(log_sum - scores[np.arange(len(labels)), labels]) + 0.025 * np.sum(flat**2)

    best = minimize(cost, np.zeros(phi.shape[1] * WAYS), tol=1e-10).x.reshape(-1, WAYS)
    np.testing.assert_allclose(fit_head(hyper, support, WAYS, 0.05), best, atol=1e-5)


@pytest.mark.usefixtures("float64")
def test_accuracy_counts_what_fitted_heads_get_right():
    hyper, weight, bias, inputs, labels = one_task(each=12)
    order = np.random.default_rng(0).permutation(len(labels))
    support, query = order[:18], order[18:]
    first, second = (
        Examples(jnp.asarray(inputs[p])[None], jnp.asarray(labels[p])[None], jnp.zeros((1, 18), int))
        for p in (support, query)
    )
    found = few_shot_accuracy(hyper, first, second, WAYS, 0.05, "squares")
    head, _ = ridge(phi_of(weight, bias, inputs[support])[0], np.eye(WAYS)[labels[support]], 0.05)
    right = (phi_of(weight, bias, inputs[query])[0] @ head).argmax(1) == labels[query]
    np.testing.assert_allclose(found, [right.mean()])
    assert 0 < right.mean() < 1


@pytest.mark.parametrize("loss", ["squares", "cross-entropy"])
def test_no_example_is_more_curved_than_said(loss):
    """Clipping for privacy relies on this bound; saturated units and a tie between two classes attain it."""
    hyper = ({"weight": jnp.full((1, WIDTH), 50.0), "bias": jnp.zeros(WIDTH)},)
    one = Examples(jnp.ones((1, 1)), jnp.zeros(1, int), jnp.zeros(1, int))
    heads = jnp.zeros((1, WIDTH + 1, WAYS)).at[0, -1].set(jnp.array([20.0, 20.0, -20.0]))
    # With one client and one task, the L2 rate is that of a head.
    drawn = np.arange(WAYS * 2).reshape(1, 1, WAYS, 2)
    task = representation(np.ones((WAYS * 2, 1)), drawn, 1, jax.random.key(0), widths=(WIDTH,), l2=0.1, loss=loss)
    size = heads.size
    for at in (heads, heads / 9, -heads):
        hessian = jax.hessian(task.problem.inner_cost)(at, hyper, one).reshape(size, size)
        largest = np.linalg.eigvalsh(hessian).max()
        assert largest <= curvature(0.1, loss) + 1e-5
        if at is heads:
            assert largest == pytest.approx(curvature(0.1, loss), rel=1e-4)


def test_examples_know_their_class_and_task():
    inputs = np.arange(48.0).reshape(24, 2)
    drawn = np.random.default_rng(0).permutation(24).reshape(2, 2, 3, 2)
    made = examples(inputs, drawn)
    for client, place in np.ndindex(2, 12):
        task, way, each = np.unravel_index(place, (2, 3, 2))
        np.testing.assert_array_equal(made.inputs[client, place], inputs[drawn[client, task, way, each]])
        assert (made.labels[client, place], made.tasks[client, place]) == (way, 2 * client + task)


def test_tasks_use_examples_once_and_the_combinations_they_may():
    labels = np.repeat(np.arange(5), 20)
    rows = [np.flatnonzero(labels == c) for c in range(5)]
    never = {frozenset({0, 1}), frozenset({3, 4})}
    drawn = draw_tasks(np.random.default_rng(0), rows, 2, 3, 10, never=never)
    assert len(np.unique(drawn)) == drawn.size
    classes = labels[drawn]
    assert np.all(classes == classes[..., :1])
    seen = {frozenset(task[:, 0].tolist()) for task in classes}
    assert all(len(each) == 2 for each in seen)
    assert not seen & never
    drawn = draw_tasks(np.random.default_rng(0), rows, 2, 15, 30, only=never, again=True)
    assert {frozenset(task[:, 0].tolist()) for task in labels[drawn]} == never
    assert all(len(np.unique(task)) == task.size for task in drawn)


@pytest.mark.parametrize(
    ("ways", "each", "count", "field"), [(6, 1, 1, "ways"), (2, 3, 50, "tasks"), (2, 21, 1, "tasks")]
)
def test_tasks_that_cannot_be_are_refused(ways, each, count, field):
    rows = [np.arange(20) + 20 * c for c in range(5)]
    with pytest.raises(InvalidInput) as caught:
        draw_tasks(np.random.default_rng(0), rows, ways, each, count)
    assert caught.value.field == field


def test_images_are_shrunk_by_means_of_blocks_and_scaled_each_by_itself():
    images = np.random.default_rng(0).random((3, 7, 7, 2)).astype(np.float32)
    found = shrink_images(images, 3)
    # A side of 7 pixels gives 3 blocks of 2; the surplus pixel is cut off at the end.
    wanted = np.array(
        [
            [
                [[image[2 * i : 2 * i + 2, 2 * j : 2 * j + 2, c].mean() for c in range(2)] for j in range(3)]
                for i in range(3)
            ]
            for image in images
        ]
    ).reshape(3, -1)
    wanted = (wanted - wanted.mean(1, keepdims=True)) / wanted.std(1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.all(shrink_images(np.ones((1, 4, 4)), 2) == 0)
    with pytest.raises(InvalidInput, match="side"):
        shrink_images(images, 8)
