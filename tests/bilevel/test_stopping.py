"""Early stopping where hypers are 0, 1, 2, …, so that NumPy knows every client's metric at every outer step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hyperpush as hp

RING, STEPS, PATIENCE, ROUNDS = hp.networks.DirectedRing(3), 20, 3, 3
EXAMPLES = [[2.0], [4.0, 6.0], [8.0, 9.0, 9.0, 10.0]]  # client by client
HELD = hp.ragged([np.array(own) for own in EXAMPLES])
# ∂F = −1 moves λ by 1 in each outer step, with consensus or without. One step solves the inner problem: x = λ.
PROBLEM = hp.Problem(inner=lambda x, hyper, batch: 0.5 * (x - hyper) ** 2, outer=lambda x, hyper, batch: -hyper)
OUTER = optax.sgd(1.0)


def distance(x, hyper, batch):
    return batch.mean((x - batch.examples) ** 2)


def closeness(x, hyper, batch):
    return -distance(x, hyper, batch)


def solve(stop, run=hp.simulate.run, **options):
    return hp.solve(
        PROBLEM,
        RING,
        inner=hp.Alone(1, 1.0),
        hypergradient=hp.DirectGradient(),
        outer=OUTER,
        outer_steps=STEPS,
        params=jnp.zeros(3),
        hypers=jnp.zeros(3),
        inner_data=HELD,
        outer_data=HELD,
        key=jax.random.key(0),
        stop=stop,
        run=run,
        **options,
    )


def judged(weighted):
    """Each client's distances by outer step, and the means of them that the clients push towards each other."""
    half = (np.eye(3) + np.roll(np.eye(3), 1, axis=0)) / 2  # everyone keeps one half and passes the other on
    counts = np.array([len(own) for own in EXAMPLES]) if weighted else np.ones(3)
    own = np.array([[np.mean((t - np.array(c)) ** 2) for c in EXAMPLES] for t in range(STEPS + 1)])
    pushed = np.linalg.matrix_power(half, ROUNDS)
    return own, (own * counts) @ pushed.T / (pushed @ counts)


@pytest.mark.parametrize(
    ("run", "stop", "consensus"),
    [
        (hp.simulate.run, hp.EarlyStopping(closeness, None, PATIENCE, "max", ROUNDS), None),
        (hp.peer.run, hp.EarlyStopping(distance, HELD, PATIENCE, "min", ROUNDS, True), hp.OuterConsensus()),
    ],
    ids=["simulate, max, examples of the outer cost", "peer, min, weighted, consensus"],
)
def test_patience_ends_and_the_best_is_returned(run, stop, consensus):
    own, means = judged(stop.weighted)
    sign = -1 if stop.mode == "max" else 1
    # So few pushes leave a different mean at every client: all take the largest.
    agreed = (sign * means).max(1)
    best = int(np.argmin(sign * agreed))
    assert np.argmin(judged(not stop.weighted)[1].max(1)) != best
    assert means[best].max() > 1.05 * means[best].min()
    found = solve(stop, run, consensus=consensus)
    taken = best + PATIENCE
    assert found.best_step == best
    np.testing.assert_array_equal(found.hypers, np.full(3, best))
    np.testing.assert_array_equal(found.params, np.full(3, best))
    np.testing.assert_allclose(np.asarray(found.history.metrics), sign * own[: taken + 1], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found.history.mean_metric), agreed[: taken + 1], rtol=1e-5)
    assert found.history.norms.shape == (taken, 3)
    np.testing.assert_array_equal(found.history.hypers[:, 0], np.arange(taken + 1))
    # Three pushes of two numbers, two rounds of one to agree on the largest; in each outer step also two to vote, and
    # with consensus one of three numbers.
    rounds, floats = 5 + 7 * np.arange(taken + 1), 8 + 10 * np.arange(taken + 1)
    if consensus is not None:
        rounds, floats = rounds + np.arange(taken + 1), floats + 3 * np.arange(taken + 1)
    np.testing.assert_array_equal(found.history.rounds, rounds)
    np.testing.assert_array_equal(found.history.floats, floats)
    assert (found.rounds, found.floats) == (rounds[-1], floats[-1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hp.EarlyStopping(distance, HELD, 0), ("EarlyStopping.patience", "0", "from 1")),
        (lambda: hp.EarlyStopping(distance, HELD, 1, rounds=0), ("EarlyStopping.rounds", "0", "from 1")),
        (lambda: solve(hp.EarlyStopping(distance, jnp.zeros((4, 2)), 1)), ("stop.data", "(4, 2)", "3 clients")),
        (lambda: solve(hp.EarlyStopping(distance, jnp.zeros((3, 2)), 1)), ("stop.metric", "fails", "shapes")),
        (
            lambda: solve(hp.EarlyStopping(lambda x, hyper, batch: batch.examples, HELD, 1)),
            ("stop.metric", "real scalar"),
        ),
        (
            lambda: solve(hp.EarlyStopping(distance, HELD, 1), faults=hp.Faults(loss=0.1)),
            ("stop", "lose messages", "reliable links"),
        ),
        (
            lambda: solve(hp.EarlyStopping(distance, HELD, 1), partial(hp.peer.run, faults=hp.Faults(loss=0.1))),
            ("faults", "votes"),
        ),
    ],
    ids=["patience", "rounds", "clients", "metric", "scalar", "faults", "faults of the engine"],
)
def test_what_cannot_be_used_is_named(make, words):
    with pytest.raises(hp.InvalidInput) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
