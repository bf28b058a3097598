"""The shared comparison on quadratics with known fixed points: choice of settings, costs and excluded methods."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.progress import Progress
from wide import float64  # noqa: F401  (a fixture)

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.methods.registry import registered
from hyperpush.runs.bars import Part
from hyperpush.runs.run import StudyRun
from hyperpush.spec.config import validate
from hyperpush.tasks.quadratic import outer_fixed_points, quadratic
from hyperpush_papers.common.comparison import Benchmark, compare, method_names, rows_apart, too_large
from hyperpush_papers.common.config import Comparison, Privacy
from hyperpush_papers.common.methods import NESTED, single_loop, single_loops
from hyperpush_papers.common.private_runs import costs_of_privacy, private_key, run_privately

pytestmark = pytest.mark.usefixtures("float64")

N, D, H = 3, 4, 3
KEYED = ("LDPDSBO", *NESTED)


class Noted(StudyRun):
    """A run that collects its printed text and its records."""

    def __init__(self):
        self.records, self.said = [], []
        self.console = SimpleNamespace(print=lambda text, **_: self.said.append(text))

    @contextmanager
    def progress(self, label, total):
        bars = Progress()
        yield Part(bars, bars.add_task(label), lambda: None, total)

    def record(self, **values):
        self.records.append(values)


@pytest.fixture
def on():
    task = quadratic(N, 0, common=True)
    task = task.at(hypers=jnp.zeros_like(task.hypers))
    point = outer_fixed_points(task.train, task.validation)["x_G"]

    def distance(hypers):
        return float(np.max(np.linalg.norm(np.asarray(hypers) - point, axis=-1)))

    return Benchmark(task, of_hypers={"distance": distance})


def test_every_declared_algorithm_takes_part():
    config = Comparison()
    nested = {"PDBO", "CDBO", "CDBOLocal"}  # nested methods consist of a solver and an estimator
    assert set(single_loops()) == set(registered("algorithms")) - nested
    for name in single_loops():
        method = single_loop(config, name, 0.1, 0.2)
        assert type(method).__name__ == name
        assert method.steps == (30 if name.startswith("FedBiO") else 150)
        if name != "LDPDSBO":  # LDPDSBO has one step size per variable
            assert (method.options()["outer_step_size"], method.options()["inner_step_size"]) == (0.1, 0.2)
    assert method_names(config) == [*single_loops(), "PDBO + HGP", "PDBO + TrackedHGP"]
    with pytest.raises(InvalidInput, match=r"methods.*MADBSO.*MADSBO"):
        method_names(Comparison(methods=("MADBSO",)))


@pytest.mark.long
def test_the_best_finite_setting_is_chosen(on):
    network = hp.networks.Ring(N)
    config = Comparison(
        clients=N,
        methods=("TTSA", "LDPDSBO", "PDBO + TrackedHGP"),
        iterations=205,
        outer=(0.05, 1e-4),
        inner=(0.15, 1e12),
        points=5,
        outer_steps=40,
        solver_steps=30,
        precision="float64",
    )
    run = Noted()
    found = compare(config, run, network, on)
    rows = {each.row["method"]: each.row for each in found}
    assert [record["method"] for record in run.records] == list(rows)
    for row in rows.values():
        assert (row["settings_tried"], row["settings_diverged"]) == (4, 2)
        assert row["settings"]["inner_step"] == 0.15
    start = np.linalg.norm(on.measure(on.task.params, on.task.hypers)["distance"])
    private_form, single, alternating = found
    assert single.row["settings"]["outer_step"] == 0.05
    assert single.row["distance"] < 1e-3 * start
    # The other two use constant steps, which leave an error of the order of the step size.
    assert private_form.row["distance"] < 0.4 * start
    assert alternating.row["distance"] < 0.4 * start
    # The row equals a separate run of the same method, costs included.
    alone = hp.solve(on.task, single_loop(config, "TTSA", 0.05, 0.15), network, key=0, certify=False)
    assert single.solution is not None
    np.testing.assert_allclose(single.solution.hypers, alone.hypers, rtol=1e-9)
    np.testing.assert_allclose(single.solution.params, alone.params, rtol=1e-9)
    assert (single.row["floats_per_client"], single.row["rounds"]) == (alone.costs.floats, alone.costs.rounds)
    # Every round sends x, y and z.
    assert (private_form.row["floats_per_client"], private_form.row["rounds"]) == (205 * (H + 2 * D), 205)
    assert single.curve is not None
    assert single.curve["iterations"] == [0, 41, 82, 123, 164, 205]
    assert single.curve["outer_cost"][0] == pytest.approx(
        float(on.measure(on.task.params, on.task.hypers)["outer_cost"])
    )
    assert single.curve["floats_per_client"][-1] == alone.costs.floats
    private = run_privately(replace(config, privacy=Privacy()), run, network, found, on)
    assert [row["method"] for row in private] == list(rows)
    assert all(row["reason"].startswith("n/a") and "epsilon" not in row for row in private)
    assert "second derivatives" in private[0]["reason"]
    assert run_privately(config, run, network, found, on) == []


@pytest.mark.parametrize(
    ("steps", "points", "every"), [(150, 15, 10), (30, 15, 2), (203, 5, 29), (7, 15, 1), (13, 5, 1)]
)
def test_the_last_point_of_a_curve_is_the_end(steps, points, every):
    assert rows_apart(steps, points) == every


def test_a_method_that_always_diverges_has_a_row(on):
    config = Comparison(clients=N, methods=("SPDB",), iterations=100, outer=(0.1,), inner=(1e12,), precision="float64")
    (only,) = compare(config, Noted(), hp.networks.Ring(N), on)
    assert only.row["left_out"] == "diverged at every setting"
    assert only.row["settings_diverged"] == 1
    assert only.curve is None


def test_a_method_that_cannot_use_the_network_is_named_before_any_runs(on):
    run, network = Noted(), hp.network("random-directed", N, 0)
    with pytest.raises(InvalidInput, match=r"network.*SPDB"):
        compare(Comparison(clients=N, methods=("TTSA", "SPDB")), run, network, on)
    assert run.records == []
    assert method_names(Comparison(methods=("TTSA", "PDBO + HGP")), network) == ["TTSA", "PDBO + HGP"]


def test_no_two_private_runs_share_a_key():
    keys = [jax.random.key(0), *(private_key(Comparison(), name, quiet) for name in KEYED for quiet in (False, True))]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)


def test_what_noise_and_what_settings_cost():
    noisy = {"accuracy": 0.7}
    found = costs_of_privacy({"accuracy": 0.9}, {"accuracy": 0.85}, noisy)
    assert found["cost_in_accuracy"] == pytest.approx(0.2)
    assert found["cost_of_settings"] == pytest.approx(0.05)
    assert found["cost_of_noise"] == pytest.approx(0.15)
    found = costs_of_privacy({"accuracy": 0.9}, {"left_out": "diverged"}, noisy)
    assert found == {"accuracy_without": 0.9, "cost_in_accuracy": pytest.approx(0.2)}
    assert costs_of_privacy({"accuracy": 0.9}, {"accuracy": 0.85}, {"left_out": "diverged"}) == {}


def test_large_matrices_are_left_out(on):
    # GBDSBO sends a 4 × 4 matrix, DSBO-JHIP a 3 × 4 matrix.
    reasons = {
        most: [too_large(Comparison(most=most), name, on.task) for name in single_loops()] for most in (11, 12, 16)
    }
    left_out = {most: {n for n, r in zip(single_loops(), found, strict=True) if r} for most, found in reasons.items()}
    assert left_out == {11: {"DSBOJHIP", "GBDSBO"}, 12: {"GBDSBO"}, 16: set()}
    assert "16 numbers" in next(reason for reason in reasons[12] if reason)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"outer": []}, "outer"),
        ({"inner": [0.0]}, "inner"),
        ({"privacy": {"epsilon": -1.0}}, "privacy.epsilon"),
        ({"privacy": {"clips": 1.0}}, "privacy.clips"),
        ({"points": 0}, "points"),
    ],
)
def test_bad_options_are_named(values, field):
    with pytest.raises(InvalidInput) as refused:
        validate(Comparison, values)
    assert refused.value.field.startswith(field)
