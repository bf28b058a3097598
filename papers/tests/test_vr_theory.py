"""VR-HGP's theory compared with enumeration in NumPy."""

from itertools import product

import numpy as np
import pytest

import hyperpush as hp
from hyperpush_papers.vr_hgp.config import VRStudy
from hyperpush_papers.vr_hgp.study import two_digits
from hyperpush_papers.vr_hgp.theory import expected_errors, linearize, mu, mu_by_round, theorem

WEIGHTS = [(1.0, 0.0), (0.9, 0.1), (0.5, 0.5), (0.9, 0.0), (0.0, 0.3), (0.7, 1.0), (1.0, 0.4), (0.85, 0.3)]


POINT = np.array([[0.4, -0.2], [0.7, 0.1], [-0.3, 0.5]])


def test_factors_worked_out_by_hand():
    assert mu(1, 0, 0.5) == pytest.approx(np.sqrt(16 / 3))
    assert mu(0.5, 0.5, 0.5) == pytest.approx(np.sqrt(8 / 3 * (1 + 1.375 / 0.625 * 0.0625 / 0.4375)))
    # For α = ρ, intermediate terms of the paper divide by zero, but the factor does not.
    assert mu(0.75, 0.5, 0.5) == pytest.approx(np.sqrt(8 / 7 * (1 + 1.5625 / 0.4375 * 0.0625 / 0.4375)))


@pytest.mark.parametrize("eta", [0.3, 0.6, 0.95])
def test_factors_by_round_settle_at_the_closed_form(eta):
    alpha, beta = np.transpose(WEIGHTS)
    found = mu_by_round(alpha, beta, eta, 2000)
    np.testing.assert_allclose(found[-1], [mu(*pair, eta) for pair in WEIGHTS], rtol=1e-6)
    assert np.all(np.abs(found[2] / found[-1] - 1) > 1e-4)


def test_factors_by_round_are_the_spread_of_the_recursion():
    eta, noise, rounds = 0.6, 1e-4, 4
    signs = np.array(list(product((-1, 1), repeat=2 * rounds))).T
    for alpha, beta in WEIGHTS:
        u, w, v, deviations = 1.0, 1.0, 0.0, []
        for m in range(rounds):
            A, B = eta * (1 + noise * signs[2 * m]), 1 + noise * signs[2 * m + 1]
            v = alpha * (v + B * u) + (1 - alpha) * B * w
            u = A * u
            w = beta * (A * w + 1) + (1 - beta) * (w + u)
            deviations.append(np.std(v) / noise * np.sqrt(8) * (1 - eta))
        np.testing.assert_allclose(mu_by_round(alpha, beta, eta, rounds), deviations, rtol=1e-6)


def setting(network):
    config = VRStudy(data="digits", examples=20, hyper=0.1)
    task, _ = two_digits(config)
    drawn = hp.network(network, 3, 1, probability=(0.4, 0.8))
    at = task.at(params=POINT.astype(np.float32))
    return linearize(at, drawn, 0.5), (task.train, task.validation), drawn


@pytest.fixture(scope="module", params=["random-undirected", "random-directed"])
def made(request):
    return setting(request.param)


def sigmoid(scores):
    return 1 / (1 + np.exp(-scores))


def maps(data, network):
    """Compute (Ā, B̄, c_x) of the logistic regression in NumPy."""
    (z, _), (far, labels) = ([np.asarray(a, np.float64) for a in part] for part in data)
    push = network.means().weights
    mass = np.linalg.matrix_power(push.T, 200) @ np.ones(3)
    forward, down, source = np.zeros((6, 6)), np.zeros((6, 6)), np.zeros(6)
    for i in range(3):
        block = slice(2 * i, 2 * i + 2)
        s = sigmoid(z[i] @ POINT[i])
        hessian = (z[i].T * (s * (1 - s))) @ z[i] / len(z[i]) + 0.1 * np.eye(2)
        forward[block, block] = -0.5 / mass[i] * hessian
        down[block, block] = -0.5 * np.diag(POINT[i])
        source[block] = (sigmoid(far[i] @ POINT[i]) - labels[i]) @ far[i] / len(far[i]) / 3 / mass[i]
        for j in range(3):
            forward[block, 2 * j : 2 * j + 2] += push[i, j] * np.eye(2)
    return forward, down, source


