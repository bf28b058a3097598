"""The benchmark of rounds runs, compares only equal results, and reports correct figures."""

import json

import jax
import loop
import numpy as np
import pytest
import rounds
import timing
from rounds import Rounds, growth_row, require_same
from script import main, read

from hyperpush.base.errors import HyperpushError
from hyperpush.networks import RandomDirected
from hyperpush.tasks.logistic import logistic

CLIENTS, WIDTH, ROUNDS = 5, 4, 7


@pytest.fixture(scope="module")
def task():
    """Return a task at params where the hypergradient is not zero."""
    made = logistic(CLIENTS, seed=1, examples=8, features=WIDTH - 1)
    return made.at(params=jax.random.normal(jax.random.key(2), made.params.shape))


@pytest.mark.parametrize(("method", "options"), [("sgp", (0.3,)), ("hgp", (1, 0.3)), ("hgp", (4, 0.3))])
@pytest.mark.long
def test_engine_and_loop_compute_the_same(task, method, options):
    arguments = (task, RandomDirected(CLIENTS), jax.random.key(3), *options)
    ours, theirs = (getattr(side, method)(*arguments)(ROUNDS) for side in (rounds, loop))
    assert np.linalg.norm(theirs) > 0.01
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("other", [1.001, np.nan])
def test_different_results_are_not_compared(other):
    require_same("equal", np.ones(3), np.full(3, 1.00001))
    with pytest.raises(HyperpushError, match="SGP: engine and loop differ"):
        require_same("SGP", np.ones(3), np.array([1.0, 1.0, other]))


def test_time_per_round_is_the_median_of_turns(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def task(name, start, round):
        def run(rounds):
            order.append((name, rounds))
            now[0] += start + rounds * round
            now[0] += 5 if len(order) == slow else 0

        return run

    slow = 0
    tasks = [task("fast", 0.001, 0.0001), task("slow", 0, 0.02)]
    assert timing.per_round(tasks, seconds=1, repeats=3) == pytest.approx([0.0001, 0.02], rel=0.02)
    measured = order[-6:]
    assert measured == measured[:2] * 3
    assert [name for name, _ in measured[:2]] == ["fast", "slow"]
    slow = len(order) + len(order) - 1  # the clock jumps by 5 s in one of the last turns of a second timing
    assert timing.per_round(tasks, seconds=1, repeats=3) == pytest.approx([0.0001, 0.02], rel=0.02)


def test_peak_memory_is_that_of_the_task():
    def with_array(megabytes: int) -> float:
        peak = timing.peak_megabytes(lambda: np.ones(megabytes * 2**17))
        return pytest.skip("the system does not tell") if peak is None else peak

    small = with_array(1)
    assert with_array(201) - small == pytest.approx(200, rel=0.2)
    assert with_array(1) < small + 100  # an earlier peak does not count


def test_growth_is_the_slope_between_sizes():
    assert growth_row(10, 1e-6, 101.0, 102.0, None) == {
        "clients": 10,
        "microseconds": pytest.approx(1),
        "peak_megabytes": 0,
        "per_client_nanoseconds": pytest.approx(100),
        "exponent": None,
    }
    second = growth_row(100, 1e-4, 103.0, 102.0, (10, 1e-6))
    assert (second["peak_megabytes"], second["exponent"]) == (1, pytest.approx(2))
    assert growth_row(10, 1.0, None, None, None)["peak_megabytes"] is None


@pytest.mark.long
def test_the_benchmark_runs_and_reports(capsys):
    given = "--clients 3 --widths 4 --examples 5 --growth-clients 24 --seconds 0.001 --repeats 1 --json"
    main(Rounds, rounds.run, given.split())
    said = capsys.readouterr()
    read = json.loads(said.out)
    assert set(read) == {"rounds", "growth", "machine"}
    assert all(title in said.err for title in ("µs per round on random-directed networks", "SGP on 3-out graphs"))
    assert [(row["method"], row["pushes"], row["clients"], row["width"]) for row in read["rounds"]] == [
        ("SGP", 1, 3, 4),
        ("HGP", 1, 3, 4),
        ("HGP", 10, 3, 4),
    ]
    for row in read["rounds"]:
        assert row["ratio"] == pytest.approx(row["loop_microseconds"] / row["microseconds"])
    assert [row["clients"] for row in read["growth"]] == [24]
    assert all(row["per_client_nanoseconds"] > 0 for row in read["growth"])
    assert read["machine"]["cores"] >= 1


def test_either_part_can_be_left_out():
    config, as_json = read(Rounds, ["--clients", "--growth-clients"])
    result = rounds.run(config)
    assert not as_json
    assert (result["rounds"], result["growth"]) == ([], [])


@pytest.mark.parametrize(
    ("option", "value"), [("growth-clients", "11"), ("clients", "1"), ("seconds", "0"), ("examples", "0")]
)
def test_bad_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        read(Rounds, [f"--{option}", value])
    assert ended.value.code == 2
    assert option.replace("-", "_") in capsys.readouterr().err.splitlines()[-1]
