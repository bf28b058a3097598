import math
import sys

import dp_accounting
import numpy as np
import pytest
from scipy.special import zeta
from scipy.stats import norm

from hyperpush.base.errors import InvalidInput
from hyperpush.base.schedules import Power
from hyperpush.privacy.accountant import Accountant, _group, check_schedules
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism
from hyperpush.privacy.sensitivity import Constants, LoopSensitivity

# Linear costs have no slopes, so that Δ⁺ = κΔ + λ·2C·share with C = 1 for y, 0.5 for z, 2 for x.
LINEAR = Constants(C_y=1, C_b=0.5, C_x=2, R=3, C_H=0, C_J=0, L_H=0, L_J=0, L_b=0, L_fx=0)
CURVED = Constants(C_y=1, C_b=1, C_x=1, R=2, C_H=1, C_J=0.5, L_H=0.2, L_J=0.1, L_b=1, L_fx=0.3)
CLIPS = 1 + 0.5 + 2
ROUNDS = 1000


# Only z has a relevant bound above 0: one release of 2λC_b in the round after the first and in all later ones.
ONE = Constants(C_y=1e-12, C_b=0.5, C_x=0, R=1e6, C_H=0, C_J=0, L_H=0, L_J=0, L_b=0, L_fx=0)


def releases(count, loss, mechanism: type[Mechanism] = Laplace):
    """Return an account of `count` equal releases with Δ/ν = `loss`, and the number of rounds that makes them."""
    sender = LoopSensitivity(ONE, Power(loss), 1, 1, use="reused", others=1)
    return Accountant(sender, mechanism(Power(1))), count + 1


def test_pure_epsilon_is_the_sum_over_rounds_and_variables():
    """Without slopes and kept values, Δ_{t+1} = 2Cλ/(t + 1)^{1+v}; the ℓ1 sensitivity is √dim times the ℓ2 one."""
    noise = {"y": Laplace(Power(2, 0.5)), "z": Laplace(Power(1, 0.6)), "x": Laplace(Power(4, 0.7))}
    account = Accountant(LoopSensitivity(LINEAR, Power(0.1, 0.8), params=9, hypers=4, others=np.ones(2)), noise)
    t = np.arange(ROUNDS - 1)
    delta = 2 * 0.1 / (t + 1) ** 1.8
    each = ((1, 3, 2, 0.5), (0.5, 3, 1, 0.6), (2, 2, 4, 0.7))
    terms = np.sum([clip * delta * root * (t + 2) ** power / scale for clip, root, scale, power in each], axis=0)
    spent = account.epsilon_by_round(ROUNDS)
    assert spent.shape == (ROUNDS, 2)
    np.testing.assert_allclose(spent[1:, 1], np.cumsum(terms), rtol=1e-10)
    np.testing.assert_allclose(account.epsilon(ROUNDS), np.full(2, terms.sum()), rtol=1e-10)


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_limits_against_closed_forms(keep):
    """The limit is Σ_t Δ_t = Σ_t 2Cλ_t/(t + 1)/(1 − κ), a ζ function; a sample used once costs 2Cλ_0/(1 − κ)."""
    running = Accountant(LoopSensitivity(LINEAR, Power(0.1, 0.8), 1, 1, others=1 - keep), Laplace(Power(1)))
    truth = 0.2 * CLIPS * zeta(1.8) / (1 - keep)
    limit = float(running.limit(rounds=ROUNDS))
    assert truth <= limit <= truth * (1 + 1e-4)
    once = Accountant(LoopSensitivity(LINEAR, Power(0.1, 0.8), 1, 1, use="once", others=1 - keep), Laplace(Power(1)))
    assert float(once.limit(rounds=ROUNDS)) == pytest.approx(0.2 * CLIPS / (1 - keep), rel=1e-9)


@pytest.mark.parametrize("use", ["running averages", "once"])
@pytest.mark.parametrize("mechanism", [Laplace, Gaussian])
def test_a_limit_is_above_all_that_is_ever_spent(use, mechanism):
    """A limit computed early bounds the ε of a hundred times as many rounds, and by little more than needed."""
    steps = {"y": Power(0.3, 0.8), "z": Power(0.4, 0.9), "x": Power(0.2, 0.85)}
    account = Accountant(
        LoopSensitivity(CURVED, steps, 3, 2, use=use, others=np.array([0.4, 0.7])), mechanism(Power(20, 0.7))
    )
    delta = None if mechanism is Laplace else 1e-5
    early, later = account.limit(delta, rounds=ROUNDS), account.epsilon(100 * ROUNDS, delta)
    assert (account.epsilon(ROUNDS, delta) <= later).all()
    assert (later <= early * (1 + 1e-12)).all()
    assert (account.limit(delta, rounds=100 * ROUNDS) <= early * (1 + 1e-9)).all()
    assert (account.limit(delta, rounds=100 * ROUNDS) >= 0.99 * early).all()