def test_the_target_is_the_closed_form(made):
    system, data, network = made
    forward, down, source = maps(data, network)
    truth = sum(down @ np.linalg.matrix_power(forward, m) @ source for m in range(600))
    assert np.abs(np.linalg.eigvals(forward)).max() < 0.95
    np.testing.assert_allclose(system.series(), truth, rtol=1e-4, atol=1e-7)
    assert np.linalg.norm(truth) > 1e-2


def test_expected_errors_are_those_of_all_link_states(made):
    """Second moments by enumeration: every combination of live links, weighted by its probability."""
    system, data, network = made
    forward, down, source = maps(data, network)
    means, up = network.means(), network.probabilities()
    links = [(i, j) for i in range(3) for j in range(3) if (i != j if network.directed else i < j)]
    states = []
    for alive in product((False, True), repeat=len(links)):
        mixing, chance = np.diag(np.diag(means.weights)), 1.0
        for (j, i), on in zip(links, alive, strict=True):
            chance *= up[j, i] if on else 1 - up[j, i]
            if on:
                mixing[i, j] = means.weights[i, j] / up[j, i]
                if not network.directed:
                    mixing[j, i] = means.weights[j, i] / up[i, j]
        states.append((chance, forward + np.kron(mixing - means.weights, np.eye(2))))
    assert sum(chance for chance, _ in states) == pytest.approx(1)
    np.testing.assert_allclose(sum(chance * A for chance, A in states), forward)
    target = down @ np.linalg.solve(np.eye(6) - forward, source)
    found = expected_errors(system, np.array(WEIGHTS), 8)
    for (alpha, beta), errors in zip(WEIGHTS, found, strict=True):
        start = np.concatenate([source, source, np.zeros(6), [1]])
        moments, truth = np.outer(start, start), []
        steps = []
        for chance, A in states:
            one, none = np.eye(6), np.zeros((6, 6))
            steps.append(
                (
                    chance,
                    np.block(
                        [
                            [A, none, none, np.zeros((6, 1))],
                            [(1 - beta) * A, beta * A + (1 - beta) * one, none, beta * source[:, None]],
                            [alpha * down, (1 - alpha) * down, alpha * one, np.zeros((6, 1))],
                            [np.zeros((1, 18)), np.ones((1, 1))],
                        ]
                    ),
                )
            )
        for _ in range(8):
            moments = np.sum([chance * step @ moments @ step.T for chance, step in steps], axis=0)
            squares, mean = moments[12:18, 12:18], moments[12:18, 18]
            truth.append(np.sqrt(np.trace(squares) - 2 * target @ mean + target @ target))
        np.testing.assert_allclose(errors, truth, rtol=1e-4)


def test_the_bound_is_theorem_1(made):
    system, data, network = made
    forward, _, source = maps(data, network)
    means = network.means()
    ratios = [means.weights[i, j] / means.up[j, i] for i in range(3) for j in range(3)]
    eta, kappa = float(np.linalg.norm(forward, 2)), sum(ratios)
    assert eta < 1
    coupling = 2 * kappa * 0.5 * np.abs(POINT).max()
    tau = coupling * np.linalg.norm(source) / (kappa * (1 - eta))
    rest = np.sqrt(sum(r**2 for r in ratios) * np.log(3 * (3 + 2) / 0.1))
    bounds, constants = theorem(system, np.array(WEIGHTS), 3000, 0.1)
    assert bounds is not None
    np.testing.assert_allclose(bounds[:, -1], [mu(*pair, eta) * tau * rest for pair in WEIGHTS], rtol=1e-4)
    # After one round the bound contains only the noise in B and the remainder of the series.
    np.testing.assert_allclose(bounds[:, 0], tau * (np.sqrt(8) * (1 - eta) * rest + kappa * eta), rtol=1e-4)
    assert constants["contraction_of_assumption_8"] == pytest.approx(2 * kappa)
    assert np.all(bounds[:, :8] > expected_errors(system, np.array(WEIGHTS), 8))


def test_there_is_no_bound_without_contraction(made):
    system, *_ = made
    assert theorem(system._replace(bend=0 * system.bend), np.array(WEIGHTS), 5, 0.1)[0] is None
