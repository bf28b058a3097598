"""The privacy cost of complete private runs, compared with sums, Balle and Wang's formula and dp-accounting."""

import math
from typing import Any, cast

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import hyperpush as hp
from hyperpush.methods.registry import registered
from hyperpush.privacy import Gaussian, Laplace
from hyperpush.verbs.budget import budget, within_budget

OUTER, STEPS, ORDER, SIZE, EXAMPLES = 7, 20, 4, 9, 50
BOUNDS: Any = {"clip": 0.5, "curvature": 1.0, "coupling": 1.0}


def cost(x, hyper, rows):
    return 0.5 * jnp.sum((x - rows) ** 2 + hyper**2, axis=-1)


ROWS = jnp.ones((3, EXAMPLES, SIZE))


def plain(**options: Any) -> hp.Task:
    zeros = jnp.zeros(SIZE)
    given: Any = {"train": ROWS, "validation": ROWS, **options}
    return hp.Task(inner=cost, outer=cost, params=zeros, hypers=zeros, **given)


def task(mechanism, **options: Any) -> hp.Task:
    return plain(**options).private(noise=mechanism, **BOUNDS)


SOLVER, ESTIMATOR = hp.SGP(STEPS, 0.1), hp.HGP(ORDER, 2, 0.1)
NESTED: Any = {"inner": SOLVER, "hypergradient": ESTIMATOR, "outer": hp.optimizer("sgd", learning_rate=0.1)}
PDBO = hp.PDBO(**NESTED, steps=OUTER)


def test_pure_epsilon_adds_up_over_all_releases_of_a_solve():
    """Eight inner solves release 20 steps each; seven estimates a gradient, three products and the result."""
    found = budget(task(Laplace(5.0)), PDBO)
    assert found.releases == {"train": 8 * 20 + 7 * (3 + 1), "validation": 7}
    assert found.epsilon() == pytest.approx((8 * 20 + 7 * 5) / 5, rel=1e-12)
    assert found.epsilon(on="validation") == pytest.approx(7 / 5)
    assert found.epsilon(on="train") == pytest.approx((8 * 20 + 7 * 4) / 5)
    assert budget(task(Laplace(5.0)), ESTIMATOR).epsilon() == pytest.approx(1)


def test_noise_that_falls_costs_more_with_every_release_of_a_loop():
    """Releases are numbered within the innermost enclosing loop: SGP's steps, HGP's products, the outer steps."""
    falling = task(Laplace(hp.schedule("power", 2.0, 0.5)))

    def run(length):
        return sum(math.sqrt(t + 1) / 2 for t in range(length))

    assert budget(falling, SOLVER).epsilon() == pytest.approx(run(STEPS), rel=1e-12)
    truth = 8 * run(STEPS) + 7 * run(ORDER - 1) + 2 * run(OUTER)
    assert budget(falling, PDBO).epsilon() == pytest.approx(truth, rel=1e-12)
    # Inside one leaf, two rounds of three epochs of five mini-batches are numbered from 0 to 29.
    assert budget(falling, hp.FedAvg(2, 0.1, 3, 10)).epsilon() == pytest.approx(run(30), rel=1e-12)


def test_what_a_run_says_is_what_was_foretold():
    private, network = task(Laplace(5.0)), hp.networks.FullyConnected(3)
    trained = hp.train(private, SOLVER, network, key=0)
    assert trained.privacy.epsilon() == budget(private, SOLVER).epsilon() == pytest.approx(4)
    estimate = hp.hypergradient(trained.task, ESTIMATOR, network, key=0)
    assert estimate.privacy.epsilon() == pytest.approx(4 + 1)
    assert estimate.privacy.releases == {"train": 20 + 4, "validation": 1}
    assert "24 of train, 1 of validation" in repr(estimate)
    assert "ideal real-valued noise" in estimate.privacy.assumes
    solution = hp.solve(private, PDBO, network, key=0)
    assert solution.privacy.releases == solution.costs.accesses == budget(private, PDBO).releases
    assert hp.train(private, SOLVER, network, key=0, seeds=3).privacy.releases == {"train": 60}
    assert hp.train(plain(), SOLVER, network, key=0).privacy is None


