"""Verdicts compared with SciPy: corrected p-values, matching intervals, and areas under the curve."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from hyperpush.audits.verdicts import area_under_curve, judge


def sums(samples):
    return np.array([(own.sum(), own @ own, len(own)) for own in samples])


@pytest.mark.parametrize("seed", range(5))
def test_p_values_and_intervals_equal_scipys_and_agree_with_verdicts(seed):
    draw = np.random.default_rng(seed)
    samples = [
        draw.normal(shift, 1, size) for shift, size in zip(draw.normal(0, 0.3, 12), range(20, 140, 10), strict=True)
    ]
    tests = judge(sums(samples), 0.05)
    raw = [tuple(stats.ttest_1samp(own, 0))[1] for own in samples]
    expected = stats.false_discovery_control(raw, method="by")
    np.testing.assert_allclose(tests.p, expected, rtol=1e-8)
    claims = int(np.sum(expected <= 0.05))
    level = 0.05 * max(claims, 1) / (12 * np.sum(1 / np.arange(1, 13)))
    for place, own in enumerate(samples):
        interval = stats.ttest_1samp(own, 0).confidence_interval(1 - level)
        np.testing.assert_allclose((tests.low[place], tests.high[place]), interval, rtol=1e-8)
        excludes = not tests.low[place] <= 0 <= tests.high[place]
        assert excludes == (tests.verdicts[place] != "cannot say")
        assert (tests.verdicts[place] == "helps") == (excludes and own.mean() > 0)


def test_no_difference_is_no_claim():
    tests = judge(sums([np.zeros(30), np.full(30, 1e-13)]), 0.05, unit=1.0)
    assert tests.p.tolist() == [1, 1]
    assert tests.verdicts == ("cannot say", "cannot say")


def test_noise_is_claimed_rarely():
    draw = np.random.default_rng(7)
    claims = sum(
        verdict != "cannot say"
        for _ in range(200)
        for verdict in judge(sums(draw.normal(size=(20, 50))), 0.05).verdicts
    )
    assert claims <= 20  # of 4,000 verdicts


def test_visible_effects_are_seen_in_four_of_five_cases():
    draw = np.random.default_rng(0)
    effect = float(judge(sums([draw.normal(0, 1, 400)]), 0.05).visible[0])
    seen = [judge(sums([draw.normal(effect, 1, 400)]), 0.05).verdicts[0] == "helps" for _ in range(400)]
    assert 0.72 < np.mean(seen) < 0.88


def test_area_under_curve():
    draw = np.random.default_rng(0)
    labels, scores = draw.integers(2, size=50), np.round(draw.normal(size=50), 1)
    assert area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
    assert area_under_curve(scores, np.ones(50)) is None
