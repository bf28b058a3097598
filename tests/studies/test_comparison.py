"""The shared comparison on quadratics, whose fixed points NumPy knows: choice of settings, costs, what is left out."""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wide import float64  # noqa: F401  (a fixture)

import hyperpush as hp
from hyperpush.errors import InvalidInput
from hyperpush.registry import registered
from hyperpush.runs.config import validate
from hyperpush.studies.comparison import (
    Benchmark,
    Comparison,
    Privacy,
    algorithms,
    compare,
    costs_of_privacy,
    names,
    private_key,
    privately,
    tell,
    too_large,
)
from hyperpush.tasks.quadratic import outer_fixed_points, quadratic

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
def on():
    task = quadratic(N, 0, common=True)
    task = task.at(hypers=jnp.zeros_like(task.hypers))
    point = outer_fixed_points(task.train, task.validation)["x_G"]

    def measure(params, hypers):
        cost = jnp.mean(jax.vmap(task.problem.outer_cost)(params, hypers, task.validation))
        return {"outer_cost": cost, "distance": jnp.max(jnp.linalg.norm(hypers - point, axis=-1))}

    return Benchmark(task, measure)


def test_every_declared_algorithm_takes_part():
    config = Comparison()
    nested = {"PDBO", "CDBO", "CDBOLocal"}  # they are made of a solver and an estimator
    assert set(algorithms(config)) == set(registered("algorithms")) - nested
    made = {name: make(0.1, 0.1) for name, make in algorithms(config).items()}
    assert all(type(algorithm).__name__ == name for name, algorithm in made.items())
    assert names(config) == [*made, "PDBO + HGP", "PDBO + TrackedHGP"]
    with pytest.raises(InvalidInput, match=r"methods.*MADBSO.*MADSBO"):
        names(Comparison(methods=("MADBSO",)))


def test_the_best_finite_setting_is_chosen(on):
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
    found = compare(config, run, network, on)
    rows = {each.row["method"]: each.row for each in found}
    assert [record["method"] for record in run.records] == list(rows)
    for row in rows.values():
        assert (row["settings_tried"], row["settings_diverged"]) == (4, 2)
        assert row["settings"]["inner_step"] == 0.15
    start = np.linalg.norm(on.measure(on.task.params, on.task.hypers)["distance"])
    single, private_form, alternating = found
    assert single.row["settings"]["outer_step"] == 0.05
    assert single.row["distance"] < 1e-3 * start
    # Constant steps leave an error of their order to the other two.
    assert private_form.row["distance"] < 0.4 * start
    assert alternating.row["distance"] < 0.4 * start
    # Settings side by side give what one run by itself gives, with what that one counts.
    alone = hp.solve(on.task, algorithms(config)["TTSA"](0.05, 0.15), network, key=0)
    np.testing.assert_allclose(single.hypers, alone.hypers, rtol=1e-9)
    np.testing.assert_allclose(single.params, alone.params, rtol=1e-9)
    assert (single.row["floats_per_client"], single.row["rounds"]) == (alone.costs.floats, alone.costs.rounds)
    # x, y and z in every round.
    assert (private_form.row["floats_per_client"], private_form.row["rounds"]) == (203 * (H + 2 * D), 203)
    # 203 = 5 × 40 + 3: the last point is the end.
    assert single.curve is not None
    assert single.curve["iterations"] == [0, 40, 80, 120, 160, 200, 203]
    assert single.curve["outer_cost"][0] == pytest.approx(
        float(on.measure(on.task.params, on.task.hypers)["outer_cost"])
    )
    assert single.curve["floats_per_client"][-1] == alone.costs.floats
    private = privately(config.model_copy(update={"privacy": Privacy()}), run, network, found, on)
    assert [row["method"] for row in private] == list(rows)
    assert all(row["reason"].startswith("n/a") and "epsilon" not in row for row in private)
    assert "second derivatives" in private[1]["reason"]
    assert privately(config, run, network, found, on) == []


def test_a_method_that_always_diverges_has_a_row(on):
    config = Comparison(clients=N, methods=("SPDB",), iterations=100, outer=(0.1,), inner=(1e12,), precision="float64")
    (only,) = compare(config, Noted(), hp.networks.Ring(N), on)
    assert only.row["left_out"] == "diverged at every setting"
    assert only.row["settings_diverged"] == 1
    assert only.curve is None


def test_a_method_that_cannot_use_the_network_is_named_before_any_runs(on):
    run, network = Noted(), hp.networks.by_name("random-directed", N, 0)
    with pytest.raises(InvalidInput, match=r"network.*SPDB"):
        compare(Comparison(clients=N, methods=("TTSA", "SPDB")), run, network, on)
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
    tell(run, [row | {"assumes": "ideal"}, halted | {"assumes": "ideal"}, {"method": "C", "reason": "n/a"}])
    assert "costs 20.0 points" in said[0]
    assert all(
        part in said[0] for part in ("5.0 for the private settings", "85.0 %", "15.0 for noise", "90.0 %", "70.0 %")
    )
    assert "costs 20.0 points" in said[1]
    assert "diverge" in said[1]
    assert said[2:] == ["C: n/a", "ideal"]


def test_large_matrices_are_left_out(on):
    # 4 × 4 in GBDSBO, 3 × 4 in DSBO-JHIP.
    reasons = {
        most: [too_large(Comparison(most=most), name, on.task) for name in registered("algorithms")]
        for most in (11, 12, 16)
    }
    left_out = {
        most: {n for n, r in zip(registered("algorithms"), found, strict=True) if r} for most, found in reasons.items()
    }
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