def test_both_levels_on_one_data_set_add_up():
    found = budget(task(Laplace(1.0), validation=None, outer_on="train"), PDBO)
    assert found.releases == {"train": 8 * 20 + 7 * 5}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("algorithms", "hypergradients", "inner") for name in registered(kind)]
)
def test_every_method_is_private_or_refused(kind, name):
    method = registered(kind)[name].example()
    private = task(Laplace(5.0), common=kind == "algorithms" and bool(method.info.fixed_point))
    refused = {"Dense": r"hypergradients/.*\.py:\d+", "TreeCG": "tolerates no noise", "TreeNewton": "no.* release"}
    refused |= {"TrackedSGP": "noise of tracked gradients adds up", "AutomaticInner": "step_size.*SGP"}
    if name in refused:
        with pytest.raises(hp.InvalidInput, match=refused[name]):
            budget(private, method)
    else:
        found = budget(private, method)
        assert found.releases
        assert found.epsilon() == pytest.approx(sum(found.releases.values()) / 5)


@pytest.mark.parametrize("method", [pytest.param(hp.algorithms.MADSBO, marks=pytest.mark.long), hp.algorithms.INTERACT])
def test_algorithms_without_privacy_of_their_own_are_counted_too(method):
    network = hp.networks.FullyConnected(3)
    found = hp.solve(task(Laplace(5.0), common=True), method.example(), network, key=0)
    assert found.privacy.releases == found.costs.accesses
    assert found.privacy.epsilon() == pytest.approx(sum(found.costs.accesses.values()) / 5)


@pytest.mark.parametrize(
    ("options", "releases"),
    [({"tolerance": None}, 13), ({}, 17), ({"batch_size": 3}, 13)],
    ids=["fixed", "votes every five steps", "batches"],
)
def test_tracked_hgp_pays_for_all_the_steps_it_may_take(options, releases):
    """It releases the gradient, a product per later step, and the result; eleven steps are three groups of five."""
    assert budget(task(Laplace(1.0)), hp.TrackedHGP(12, 0.1, **options)).epsilon() == releases


