"""What whole private runs cost, against sums, Balle and Wang's formula and dp-accounting."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

import hyperpush as hp

OUTER, STEPS, ORDER = 7, 20, 4


def noise(mechanism, **options):
    return hp.Noise(mechanism, 0.5, curvature=1.0, coupling=1.0, **options)


def methods(inner, estimator):
    return hp.SGP(STEPS, 0.1, privacy=noise(inner)), hp.HGP(ORDER, 2, 0.1, privacy=noise(estimator))


def test_pure_epsilon_adds_up_over_all_releases_of_a_solve():
    """Eight inner solves of 20 steps; seven estimates of a gradient, three products that are sent, and the result."""
    pair = methods(hp.Laplace(hp.Power(2.0, 0.5)), hp.Laplace(5.0))
    found = hp.budget(*pair, OUTER)
    assert found.releases == 8 * 20 + 7 * 5
    truth = 8 * sum(math.sqrt(t + 1) / 2 for t in range(20)) + 7 * 5 / 5
    assert found.epsilon() == pytest.approx(truth, rel=1e-12)
    assert hp.budget(pair[0]).epsilon() == pytest.approx(sum(math.sqrt(t + 1) / 2 for t in range(20)))
    assert hp.budget(None, pair[1], 1).epsilon() == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "releases"),
    [({"tolerance": None}, 13), ({}, 16), ({"batch": 3}, 13)],
    ids=["fixed", "votes every five steps", "batches"],
)
def test_tracked_hgp_pays_for_all_the_steps_it_may_take(options, releases):
    estimator = hp.TrackedHGP(12, 0.1, privacy=noise(hp.Laplace(1.0)), **options)
    assert hp.budget(None, estimator, 1).epsilon() == releases


def delta_of(epsilon, mu):
    """Balle and Wang (2018): δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def test_gaussian_releases_compose_to_one_of_the_root_of_their_squares():
    found = hp.budget(*methods(hp.Gaussian(40.0), hp.Gaussian(10.0)), OUTER).epsilon(1e-5)
    assert delta_of(found, math.sqrt(160 / 40**2 + 35 / 10**2)) == pytest.approx(1e-5, rel=1e-6)


def test_mixed_releases_compose_by_dp_accounting():
    found = hp.budget(*methods(hp.Laplace(40.0), hp.Gaussian(10.0)), OUTER).epsilon(1e-5, "pld")
    direct = dp_accounting.pld.PLDAccountant()
    direct.compose(dp_accounting.LaplaceDpEvent(40), 160)
    direct.compose(dp_accounting.GaussianDpEvent(10), 35)
    assert found == pytest.approx(direct.get_epsilon(1e-5), rel=2e-3)


def test_the_accountant_of_a_client_that_adopts_its_messages_agrees():
    """In its terms SGP's noise has the scale σ·√dim·2C/N, and steps are 1 as the gradient is what is released."""
    size, examples = 9, 50
    sender = hp.Descent(clip=0.5, examples=examples, size=size)
    account = hp.Accountant(sender, hp.Laplace(3.0 * math.sqrt(size) * 2 * 0.5 / examples))
    solver = hp.SGP(STEPS, 0.1, privacy=noise(hp.Laplace(3.0)))
    assert hp.budget(solver).epsilon() == pytest.approx(float(account.epsilon(STEPS)))
    assert hp.budget(solver).epsilon(1e-3) == pytest.approx(float(account.epsilon(STEPS, 1e-3)))


@pytest.mark.parametrize("target", [0.3, 1.0, 7.7])
def test_noise_for_a_pure_budget_never_exceeds_it_and_wastes_nothing(target):
    pair = hp.within(target, None, *methods(hp.Laplace(1.0), hp.Laplace(3.0)), OUTER)
    assert target * (1 - 1e-12) < hp.budget(*pair, OUTER).epsilon() <= target
    scales = [method.privacy.mechanism.scale.scale for method in pair]
    assert scales[1] == pytest.approx(3 * scales[0])
    assert scales[0] == pytest.approx((160 + 35 / 3) / target)
    assert pair[0].steps == STEPS
    assert pair[1].privacy.clip == 0.5


