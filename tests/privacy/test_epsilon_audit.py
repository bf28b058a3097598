import jax
import numpy as np
import pytest
from scipy.stats import binom, binomtest

from hyperpush.base.errors import InvalidInput
from hyperpush.base.schedules import Power
from hyperpush.privacy.accountant import Accountant
from hyperpush.privacy.epsilon_audit import Audit, audit_epsilon, clopper_pearson
from hyperpush.privacy.mechanisms import Laplace
from hyperpush.privacy.sensitivity import Constants, LoopSensitivity

TRIALS = 100_000


draw = jax.jit(jax.vmap(jax.random.laplace))
draw_all = jax.jit(jax.vmap(lambda key: jax.random.laplace(key, (ROUNDS,))))


def release(mean, scale):
    return lambda keys: mean + scale * draw(keys)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_one_laplace_release_is_recovered_and_not_exceeded(epsilon):
    found = audit_epsilon(release(1, 1 / epsilon), release(0, 1 / epsilon), TRIALS)
    assert 0.9 * epsilon <= found.lower <= epsilon
    assert not found.refutes(epsilon)
    assert found.refutes(0.9 * epsilon - 1e-9)


def test_the_bound_is_true_as_often_as_it_says():
    """At confidence 0.8, a fifth of all audits may exceed the truth; 25 of 60 would do so by chance once in 10⁴."""
    sampler = np.random.default_rng(5)
    lower = [
        audit_epsilon(
            lambda k: 1 + sampler.laplace(size=len(k)), lambda k: sampler.laplace(size=len(k)), 600, confidence=0.8
        ).lower
        for _ in range(60)
    ]
    assert sum(bound > 1 for bound in lower) < 25
    assert np.median(lower) > 0.4


def test_bounds_of_probabilities_by_their_tails():
    """Clopper–Pearson bounds p by P(X ≥ count; p) = miss and P(X ≤ count; p) = miss."""
    low, high = clopper_pearson(7, 50, 0.02, "lower"), clopper_pearson(7, 50, 0.02, "upper")
    assert binom.sf(6, 50, low) == pytest.approx(0.02)
    assert binom.cdf(7, 50, high) == pytest.approx(0.02)
    assert clopper_pearson(0, 50, 0.02, "lower") == 0
    assert clopper_pearson(50, 50, 0.02, "upper") == 1


def test_a_delta_explains_a_part():
    """Releases that reveal the data with probability 0.1 are (0, 0.1)-private."""

    def run(marked):
        return lambda keys: np.where(np.random.default_rng(marked).uniform(size=len(keys)) < 0.1, marked, 0.0)

    assert audit_epsilon(run(1), run(0), TRIALS).lower > 5
    assert audit_epsilon(run(1), run(0), TRIALS, delta=0.11).lower == 0


ROUNDS, CLIP, STEP, OTHERS = 12, 1.0, Power(0.5, 0.8), 0.5
NOISE = Laplace(Power(6, 0.6))
CLAIM = Accountant(
    LoopSensitivity(
        Constants(C_y=CLIP, C_b=0, C_x=0, R=1, C_H=1, C_J=0, L_H=0, L_J=0, L_b=0, L_fx=0), STEP, 1, 1, others=OTHERS
    ),
    NOISE,
)


def client(first, noisy):
    """Return a client that lowers ½(y − ξ)² over samples, sends all its iterates, and receives only noise."""
    stream = np.concatenate([[first], np.linspace(-1, 1, ROUNDS - 1)])

    def run(keys):
        heard = np.random.default_rng(1).laplace(size=ROUNDS)  # the same noise for all keys
        y, sent = 0.0, []
        for t in range(ROUNDS):
            sent.append(y)
            slope = np.clip(y - stream[: t + 1], -CLIP, CLIP).mean()
            y = (1 - OTHERS) * y + OTHERS * heard[t] - STEP(t) * slope
        return np.array(sent) + noisy * NOISE.scale(np.arange(ROUNDS)) * np.asarray(draw_all(keys))

    return run


def test_a_whole_run_spends_less_than_is_claimed_unless_its_noise_is_forgotten():
    claim = float(CLAIM.losses(ROUNDS)["y"].sum())
    honest = audit_epsilon(client(5, 1), client(-5, 1), TRIALS)
    assert 0.3 < honest.lower <= claim
    forgotten = audit_epsilon(client(5, 0), client(-5, 0), 10_000)
    assert forgotten.refutes(claim)


def ones(keys):
    return np.ones(len(keys))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((ones, ones, 10), {}, "trials.*100"),
        ((ones, ones, 200), {"confidence": 1.0}, "confidence"),
        ((ones, ones, 200), {"delta": -0.1}, "delta"),
        ((lambda keys: np.ones(3), ones, 200), {}, r"run_a.*shape \(3,\)"),
        ((ones, lambda keys: np.full(len(keys), np.nan), 200), {}, "run_b.*finite"),
        ((ones, lambda keys: np.ones((len(keys), 2)), 200), {}, "run_b.*run_a"),
        ((ones, ones, 200), {"chunk": 0}, "chunk"),
    ],
)
def test_runs_that_cannot_be_judged_are_refused(arguments, options, message):
    with pytest.raises(InvalidInput, match=message):
        audit_epsilon(*arguments, **options)


def test_runs_in_pieces_are_the_same():
    whole, pieces = (audit_epsilon(release(1, 1.0), release(0, 1.0), 1000, chunk=chunk) for chunk in (None, 300))
    assert whole == pieces


def test_panels_say_the_bound_and_show_the_rates_with_their_intervals():
    words, rates = Audit(1.25, 0.9, 2000, "score ≥ 2", (0.4, 0.1)).panels()
    assert "ε is at least 1.25, with probability 90 %." in words.numbers["sentences"][0]
    assert rates.numbers["series"][""] == [0.4, 0.1]
    assert "score ≥ 2. 1,000 runs per data set" in rates.note
    for place, count in enumerate((400, 100)):
        exact = binomtest(count, 1000).proportion_ci(0.9, "exact")
        ends = [rates.numbers[side][""][place] for side in ("low", "high")]
        np.testing.assert_allclose(ends, [exact.low, exact.high], rtol=1e-9)
