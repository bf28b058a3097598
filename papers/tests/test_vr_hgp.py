"""The VR-HGP study: its measurements compared with its theory."""

import gzip
import struct

import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush.verbs import saved
from hyperpush_papers.vr_hgp.config import VRStudy
from hyperpush_papers.vr_hgp.study import two_digits
from hyperpush_papers.vr_hgp.theory import mu, mu_by_round

SMALL = (
    "data=digits",
    "observers=5",
    "trainings=[20, 1000]",
    "link_rounds=100",
    "link_runs=20",
    "rounds=150",
    "runs=200",
    "weights=[[1, 0], [0.9, 0.1]]",
    "contractions=[0.5, 0.9]",
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    experiment, config = load_config("vr-hgp", SMALL, experiments())
    folder = tmp_path_factory.mktemp("study") / "run"
    execute(experiment, config, folder)
    return saved.load(folder)


@pytest.mark.long
def test_measured_errors_follow_the_exact_ones_below_the_bound(study):
    result = study.result
    for curve in result["curves"]:
        error, spread, exact = (np.array(curve[name]) for name in ("error", "error_std", "expected_rms"))
        assert len(error) == 150
        np.testing.assert_allclose(np.sqrt(error**2 + spread**2 * 199 / 200), exact, rtol=0.2)
        assert np.all(np.array(curve["bound"]) > error + 2 * spread)
    plain, reduced = (np.array(curve["error"]) for curve in result["curves"])
    assert reduced[-1] < 0.5 * plain[-1] < 0.5 * result["true_norm"]
    assert plain[-1] > 0.9 * plain[20]  # more rounds do not reduce the error


@pytest.mark.long
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


@pytest.mark.long
def test_observed_links_cost_little_after_long_training_and_nothing_where_links_stay(study):
    found = {(row["network"], row["estimator"], row["training_steps"]): row for row in study.result["links"]}
    assert len(found) == 4 * 2 * 2
    for (network, _, steps), row in found.items():
        # A link is up in a share p of T rounds. Observed and true shares differ by √(2p(1 − p)/(πT)) on average, at
        # most 0.4/√T.
        assert row["links_error"] <= 0.4 / np.sqrt(steps)
        if network in ("fully-connected", "static-undirected"):
            assert row["observed"] == pytest.approx(row["means"], abs=1e-4)
        else:
            assert row["links_error"] > 0.1 / np.sqrt(steps)
            assert steps < 1000 or row["observed"] < 1.2 * row["means"]


def test_clients_own_different_images_of_two_digits(tmp_path, monkeypatch):
    """Image k of 200 plain images has gray value k and digit k mod 10; all 40 of two digits are used once."""
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    grays, (height, width) = np.arange(200, dtype=np.uint8), (28, 28)
    images, labels = np.repeat(grays, height * width).tobytes(), (grays % 10).tobytes()
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
    used = grays[np.isin(grays % 10, drawn["digits"])]
    slope, offset = np.polyfit(used, inputs[..., 0].ravel()[order], 1)
    np.testing.assert_allclose(inputs[..., 0].ravel()[order], slope * used + offset, atol=1e-5)
    np.testing.assert_array_equal(targets.ravel()[order], used % 10 == drawn["digits"][1])
    assert np.any(np.diff(order) != 1)  # images are shuffled


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("clients=400", r"clients: got 400; allowed: at most 1\d\d, half the images of \[\d, \d\]"),
        ("weights=[[1.2, 0]]", r"weights\[0\]\[0\]: got 1.2; allowed: a finite number from 0 to 1"),
        ("weights=[]", r"weights: got \[\]"),
        ("contractions=[1.0]", r"contractions\[0\]: got 1.0; allowed: a finite number above 0 and below 1"),
        ("probability=[0.8, 0.4]", r"probability: got \(0.8, 0.4\); allowed: .*low ≤ high"),
        ("network=ring", r"network: got 'ring'; allowed: random-directed, random-undirected"),
        ("data=minst", r"data: got 'minst'; allowed: auto, digits, mnist \(did you mean 'mnist'"),
        ("step=30", r"step: got 30.0; allowed: a step at which the series converges"),
        ("runs=1", r"runs: got 1; allowed: a whole number from 2"),
    ],
)
def test_bad_input_is_refused(tmp_path, override, message):
    with pytest.raises(InvalidInput, match=message):
        execute(
            *load_config("vr-hgp", ("data=digits", "inner_steps=1", "rounds=1", override), experiments()),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