def test_noise_for_a_budget_with_delta():
    pair = hp.within(1.0, 1e-5, *methods(hp.Gaussian(1.0), hp.Gaussian(1.0)), OUTER)
    mu = math.sqrt(195) / pair[0].privacy.mechanism.scale.scale
    assert delta_of(1.0, mu) <= 1e-5 <= delta_of(1.0, 1.002 * mu)
    assert hp.budget(*pair, OUTER).epsilon(1e-5) <= 1.0
    solver, nothing = hp.within(1.0, 1e-3, hp.SGP(STEPS, 0.1, privacy=noise(hp.Laplace(1.0))))
    assert nothing is None
    assert 0.99 < hp.budget(solver).epsilon(1e-3, "rdp") <= 1.0


def test_accountants_do_not_exceed_what_they_were_asked_for_either():
    """Not by a rounding, at any budget, with rounds and without."""
    steps, laplace = hp.Power(0.3, 0.8), hp.Laplace(hp.Power(1, 0.6))
    constants = hp.Constants(C_y=1, C_b=1, C_x=1, R=2, C_H=1, C_J=0.5, L_H=0.2, L_J=0.1, L_b=1, L_fx=0.3)
    account = hp.Accountant(hp.SingleLoop(constants, steps, 3, 2, others=np.array([0.4, 0.7])), laplace)
    for target in (0.7, 8.0):
        limited = hp.Accountant(account.sender, account.noise_for(target)).limit()
        assert target * (1 - 1e-12) < np.max(limited) <= target
        after = hp.Accountant(account.sender, account.noise_for(target, 100)).epsilon(100)
        assert target * (1 - 1e-12) < np.max(after) <= target


SOLVER, ESTIMATOR = methods(hp.Laplace(1.0), hp.Laplace(1.0))
CLEAN = hp.HGP(2, 1, 0.1, privacy=hp.Noise(hp.Laplace(1.0), 1.0, 1.0, hypers="per example"))


@pytest.mark.parametrize(
    ("ask", "field", "said"),
    [
        (lambda: hp.budget(), "inner, hypergradient", "at least one"),
        (lambda: hp.budget(hp.SGP(3, 0.1)), "inner", "privacy=Noise"),
        (lambda: hp.budget(hp.Alone(3, 0.1), ESTIMATOR, 2), "inner", "privacy=Noise"),
        (lambda: hp.budget(SOLVER, hp.DirectGradient(), 2), "hypergradient", "privacy=Noise"),
        (lambda: hp.budget(SOLVER, ESTIMATOR), "outer_steps", "1 or more"),
        (lambda: hp.budget(SOLVER, None, 2), "outer_steps", "0 without an estimator"),
        (lambda: hp.budget(SOLVER, ESTIMATOR, -1), "outer_steps", "from 0"),
        (lambda: hp.budget(SOLVER, ESTIMATOR, 2, stop="any"), "stop", "None"),
        (lambda: hp.budget(SOLVER, CLEAN, 2, consensus=hp.OuterConsensus()), "consensus", "noisy"),
        (lambda: hp.budget(*methods(hp.Gaussian(1.0), hp.Laplace(1.0)), 2).epsilon(), "delta", "no pure"),
        (lambda: hp.budget(SOLVER).epsilon(1.5), "delta", "in (0, 1)"),
        (lambda: hp.budget(SOLVER).epsilon(0.1, "magic"), "by", "pld"),
        (lambda: hp.within(0.0, None, SOLVER), "epsilon", "above 0"),
        (lambda: hp.within(1.0, None, hp.SGP(3, 0.1, privacy=noise(hp.Gaussian(1.0)))), "delta", "no pure"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, field, said):
    with pytest.raises(hp.InvalidInput) as caught:
        ask()
    assert caught.value.field == field
    assert said in caught.value.allowed


def test_consensus_on_noisy_hypers_costs_nothing_more():
    with_consensus = hp.budget(SOLVER, ESTIMATOR, 2, consensus=hp.OuterConsensus()).epsilon()
    assert with_consensus == hp.budget(SOLVER, ESTIMATOR, 2).epsilon() == 3 * 20 + 2 * 5
