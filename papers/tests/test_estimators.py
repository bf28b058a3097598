"""The comparison of estimators at a small size: its counts and the final points of its curves."""

import numpy as np
import pytest

import hyperpush as hp
from hyperpush.spec.config import load_config
from hyperpush.spec.execute import execute
from hyperpush.spec.studies import experiments
from hyperpush.verbs import saved
from hyperpush_papers.estimators.study import floats_until

pytestmark = pytest.mark.long

SMALL = (
    "sizes=[[4, 5]]",
    'networks=["static-undirected"]',
    "examples=20",
    "pushes=[1, 20]",
    "steps=[1.0, 1.5]",
    "order=60",
    "recurrent=2000",
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    experiment, config = load_config("estimators", SMALL, experiments())
    folder = tmp_path_factory.mktemp("study") / "run"
    execute(experiment, config, folder)
    return saved.load(folder)


def curves(study, method, **fields):
    found = [c for c in study.result["curves"] if c["method"] == method]
    return [c for c in found if all(c[name] == value for name, value in fields.items())]


def test_tracked_hgp_goes_where_hgp_stalls(study):
    (tracked,) = curves(study, "TrackedHGP")
    assert floats_until(tracked, 1e-6) is not None
    for stalled in curves(study, "HGP", pushes=1):
        assert min(stalled["relative_error"], default=1) > 1e-3


def test_the_default_sends_less_and_stops_within_its_tolerance(study):
    (own,), (tracked,) = curves(study, "Automatic"), curves(study, "TrackedHGP")
    less, more = floats_until(own, 1e-6), floats_until(tracked, 1e-6)
    assert less is not None
    assert more is not None
    assert less < more
    assert [row["method"] for row in study.result["stops"]] == ["Automatic", "TrackedHGP"]
    assert all(row["converged"] and row["relative error"] < 1e-5 for row in study.result["stops"])
    (lossy,) = study.result["lossy"]
    assert lossy["Automatic relative error"] < 1e-5
    (whole,) = study.result["summary"]
    assert lossy["Automatic 1e-04"] > whole["Automatic 1e-04"]  # lost messages are sent again


def test_each_estimator_ends_at_its_own_target(study):
    for method in ("ImplicitCG", "ExactRB"):
        (curve,) = curves(study, method)
        assert curve["relative_error"][-1] < 1e-6, method


def test_rounds_and_floats_are_counted(study):
    (hgp,) = curves(study, "HGP", pushes=20, step=1.0, averaging="push")
    np.testing.assert_array_equal(hgp["rounds"], 20 * np.arange(1, 61))
    np.testing.assert_array_equal(hgp["floats_per_client"], 20 * 6 * np.arange(1, 61))
    (gossip,) = curves(study, "HGP", pushes=20, step=1.0, averaging="gossip")
    np.testing.assert_array_equal(gossip["floats_per_client"], 20 * 5 * np.arange(1, 61))
    (tracked,) = curves(study, "TrackedHGP")
    # Each vote follows five steps of `pushes` rounds and takes as many rounds as the graph's diameter. A push carries
    # two vectors of 5 params, the mass, and two numbers that detect negative curvature.
    width, push = hp.networks.StaticUndirected(4).flood_rounds(), 2 * 5 + 1 + 2
    assert set(np.diff(tracked["rounds"])) == {5 * tracked["pushes"] + width}
    assert set(np.diff(tracked["floats_per_client"])) == {5 * tracked["pushes"] * push + width}
    before = tracked["floats_per_client"][0] - (5 * tracked["pushes"] * push + width)
    assert before >= tracked["pushes"] * 6  # the search for settings is included


@pytest.mark.parametrize(
    ("errors", "cost"), [([1.0, 0.1, 0.01], 3), ([0.01, 1.0, 0.01, 0.01], 3), ([0.01, 1.0], None), ([0.01], 1)]
)
def test_an_error_counts_as_reached_where_it_stays(errors, cost):
    assert floats_until({"relative_error": errors, "floats_per_client": list(range(1, 9))[: len(errors)]}, 0.05) == cost
