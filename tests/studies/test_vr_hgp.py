"""The study of VR-HGP: its theory against enumeration by NumPy, its measurements against its theory."""

import gzip
import struct
from itertools import product

import numpy as np
import pytest

from hyperpush import networks
from hyperpush.errors import InvalidInput
from hyperpush.runs import saved
from hyperpush.runs.config import load_config
from hyperpush.runs.run import execute
from hyperpush.studies.registry import experiments
from hyperpush.studies.vr_hgp import VRStudy, expected_errors, linearise, mu, mu_by_round, theorem, two_digits

WEIGHTS = [(1.0, 0.0), (0.9, 0.1), (0.5, 0.5), (0.9, 0.0), (0.0, 0.3), (0.7, 1.0), (1.0, 0.4), (0.85, 0.3)]
POINT = np.array([[0.4, -0.2], [0.7, 0.1], [-0.3, 0.5]])


def test_factors_worked_out_by_hand():
    assert mu(1, 0, 0.5) == pytest.approx(np.sqrt(16 / 3))
    assert mu(0.5, 0.5, 0.5) == pytest.approx(np.sqrt(8 / 3 * (1 + 1.375 / 0.625 * 0.0625 / 0.4375)))
    # α = ρ, where the paper's intermediate terms divide by zero and the factor does not.
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
    drawn = networks.by_name(network, 3, 1, probability=(0.4, 0.8))
    at = task.at(params=POINT.astype(np.float32))
    return linearise(at, drawn, 0.5), (task.train, task.validation), drawn


@pytest.fixture(scope="module", params=["random-undirected", "random-directed"])
def made(request):
    return setting(request.param)


def sigmoid(scores):
    return 1 / (1 + np.exp(-scores))


def maps(data, network):
    """(Ā, B̄, c_x) of the logistic regression by hand."""
    (z, _), (far, labels) = ([np.asarray(a, np.float64) for a in part] for part in data)
    push = network.means().push
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
    """Second moments by enumeration: every way the links can be up, with its probability."""
    system, data, network = made
    forward, down, source = maps(data, network)
    means, up = network.means(), network.probabilities()
    links = [(i, j) for i in range(3) for j in range(3) if (i != j if network.directed else i < j)]
    states = []
    for alive in product((False, True), repeat=len(links)):
        mixing, chance = np.diag(np.diag(means.push)), 1.0
        for (j, i), on in zip(links, alive, strict=True):
            chance *= up[j, i] if on else 1 - up[j, i]
            if on:
                mixing[i, j] = means.push[i, j] / up[j, i]
                if not network.directed:
                    mixing[j, i] = means.push[j, i] / up[i, j]
        states.append((chance, forward + np.kron(mixing - means.push, np.eye(2))))
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
    ratios = [means.push[i, j] / means.up[j, i] for i in range(3) for j in range(3)]
    eta, kappa = float(np.linalg.norm(forward, 2)), sum(ratios)
    assert eta < 1
    coupling = 2 * kappa * 0.5 * np.abs(POINT).max()
    tau = coupling * np.linalg.norm(source) / (kappa * (1 - eta))
    rest = np.sqrt(sum(r**2 for r in ratios) * np.log(3 * (3 + 2) / 0.1))
    bounds, constants = theorem(system, np.array(WEIGHTS), 3000, 0.1)
    assert bounds is not None
    np.testing.assert_allclose(bounds[:, -1], [mu(*pair, eta) * tau * rest for pair in WEIGHTS], rtol=1e-4)
    # After one round only B's noise and the rest of the series.
    np.testing.assert_allclose(bounds[:, 0], tau * (np.sqrt(8) * (1 - eta) * rest + kappa * eta), rtol=1e-4)
    assert constants["contraction_of_assumption_8"] == pytest.approx(2 * kappa)
    assert np.all(bounds[:, :8] > expected_errors(system, np.array(WEIGHTS), 8))


def test_there_is_no_bound_without_contraction(made):
    system, *_ = made
    assert theorem(system._replace(bend=0 * system.bend), np.array(WEIGHTS), 5, 0.1)[0] is None


SMALL = ("data=digits", "rounds=150", "runs=200", "weights=[[1, 0], [0.9, 0.1]]", "contractions=[0.5, 0.9]")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    experiment, config = load_config("vr-hgp", SMALL, experiments())
    folder = tmp_path_factory.mktemp("study") / "run"
    execute(experiment, config, folder)
    return saved.load(folder)