def test_of_samples_used_once_the_first_costs_most():
    steps = {"y": Power(0.9, 0.7), "z": Power(0.8, 0.8), "x": Power(0.9, 0.75)}
    sender = LoopSensitivity(CURVED, steps, 1, 1, use="once", others=0.2)
    scale = (np.arange(ROUNDS) + 1.0) ** -0.7
    costs = [
        sum((delta / scale).sum() for delta in sender.sensitivities(ROUNDS, changed).values())
        for changed in (0, 1, 2, 10, 100)
    ]
    assert float(Accountant(sender, Laplace(Power(1, 0.7))).epsilon(ROUNDS)) == pytest.approx(costs[0])
    assert costs == sorted(costs, reverse=True)
    with pytest.raises(InvalidInput, match=r"noise\['y'\].*at most 0\.7"):
        Accountant(sender, Laplace(Power(1, 0.71)))


def test_reused_data_cost_more_every_round_and_have_no_limit():
    account = Accountant(
        LoopSensitivity(LINEAR, Power(0.1), 1, 1, use="reused", others=1, examples=50), Laplace(Power(1))
    )
    np.testing.assert_allclose(account.epsilon_by_round(ROUNDS), 0.2 / 50 * CLIPS * np.arange(ROUNDS), atol=1e-12)
    with pytest.raises(InvalidInput, match=r"reused.*more every round"):
        account.limit()


def test_laplace_releases_at_a_delta():
    """One release has δ = 1 − exp((ε − loss)/2); several have an ε below the pure sum and below Rényi's."""
    account, count = releases(1, 1.5)
    for delta in (1e-3, 0.1):
        assert float(account.epsilon(count, delta)) == pytest.approx(1.5 + 2 * math.log1p(-delta), abs=1e-3)
    account, count = releases(8, 0.3)
    direct = dp_accounting.pld.PLDAccountant()
    direct.compose(dp_accounting.LaplaceDpEvent(1 / 0.3), 8)
    tight = float(account.epsilon(count, 1e-3, "pld"))
    assert tight == pytest.approx(direct.get_epsilon(1e-3), abs=1e-3)
    assert tight <= float(account.epsilon(count, 1e-3, "rdp")) <= float(account.epsilon(count)) == pytest.approx(2.4)
    assert float(account.epsilon(count, 1e-12)) == pytest.approx(2.4, rel=1e-3)


def test_one_coordinate_is_the_worst_of_laplace_noise():
    """A change over two coordinates is never easier to detect than one of equal ℓ1 norm in one coordinate."""
    edges = np.arange(-150, 190) / 10

    def masses(mean):
        below = 0.5 * np.exp(np.minimum(edges - mean, 0))
        return np.diff(np.where(edges < mean, below, 1 - 0.5 * np.exp(-np.maximum(edges - mean, 0))))

    centre = masses(0)
    for first, second in ((0.3, 0.7), (0.5, 0.5), (1.5, 1.5)):
        spread, single = np.outer(masses(first), masses(second)), masses(first + second)
        for epsilon in np.linspace(-1, first + second, 9):
            together = np.maximum(spread - math.exp(epsilon) * np.outer(centre, centre), 0).sum()
            assert together <= np.maximum(single - math.exp(epsilon) * centre, 0).sum() + 1e-6


