"""The shared comparison on quadratics, whose fixed points NumPy knows: choice of settings, costs, what is left out."""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401  (a fixture)

import hyperpush as hp
from hyperpush.config import validate
from hyperpush.declarations import ALGORITHMS
from hyperpush.errors import InvalidInput
from hyperpush.experiments.comparison import (
    Comparison,
    Privacy,
    Task,
    algorithms,
    compare,
    costs_of_privacy,
    names,
    private_key,
    privately,
    tell,
    too_large,
)
from hyperpush.problems.instance import Instance
from hyperpush.problems.quadratic import outer_fixed_points, quadratic

pytestmark = pytest.mark.usefixtures("float64")

N, D, H = 3, 4, 3
KEYED = ("LDPDSBO", "PDBO + HGP", "PDBO + TrackedHGP")


class Noted:
    """A run that keeps what it is told."""

    def __init__(self):
        self.records = []

    @contextmanager
    def progress(self, label, total):
        yield SimpleNamespace(advance=lambda: None)

    def record(self, **values):
        self.records.append(values)


@pytest.fixture
def task():
    problem, params, hypers, first, second = quadratic(N, 0)
    point = outer_fixed_points(*jax.tree.map(np.asarray, (first, second)))["x_G"]

    def measure(params, hypers):
        cost = jnp.mean(jax.vmap(problem.outer)(params, hypers, second))
        return {"outer_cost": cost, "distance": jnp.max(jnp.linalg.norm(hypers - point, axis=-1))}

    return Task(Instance(problem, params, jnp.zeros_like(hypers), first, second), measure)


def test_every_declared_algorithm_takes_part():
    config = Comparison()
    assert set(algorithms(config)) == set(ALGORITHMS)
    made = {name: make(0.1, 0.1) for name, make in algorithms(config).items()}
    assert all(type(algorithm).__name__ == name for name, algorithm in made.items())
    assert names(config) == [*made, "PDBO + HGP", "PDBO + TrackedHGP"]
    with pytest.raises(InvalidInput, match=r"methods.*MADBSO.*MADSBO"):
        names(Comparison(methods=("MADBSO",)))


def test_the_best_finite_setting_is_chosen(task):
    network = hp.networks.Ring(N)
    config = Comparison(
        clients=N,
        methods=("TTSA", "LDPDSBO", "PDBO + TrackedHGP"),
        iterations=203,
        outer=(0.05, 1e-4),
        inner=(0.15, 1e12),
        points=5,
        outer_steps=40,
        solver_steps=30,
        precision="float64",
    )
    run = Noted()
    found = compare(config, run, network, task)
    rows = {each.row["method"]: each.row for each in found}
    assert [record["method"] for record in run.records] == list(rows)
    for row in rows.values():
        assert (row["settings_tried"], row["settings_diverged"]) == (4, 2)
        assert row["settings"]["inner_step"] == 0.15
    start = np.linalg.norm(task.measure(task.instance.params, task.instance.hypers)["distance"])
    traced, untraced, alternating = found
    assert traced.row["settings"]["outer_step"] == 0.05
    assert traced.row["distance"] < 1e-3 * start
    # Constant steps leave an error of their order to the other two.
    assert untraced.row["distance"] < 0.4 * start
    assert alternating.row["distance"] < 0.4 * start
    # Settings side by side give what one run by itself gives, with what that one counts.
    problem, params, hypers, first, second = task.instance
    algorithm = algorithms(config)["TTSA"](0.05, 0.15)
    alone = hp.optimise(problem, algorithm, network, params, hypers, first, second, jax.random.key(0))
    np.testing.assert_allclose(traced.hypers, alone.hypers, rtol=1e-9)
    np.testing.assert_allclose(traced.params, alone.params, rtol=1e-9)
    assert (traced.row["floats_per_client"], traced.row["rounds"]) == (alone.floats, alone.rounds)
    # x, y and z in every round.
    assert (untraced.row["floats_per_client"], untraced.row["rounds"]) == (203 * (H + 2 * D), 203)
    # 203 = 5 × 40 + 3: the last point is the end.
    assert traced.curve is not None
    assert traced.curve["iterations"] == [0, 40, 80, 120, 160, 200, 203]
    assert traced.curve["outer_cost"][0] == pytest.approx(
        float(task.measure(task.instance.params, task.instance.hypers)["outer_cost"])
    )
    assert traced.curve["floats_per_client"][-1] == alone.floats
    private = privately(config.model_copy(update={"privacy": Privacy()}), run, network, found, task)
    assert [row["method"] for row in private] == list(rows)
    assert all(row["reason"].startswith("n/a") and "epsilon" not in row for row in private)
    assert "second derivatives" in private[1]["reason"]
    assert privately(config, run, network, found, task) == []


def test_a_method_that_always_diverges_has_a_row(task):
    config = Comparison(clients=N, methods=("SPDB",), iterations=100, outer=(0.1,), inner=(1e12,), precision="float64")
    (only,) = compare(config, Noted(), hp.networks.Ring(N), task)
    assert only.row["left_out"] == "diverged at every setting"
    assert only.row["settings_diverged"] == 1
    assert only.curve is None


def test_a_method_that_cannot_use_the_network_is_named_before_any_runs(task):
    run, network = Noted(), hp.networks.by_name("random-directed", N, 0)
    with pytest.raises(InvalidInput, match=r"network.*SPDB"):
        compare(Comparison(clients=N, methods=("TTSA", "SPDB")), run, network, task)
    assert run.records == []
    assert names(Comparison(methods=("TTSA", "PDBO + HGP")), network) == ["TTSA", "PDBO + HGP"]


def test_no_two_private_runs_share_a_key():
    keys = [jax.random.key(0), *(private_key(Comparison(), name, quiet) for name in KEYED for quiet in (False, True))]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)


def test_the_sentence_says_what_noise_and_what_settings_cost():
    said = []
    run = SimpleNamespace(console=SimpleNamespace(print=lambda text, **_: said.append(text)))
    row = {"method": "A", "claimed": 1.0, "delta": 1e-5, "accuracy": 0.7}
    row |= costs_of_privacy({"accuracy": 0.9}, {"accuracy": 0.85}, row)
    halted = {"method": "B", "claimed": 1.0, "delta": 0.0, "accuracy": 0.7}
    halted |= costs_of_privacy({"accuracy": 0.9}, {"left_out": "diverged"}, halted)
    tell(run, [row, halted, {"method": "C", "reason": "n/a"}])
    assert "costs 20.0 points" in said[0]
    assert all(
        part in said[0] for part in ("5.0 for the private settings", "85.0 %", "15.0 for noise", "90.0 %", "70.0 %")
    )
    assert "costs 20.0 points" in said[1]
    assert "diverge" in said[1]
    assert said[2] == "C: n/a"


def test_large_matrices_are_left_out(task):
    # 4 × 4 in GBDSBO, 3 × 4 in DSBO-JHIP.
    reasons = {most: [too_large(Comparison(most=most), name, task) for name in ALGORITHMS] for most in (11, 12, 16)}
    left_out = {most: {n for n, r in zip(ALGORITHMS, found, strict=True) if r} for most, found in reasons.items()}
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
