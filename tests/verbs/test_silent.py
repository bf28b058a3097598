"""Invalid input that once passed silently: NaN losses, columns out of scale, zero Hessians, and unprinted warnings."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.deploy.swarm import doubts

CLIENTS, EXAMPLES = 3, 20
RING = hp.networks.Ring(CLIENTS)
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(CLIENTS, EXAMPLES, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, size=(CLIENTS, EXAMPLES))


def entropy(params, hyper, batch):
    rows, labels = batch
    return -jnp.take_along_axis(jax.nn.log_softmax(rows @ params), labels[:, None], axis=1)[:, 0]


def squares(params, hyper, batch):
    rows, labels = batch
    return (rows @ params - labels) ** 2


def ridge(params, hyper):
    return jnp.exp(hyper) * jnp.sum(params**2)


def make(rows=ROWS, labels=LABELS, loss=entropy, **options):
    params = jnp.zeros((4, 3)) if loss is entropy else jnp.zeros(4)
    labels = labels if loss is entropy else labels * np.float32(1)
    data = (rows, labels)
    return hp.Task(
        inner=loss, outer=loss, penalty=ridge, params=params, hypers=0.0, train=data, validation=data, **options
    )


def test_nan_losses_name_client_and_example():
    """Labels are 1 … 3 instead of 0 … 2. The gradient of a NaN loss is finite here, so training once continued."""
    labels = np.where(np.arange(CLIENTS)[:, None] == 0, np.minimum(LABELS, 1), LABELS + 1)
    first = int(np.argmax(labels[1] == 3))
    number = int(np.sum(labels == 3))
    said = f"NaN or infinite losses in {number} examples at the start, first at client b, example {first}"
    task = make(labels=labels, names=("a", "b", "c"))
    method = hp.PDBO(hp.SGP(3, 0.1), hp.TreeCG(), hp.optimizer("sgd", learning_rate=0.1), steps=1)
    calls: list[Any] = [(hp.train, hp.SGP(3, 0.1)), (hp.solve, method), (hp.hypergradient, hp.TreeCG())]
    for verb, used in calls:
        with pytest.raises(hp.InvalidInput, match=said) as caught:
            verb(task, used, RING, key=0)
        assert caught.value.field == "task.inner"
        assert "do labels start at 1?" in caught.value.allowed


def test_padding_is_no_example_and_single_numbers_name_the_client():
    uneven = [jnp.ones(2), jnp.ones(3), jnp.ones(1)]
    padded = hp.Task(
        inner=lambda x, hyper, a: jnp.where(a > 0, (x - a) ** 2, jnp.nan),  # NaN for padding
        outer=lambda x, hyper, a: (x - hyper) ** 2 * a,
        params=0.0,
        hypers=0.0,
        train=uneven,
        validation=uneven,
    )
    assert hp.train(padded, hp.SGP(3, 0.1), RING, key=0).costs.rounds == 3
    logs = hp.Task(
        inner=lambda x, hyper, a: jnp.mean((x - jnp.log(a)) ** 2),
        outer=lambda x, hyper, a: jnp.mean((x - hyper) ** 2),
        params=0.0,
        hypers=0.0,
        train=jnp.asarray([[1.0], [2.0], [-1.0]]),
        validation=jnp.ones((3, 1)),
    )
    with pytest.raises(hp.InvalidInput, match="at 1 of 3 clients at the start, first at client 2"):
        hp.train(logs, hp.SGP(3, 0.1), RING, key=0)


def test_a_column_out_of_scale_is_named_where_training_ends_far_away():
    missing = ROWS.copy()
    missing[:, ::5, 2] = -9999
    said = r"column 2 of task.train\[0\] is \de\+03 times larger than the others: scale it"
    found = hp.train(make(missing, loss=squares), hp.SGP(50, 1e-8), RING, key=0)
    assert found.status.converged is False
    assert re.fullmatch(said, found.status.hint)
    assert found.status.hint in str(found.status)
    with pytest.raises(hp.Diverged, match=f"C{said[1:]}. Or take a smaller step size"):
        hp.train(make(missing, loss=squares), hp.SGP(50, 0.1), RING, key=0)
    near = hp.train(make(loss=squares), hp.SGP(5, 1e-8), RING, key=0)
    assert (near.status.converged, near.status.hint) == (False, "")


@pytest.mark.long
def test_a_hessian_of_zero_is_named_and_no_step_size_blamed():
    flat = hp.Task(
        inner=lambda x, hyper, a: hyper * jnp.sum(x) * a,
        outer=lambda x, hyper, a: jnp.sum(x) * a,
        params=jnp.zeros(2),
        hypers=1.0,
        train=jnp.ones((CLIENTS, 2)),
        validation=jnp.ones((CLIENTS, 2)),
    )
    with pytest.raises(hp.Diverged, match="the hypergradient does not exist here") as caught:
        hp.hypergradient(flat, hp.TrackedHGP(), RING, key=0)
    assert "step size" not in str(caught.value)


def test_warnings_and_swarms_repeat_what_the_status_says():
    found = hp.train(make(loss=squares), hp.SGP(2, 1e-3), RING, key=0)
    assert found.status.converged is False
    assert found.warnings == [f"The result is {str(found.status).removeprefix('! ')}."]
    moving = hp.Status(True, "tolerance", gradient=0.5, stationary=False)
    assert moving.warnings == ["It is not stationary (gradient 0.5 of the start's)."]
    assert hp.Status(True, "tolerance", gradient=0.001, stationary=True).warnings == []
    peers = {"a": {"status": {"converged": False, "reason": "limit"}}, "b": {"status": {"converged": True}}, "c": None}
    assert doubts({"peers": peers}) == ["a: ! not converged (limit: step limit reached)"]