def delta_of(epsilon, mu):
    """Return δ by Balle and Wang (2018): δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def test_gaussian_releases_compose_to_one():
    account, count = releases(16, 0.25, Gaussian)
    epsilon = float(account.epsilon(count, 1e-5))
    assert delta_of(epsilon, 0.25 * 4) == pytest.approx(1e-5, rel=1e-6)
    with pytest.raises(InvalidInput, match=r"delta.*pure"):
        account.epsilon(count)


def test_both_kinds_of_noise_together():
    """Both kinds of noise together give an ε above that of each alone, but below the sum."""
    sender = LoopSensitivity(LINEAR, Power(0.1, 0.8), 1, 1, others=0.5)
    noise = {"y": Laplace(Power(1)), "z": Gaussian(Power(1)), "x": Gaussian(Power(1))}
    little = {"y": 1e6, "z": 1e6, "x": 1e6}
    kinds = {name: type(mechanism) for name, mechanism in noise.items()}
    alone = [
        float(Accountant(sender, noise | {name: kinds[name](Power(little[name])) for name in hidden}).epsilon(50, 1e-5))
        for hidden in ("y", "zx")
    ]
    together = float(Accountant(sender, noise).epsilon(50, 1e-5, "rdp"))
    assert max(alone) < together < sum(alone) * 1.1


def test_noise_for_a_budget():
    curved = LoopSensitivity(CURVED, Power(0.3, 0.8), 3, 2, others=np.array([0.4, 0.7]))
    account = Accountant(
        curved, {"y": Laplace(Power(1, 0.6)), "z": Laplace(Power(2, 0.6)), "x": Laplace(Power(3, 0.6))}
    )
    for rounds in (ROUNDS, None):
        noise = account.noise_for(0.5, rounds)
        assert noise["x"].scale.scale == pytest.approx(3 * noise["y"].scale.scale)
        found = Accountant(curved, noise)
        assert float(np.max(found.limit() if rounds is None else found.epsilon(rounds))) == pytest.approx(0.5)
    normal, count = releases(16, 0.25, Gaussian)
    scale = normal.noise_for(0.7, count, 1e-5)["z"].scale.scale
    assert delta_of(0.7, 1 / scale) <= 1e-5 <= delta_of(0.7, 1.002 / scale)
    laplace, count = releases(16, 0.25)
    spent = float(Accountant(laplace.sender, laplace.noise_for(1.0, count, 1e-3)).epsilon(count, 1e-3, "rdp"))
    assert 0.99 < spent <= 1


def test_groups_stand_above_their_values():
    values = np.random.default_rng(0).uniform(1e-4, 1, 5000)
    levels, counts = _group(values, 1.05)
    assert counts.sum() == 5000
    above = np.sort(np.repeat(levels, counts)) / np.sort(values)
    assert above.min() >= 1 - 1e-12
    assert above.max() <= 1.05 + 1e-12


@pytest.mark.parametrize(
    ("steps", "noise", "options", "message"),
    [
        (Power(1, 0.8), Laplace(Power(1, 0.4)), {}, r"above 0\.4.*noise stays"),
        (Power(1, 0.8), Laplace(Power(1)), {}, "noise stays"),
        (Power(1, 0.6), Laplace(Power(1, 0.7)), {}, r"below 0\.6.*without limit"),
        (Power(1, 0.8), Laplace(Power(1, 0.8)), {}, r"below 0\.8"),
        (Power(1, 0.3), Gaussian(Power(1, 0.8)), {}, r"below 0\.8"),
        (Power(1, 0.6), Laplace(Power(1, 0.7)), {"use": "once"}, r"at most 0\.6"),
        (Power(1, 0.8), Laplace(Power(1, 0.6)), {"use": "reused"}, "use.*more every round"),
        (Power(1, 1.2), Laplace(Power(1, 0.9)), {}, r"steps\['all'\]\.exponent.*at most 1"),
        ({"x": Power(1, 0.8)}, {"y": Laplace(Power(1, 0.6))}, {}, "noise.*each of x"),
    ],
)
def test_schedules_that_do_not_keep_what_they_promise_are_refused(steps, noise, options, message):
    with pytest.raises(InvalidInput, match=message):
        check_schedules(steps, noise, **options)


def test_schedules_that_converge_at_a_finite_budget_pass():
    check_schedules(Power(1, 0.8), Laplace(Power(1, 0.6)))
    check_schedules({"x": Power(1, 0.8), "y": Power(1, 0.9)}, Laplace(Power(1, 0.6)), "once")
    check_schedules(Power(1, 0.8), Laplace(Power(1, 0.8)), "once")
    check_schedules(Power(1, 0.6), Gaussian(Power(1, 0.9)))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda account: account.epsilon(0), "rounds"),
        (lambda account: account.epsilon(5, 1.5), "delta.*in"),
        (lambda account: account.epsilon(5, 0.1, "magic"), "by.*pld"),
        (lambda account: account.noise_for(0.0, 5), "epsilon.*above 0"),
        (lambda account: account.limit(), r"noise\['y'\].*below 0\.8"),
        (lambda account: Accountant(account.sender, {"y": Laplace(Power(1))}), r"Accountant\.noise.*y, z, x"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, message):
    account = Accountant(LoopSensitivity(LINEAR, Power(0.1, 0.8), 1, 1, others=0.5), Laplace(Power(1, 0.9)))
    with pytest.raises(InvalidInput, match=message):
        ask(account)


def test_a_client_that_forgets_nothing_has_no_limit():
    with pytest.raises(InvalidInput, match=r"others.*above 0"):
        Accountant(LoopSensitivity(LINEAR, Power(0.1, 0.8), 1, 1, others=0.0), Laplace(Power(1, 0.6))).limit()


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    account, count = releases(2, 0.1, Gaussian)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InvalidInput, match=r"dp_accounting.*pip install 'hyperpush\[privacy\]'"):
        account.epsilon(count, 1e-5)