def test_measured_errors_follow_the_exact_ones_below_the_bound(study):
    result = study.result
    for curve in result["curves"]:
        error, spread, exact = (np.array(curve[name]) for name in ("error", "error_std", "expected_rms"))
        assert len(error) == 150
        np.testing.assert_allclose(np.sqrt(error**2 + spread**2 * 199 / 200), exact, rtol=0.2)
        assert np.all(np.array(curve["bound"]) > error + 2 * spread)
    plain, reduced = (np.array(curve["error"]) for curve in result["curves"])
    assert reduced[-1] < 0.5 * plain[-1] < 0.5 * result["true_norm"]
    assert plain[-1] > 0.9 * plain[20]  # more rounds do not help


def test_the_result_says_what_was_done(study):
    result = study.result
    assert result["experiment"] == "vr-hgp"
    assert (result["data"], result["examples"]) == ("digits", 60)
    assert [(row["eta"], row["alpha"]) for row in result["mu"]] == [(0.5, 1), (0.5, 0.9), (0.9, 1), (0.9, 0.9)]
    for row in result["best_mu"]:
        assert row["mu"] == pytest.approx(mu_by_round(row["alpha"], row["beta"], row["eta"], 150)[-1])
        assert row["mu_plain"] == pytest.approx(mu(1, 0, row["eta"]))
        assert row["mu"] < mu_by_round(0.9, 0.1, row["eta"], 150)[-1] < row["mu_plain"]
    assert result["best"]["expected_rms"] <= result["curves"][1]["expected_rms"][-1]
    assert result["constants"]["radius"] <= result["constants"]["contraction"] < 1
    assert 0 < result["target_gap"] < result["true_norm"]
    assert len(study.metrics) == 2
    assert study.params["inner-solution"].shape == (3, 2)
    for name in ("weights.png", "bound.png"):
        assert (study.path / "figures" / name).stat().st_size > 10_000


def test_clients_own_different_images_of_two_digits(tmp_path, monkeypatch):
    """200 plain images in MNIST's files, the k-th of grey k and digit k mod 10: all 40 of two digits are used once."""
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    greys, (height, width) = np.arange(200, dtype=np.uint8), (28, 28)
    images, labels = np.repeat(greys, height * width).tobytes(), (greys % 10).tobytes()
    for name, head, body in (
        ("train-images-idx3-ubyte.gz", (0x803, 200, height, width), images),
        ("train-labels-idx1-ubyte.gz", (0x801, 200), labels),
    ):
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(struct.pack(f">{len(head)}I", *head) + body))
    task, drawn = two_digits(VRStudy(clients=4, examples=30, seed=5))
    assert (drawn["data"], drawn["examples"]) == ("mnist", 5)
    inputs, targets = (
        np.concatenate([np.asarray(a), np.asarray(b)], 1) for a, b in zip(task.train, task.validation, strict=True)
    )
    assert inputs.shape == (4, 10, 2)
    assert np.all(inputs[..., 1] == 1)
    training = inputs[:, :5, 0]
    assert training.mean() == pytest.approx(0, abs=1e-6)
    assert training.std() == pytest.approx(1, abs=1e-6)
    order = np.argsort(inputs[..., 0].ravel())
    used = greys[np.isin(greys % 10, drawn["digits"])]
    slope, offset = np.polyfit(used, inputs[..., 0].ravel()[order], 1)
    np.testing.assert_allclose(inputs[..., 0].ravel()[order], slope * used + offset, atol=1e-5)
    np.testing.assert_array_equal(targets.ravel()[order], used % 10 == drawn["digits"][1])
    assert np.any(np.diff(order) != 1)  # shuffled


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("clients=400", r"clients: got 400; allowed: at most 1\d\d, half the images of \[\d, \d\]"),
        ("weights=[[1.2, 0]]", r"weights.0.0: got 1.2; allowed: less than or equal to 1"),
        ("weights=[]", r"weights: got \[\]"),
        ("contractions=[1.0]", r"contractions.0: got 1.0; allowed: less than 1"),
        ("probability=[0.8, 0.4]", r"probability: got \(0.8, 0.4\); allowed: .*low ≤ high"),
        ("network=ring", r"network: got 'ring'; allowed: random-directed, random-undirected"),
        ("data=minst", r"data: got 'minst'; allowed: auto, digits, mnist \(did you mean 'mnist'"),
        ("step=30", r"step: got 30.0; allowed: a step at which the series converges"),
        ("runs=1", r"runs: got 1; allowed: greater than or equal to 2"),
    ],
)
def test_bad_input_is_refused(tmp_path, override, message):
    with pytest.raises(InvalidInput, match=message):
        execute(
            *load_config("vr-hgp", ("data=digits", "inner_steps=1", "rounds=1", override), experiments()),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