def delta_of(epsilon, mu):
    """Return δ by Balle and Wang (2018): δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def test_gaussian_releases_compose_to_one_of_the_root_of_their_squares():
    found = budget(task(Gaussian(40.0)), PDBO).epsilon(1e-5)
    assert delta_of(found, math.sqrt(195) / 40) == pytest.approx(1e-5, rel=1e-6)


def test_mixed_releases_compose_by_dp_accounting():
    """One training with Laplace noise and one with Gaussian noise use the same data."""
    both = budget(task(Laplace(40.0)), hp.SGP(160, 0.1)) + budget(task(Gaussian(10.0)), hp.SGP(35, 0.1))
    direct = dp_accounting.pld.PLDAccountant()
    direct.compose(dp_accounting.LaplaceDpEvent(40), 160)
    direct.compose(dp_accounting.GaussianDpEvent(10), 35)
    assert both.epsilon(1e-5, "pld") == pytest.approx(direct.get_epsilon(1e-5), rel=2e-3)


@pytest.mark.parametrize("target", [0.3, 1.0, 7.7])
def test_noise_for_a_pure_budget_never_exceeds_it_and_wastes_nothing(target):
    found: Any = within_budget(target, None, task(Laplace(3.0)), PDBO)
    assert target * (1 - 1e-12) < budget(found, PDBO).epsilon() <= target
    assert found.privacy.mechanism.scale.scale == pytest.approx(195 / target)
    assert found.privacy.clip == 0.5


def test_noise_for_a_budget_with_delta():
    found: Any = within_budget(1.0, 1e-5, task(Gaussian(1.0)), PDBO)
    mu = math.sqrt(195) / found.privacy.mechanism.scale.scale
    assert delta_of(1.0, mu) <= 1e-5 <= delta_of(1.0, 1.002 * mu)
    assert budget(found, PDBO).epsilon(1e-5) <= 1.0
    pure = within_budget(1.0, 1e-3, task(Laplace(1.0)), SOLVER)
    assert 0.99 < budget(pure, SOLVER).epsilon(1e-3, "rdp") <= 1.0


def test_accountants_do_not_exceed_what_they_were_asked_for_either():
    """Noise chosen for a budget never exceeds it, even by rounding, with and without a number of rounds."""
    steps: Any = hp.schedule("power", 0.3, 0.8)
    laplace = Laplace(hp.schedule("power", 1, 0.6))
    constants = hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=2, C_H=1, C_J=0.5, L_H=0.2, L_J=0.1, L_b=1, L_fx=0.3)
    account = hp.privacy.Accountant(
        hp.privacy.LoopSensitivity(constants, steps, 3, 2, others=np.array([0.4, 0.7])), laplace
    )
    for target in (0.7, 8.0):
        limited = hp.privacy.Accountant(account.sender, account.noise_for(target)).limit()
        assert target * (1 - 1e-12) < np.max(limited) <= target
        after = hp.privacy.Accountant(account.sender, account.noise_for(target, 100)).epsilon(100)
        assert target * (1 - 1e-12) < np.max(after) <= target


STOP = hp.EarlyStopping("cost", on="holdout", patience=2)


@pytest.mark.parametrize(
    ("ask", "field", "said"),
    [
        (lambda: budget(plain(), SOLVER), "task", "task.private("),
        (lambda: within_budget(1.0, None, plain(), SOLVER), "task", "task.private("),
        (lambda: budget(task(Laplace(1.0)), cast(Any, hp.SGP)), "method", "an object such as"),
        (
            lambda: budget(task(Laplace(1.0), holdout=ROWS), hp.PDBO(**NESTED, steps=2, stop=STOP)),
            "PDBO.stop.bounds",
            "(0, 1) for accuracy",
        ),
        (lambda: budget(task(Gaussian(1.0)), PDBO).epsilon(), "delta", "pure"),
        (lambda: budget(task(Laplace(1.0)), SOLVER).epsilon(1.5), "delta", "in (0, 1)"),
        (lambda: budget(task(Laplace(1.0)), SOLVER).epsilon(0.1, "magic"), "by", "pld"),
        (lambda: budget(task(Laplace(1.0)), SOLVER).epsilon(on="test"), "on", "train"),
        (lambda: within_budget(0.0, None, task(Laplace(1.0)), SOLVER), "epsilon", "above 0"),
        (lambda: within_budget(1.0, None, task(Gaussian(1.0)), SOLVER), "delta", "pure"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, field, said):
    with pytest.raises(hp.InvalidInput) as caught:
        ask()
    assert caught.value.field == field
    assert said in caught.value.allowed


def test_consensus_on_noisy_hypers_costs_nothing_more():
    together = hp.CDBO(**NESTED, steps=2)
    found = budget(task(Laplace(1.0), common=True), together).epsilon()
    assert found == budget(task(Laplace(1.0)), hp.PDBO(**NESTED, steps=2)).epsilon() == 3 * 20 + 2 * 5


@pytest.mark.parametrize("common", [True, False])
def test_hypers_of_examples_must_not_be_sent(common):
    made = hp.Task(
        inner=lambda x, weight, rows: weight * jnp.sum((x - rows) ** 2, axis=-1),
        outer=lambda x, weight, rows: jnp.sum((x - rows) ** 2, axis=-1),
        params=jnp.zeros(SIZE),
        hypers=hp.per_example(ROWS),
        train=ROWS,
        validation=ROWS,
        common=common,
    )
    bounds: Any = {"clip": 1.0, "curvature": 1.0, "noise": Laplace(1.0), "hypers": "per example"}
    if common:
        with pytest.raises(hp.InvalidInput, match="common=True"):
            made.private(**bounds)
    else:
        # three solves of 20 steps; two estimates with a gradient and three products; Jacobian products are not
        # released
        assert budget(made.private(**bounds), hp.PDBO(**NESTED, steps=2)).epsilon() == 3 * 20 + 2 * 4


def test_everything_that_reports_epsilon_says_what_it_assumes():
    private: Any = within_budget(1.0, 1e-5, task(Gaussian(1.0)), hp.SGP(3, 0.1))
    audited = hp.privacy.audit_epsilon(lambda keys: np.zeros(len(keys)), lambda keys: np.zeros(len(keys)), trials=100)
    found = (private.privacy, budget(private, hp.SGP(3, 0.1)), hp.privacy.Accountant, audited)
    assert all("ideal real-valued noise" in each.assumes for each in found)
