"""Sweeps over an experiment made for these tests: the runs, the choice of settings, and interruptions."""

import json
import signal
import tomllib
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from scipy import stats

from hyperpush.base import limits
from hyperpush.base.config import Config
from hyperpush.base.errors import Diverged
from hyperpush.base.limits import NONEMPTY, Count, Whole
from hyperpush.cli import app as cli
from hyperpush.runs.experiment import Experiment, SweepRule
from hyperpush.spec import studies
from hyperpush.verbs import saved
from hyperpush_papers.common.options import Positive
from hyperpush_papers.sweep.plan import RATES
from hyperpush_papers.sweep.statistics import choose, interval

# Validation scores by rate; the test scores below are best where the validation scores are worst.
VALIDATION = {"a": {0.01: 0.2, 0.1: 0.7, 1.0: 0.5}, "b": {0.01: 0.1, 0.1: 0.3, 1.0: 0.4}}
NOISE = {0: 0.01, 1: -0.03, 2: 0.05, 1000: 0.0, 1001: 0.002}


class Inside(Config):
    depth: Count = 1


class Options(Config):
    methods: Annotated[tuple[str, ...], NONEMPTY] = ("a", "b")
    rate: Annotated[float, limits.interval(0, 10, outside="low")] = 0.1
    other_rate: Positive = 0.1
    inside: Inside = Inside()
    scale: Literal["one", "two"] = "one"
    seeds: Count = 2
    seed: Whole = 0


class Fake:
    """A study that counts its runs; selected runs fail or are interrupted."""

    def __init__(self):
        self.runs: list[tuple[str, float, int]] = []
        self.broken: set[str] = set()
        self.interrupt_at = -1

    def run(self, config: Options, run: Any) -> dict[str, Any]:
        assert config.seeds == 1  # every run has one seed
        (method,) = config.methods
        if len(self.runs) == self.interrupt_at:
            raise KeyboardInterrupt
        self.runs.append((method, config.rate, config.seed))
        run.table("rows", ("method",), [(method,)])
        if method in self.broken:
            raise RuntimeError(f"{method} is [broken]")
        if method == "wild" and config.rate > 0.05:
            raise Diverged("wild", 3, "lower rate")
        if method == "server":
            return {"rows": [], "not_applicable": {"server": "needs a server"}}
        score = VALIDATION[method if method in VALIDATION else "a"][config.rate] + NOISE[config.seed]
        row = {"method": method, "validation": score, "accuracy": 1 - score, "size": config.inside.depth}
        if method == "beside":
            return {"rows": [row], "not_applicable": {"another": "diverged"}}
        status = {"status": {"converged": config.rate < 1, "reason": "limit"}} if method == "loose" else {}
        return {"rows": [row] * (2 if method == "twice" else 1), **status}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    made = Fake()
    tuning = SweepRule("validation", ("accuracy",), rates=("rate", "other_rate"))
    known = [
        Experiment("fake", "For tests.", Options, made.run, tuning),
        Experiment("plain", "Declares nothing.", Options, made.run),
        Experiment("seedless", "Has no seed.", Inside, made.run, tuning),
    ]
    monkeypatch.setattr(studies, "experiments", lambda: {each.name: each for each in known})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def call(fake, capsys):
    """Run a command and return its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["sweep", *arguments])
        return int(caught.value.code or 0), *capsys.readouterr()

    return call


GRID = ("--grid", "rate=[0.01, 0.1, 1.0]")


def test_intervals_are_students():
    values = [0.71, 0.74, 0.69]
    found = interval(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert found == pytest.approx((np.mean(values), np.std(values, ddof=1), low, high, 3))
    # Tables of Student's t distribution give 4.303 for two degrees of freedom.
    assert found.high is not None
    assert (found.high - found.mean) / (np.std(values, ddof=1) / np.sqrt(3)) == pytest.approx(4.303, abs=5e-4)
    assert interval([0.5]) == (0.5, None, None, None, 1)
    draws = np.random.default_rng(0).normal(1, 2, (1000, 4)).tolist()
    inside = np.mean([found.low <= 1 <= found.high for row in draws if (found := interval(row))])  # pyright: ignore
    assert inside == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 1000))


def test_the_best_mean_is_chosen_and_what_is_missing_is_out():
    assert choose([[1, 4], [3, 3], [2, 4]], "higher") == 1  # the first of equal settings
    assert choose([[1, 4], [3, 3], [2, 4]], "lower") == 0
    assert choose([[9, None], [1, 1]], "higher") == 1
    assert choose([[None], [None]], "higher") is None


def test_the_default_grid_is_the_papers():
    np.testing.assert_allclose(RATES, 10.0 ** np.array([-0.5, -1, -1.5, -2, -2.5, -3]), rtol=2e-3)


def test_all_get_the_same_budget_and_validation_decides(call, fake):
    code, out, err = call("fake", *GRID, "-s", "sweep.tuning_seeds=2", "--out", "here", "--json")
    assert code == 0
    tuned = {(rate, seed) for rate in (0.01, 0.1, 1.0) for seed in (1000, 1001)}
    assert {run[1:] for run in fake.runs if run[0] == "a"} == tuned | {(0.1, seed) for seed in range(3)}
    assert {run[1:] for run in fake.runs if run[0] == "b"} == tuned | {(1.0, seed) for seed in range(3)}
    assert len(fake.runs) == len(set(fake.runs)) == 18
    result = json.loads(out)
    accuracies = {name: [1 - score - NOISE[s] for s in range(3)] for name, score in (("a", 0.7), ("b", 0.4))}
    assert [(row["method"], row["seed"]) for row in result["rows"]] == [(m, s) for m in "ab" for s in range(3)]
    assert [row["accuracy"] for row in result["rows"]] == pytest.approx([*accuracies["a"], *accuracies["b"]])
    for each in result["summary"]:
        values = accuracies[each["method"]]
        assert each["accuracy"]["mean"] == pytest.approx(np.mean(values))
        assert each["accuracy"]["sd"] == pytest.approx(np.std(values, ddof=1))
    assert [each["setting"] for each in result["summary"]] == [{"rate": 0.1}, {"rate": 1.0}]
    assert [each["at_the_end_of_the_grid"] for each in result["summary"]] == [[], ["rate"]]
    np.testing.assert_allclose(np.mean(result["tuning"][0]["scores"], 1), [0.201, 0.701, 0.501])
    assert "chosen at an end of the grid" in err
    read = saved.load("here")
    assert read.result["rows"] == result["rows"]
    assert len(read.metrics) == 18
    # Runs that are used for tuning do not report test scores.
    assert {"accuracy" in line for line in read.metrics if line["phase"] == "tuning"} == {False}
    assert {"config.toml", "metrics.jsonl", "result.json"} <= {
        each.name for each in next(read.path.glob("cells/*")).iterdir()
    }


def test_an_interrupted_sweep_goes_on(call, fake, tmp_path):
    options = ("fake", *GRID, "--seeds", "2", "--json")
    _, whole, _ = call(*options, "--out", "whole")
    everything = sorted(fake.runs)
    fake.runs, fake.interrupt_at = [], 4
    assert call(*options)[0] == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "result.json").exists()
    (folder / "cells" / ".killed.partial").mkdir()  # the file that a killed process leaves
    (folder / "cells" / ".killed.partial" / "metrics.jsonl").touch()
    fake.interrupt_at = -1
    code, out, err = call(*options)  # the same command finds its folder again
    assert code == 0
    assert sorted(fake.runs) == everything
    assert err.count("(kept)") == 4
    strip = lambda text: {key: value for key, value in json.loads(text).items() if key != "run"}  # noqa: E731
    assert strip(out) == strip(whole)
    assert not list(folder.rglob("*.partial"))


def test_seeds_may_grow_and_nothing_else_may_change(call, fake):
    call("fake", *GRID, "--seeds", "1", "--out", "here")
    before = len(fake.runs)
    code, out, _ = call("fake", *GRID, "--seeds", "3", "--out", "here", "--json")
    assert (code, len(fake.runs) - before, len(json.loads(out)["rows"])) == (0, 4, 6)
    runs = list(fake.runs)
    for changed, message in (
        (("--seeds", "2", *GRID), "'seeds': 3"),
        (("--grid", "rate=[0.01, 0.1]"), "sweep was"),
        ((*GRID, "-s", "scale=two"), "scale was 'one', is 'two'"),
    ):
        code, _, err = call("fake", *changed, "--out", "here")
        assert code == 2
        assert "error: --out: got 'here'; allowed: the folder of a sweep with the same options" in err
        assert message in err
    cell = next(saved.Path("here/cells").glob("a*")) / "config.toml"
    cell.write_text(cell.read_text().replace('scale = "one"', 'scale = "two"'))
    code, _, err = call("fake", *GRID, "--out", "here")
    assert (code, fake.runs) == (2, runs)
    assert "scale was 'two', is 'one'" in err


def test_what_fails_is_reported_and_the_others_go_on(call, fake):
    fake.broken = {"b"}
    options = ("fake", *GRID, "-s", 'methods=["b", "wild", "server", "a"]', "--seeds", "2", "--out", "here", "--json")
    code, out, err = call(*options)
    result = json.loads(out)
    assert code == 1
    summary = {each["method"]: each for each in result["summary"]}
    assert {name: len(each["seeds"]) for name, each in summary.items()} == {"b": 0, "wild": 2, "server": 0, "a": 2}
    assert summary["wild"]["setting"] == {"rate": 0.01}  # all other rates diverge, which does not count as a failure
    assert summary["server"]["not_applicable"] == "needs a server"
    assert [(each["method"], each["phase"]) for each in result["failed"]] == [("b", "tuning")] * 3
    assert "RuntimeError: b is [broken]" in err
    assert "Traceback" not in err
    assert "RuntimeError" in next(saved.Path("here/cells").glob("b*.failed")).read_text()
    assert sum(run[0] == "server" for run in fake.runs) == 1
    fake.broken, fake.runs = set(), []
    code, out, _ = call(*options)
    assert code == 0
    assert json.loads(out)["failed"] == []
    assert {run[0] for run in fake.runs} == {"b"}
    assert not list(saved.Path("here/cells").glob("*.failed"))


def test_what_did_not_converge_is_marked(call, fake):
    compare = ("--compare", 'methods=["loose", "b"]', "--seeds", "2")
    code, out, error = call("fake", *compare, "--grid", "rate=[0.1, 1.0]", "--json", "--strict")
    result = json.loads(out)
    assert result["tuning"][0]["converged"][1] == [False] * len(result["chosen_by"]["seeds"])
    assert "! not converged (limit)" in error
    loose = next(each for each in result["summary"] if each["method"] == "loose")
    assert len(loose["not_converged"]) == (2 if loose["setting"]["rate"] == 1.0 else 0)
    assert code == (3 if loose["not_converged"] else 0)
    assert {each["converged"] for each in result["rows"] if each["method"] == "b"} == {None}
    code, out, error = call(
        "fake", "--compare", 'methods=["loose"]', "--grid", "rate=[1.0]", "--seeds", "2", "--strict"
    )
    assert code == 3
    assert "2, ! 2 not converged" in error


def test_a_sweep_of_failures_leaves_nothing(call, fake, tmp_path):
    fake.broken = {"a", "b"}
    code, out, err = call("fake", *GRID, "--out", "here")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "error: sweep: all 6 runs failed, the first with: RuntimeError: a is [broken]" in err


def test_a_file_compares_options_and_sets_several_together(call, fake, tmp_path):
    (tmp_path / "my.toml").write_text(
        'experiment = "plain"\nmethods = ["a"]\nscale = "two"\n'
        '[sweep]\nseeds = 1\nvalidation = "validation"\ntest = ["accuracy", "size"]\nbetter = "lower"\n'
        '[sweep.grid]\n"rate, other_rate" = [0.01, 1.0]\n'
        "[sweep.compare]\ninside.depth = [2, 3]\nmethods = ['a', 'b']\n"
    )
    code, out, _ = call("my.toml", "--out", "here", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["grid"] == [{"rate": 0.01, "other_rate": 0.01}, {"rate": 1.0, "other_rate": 1.0}]
    assert [each["method"] for each in result["summary"]] == ["2, a", "2, b", "3, a", "3, b"]
    assert [each["setting"]["rate"] for each in result["summary"]] == [0.01] * 4
    assert [row["size"] for row in result["rows"]] == [2, 2, 3, 3]
    configs = [tomllib.loads((cell / "config.toml").read_text()) for cell in saved.Path("here/cells").iterdir()]
    assert {each["scale"] for each in configs} == {"two"}
    assert len(configs) == 4 * 2 + 4


def test_nothing_is_tuned_where_there_is_nothing_to_choose(call, fake):
    code, out, _ = call("fake", "-s", "sweep.tuning_seeds=0", "--seeds", "2", "--json")
    assert (code, json.loads(out)["tuning"]) == (0, [])
    assert sorted(fake.runs) == [("a", 0.1, 0), ("a", 0.1, 1), ("b", 0.1, 0), ("b", 0.1, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fake", "--grid", "raet=[0.1, 1.0]"], r"sweep.grid.raet: got 'raet'; allowed: "),
        (["fake", "--grid", "rate=[]"], "sweep.grid.rate: got []; allowed: a list of at least one value"),
        (["fake", "--grid", "rate=0.1"], "sweep.grid.rate: got 0.1; allowed: a list of at least one value"),
        (["fake", "--grid", "rate=[0.1, 11.0]"], "sweep.grid.rate: got 11.0; allowed: a finite number above 0 to 10"),
        (["fake", "--grid", "rate=[0.1, 'fast']"], "sweep.grid.rate: got 'fast'; allowed: a finite number"),
        (["fake", "--grid", "rate=[0.1, 0.1]"], "allowed: values that differ"),
        (["fake", "--grid", "inside.depth=[1, 0]"], "sweep.grid.inside.depth: got 0; allowed: a whole number from 1"),
        (["fake", "--grid", "rate.a=[1, 0]"], "rate is a single value, not a table"),
        (["fake", "--grid", "seed=[1, 2]"], "sweep.grid.seed: got 'seed'; allowed: other options"),
        (["fake", "--grid", "methods=['a', 'b']"], "allowed: options that sweep.compare does not set"),
        (["fake", "--grid", "rate=[0.1, 1.0]", "--grid", "rate,other_rate=[0.1, 1.0]"], "an option that is set once"),
        (["fake", "--grid", "rate"], "allowed: key=value"),
        (["fake", "--compare", "methods=[]"], "sweep.compare.methods: got []"),
        (["fake", "--compare", "scale=['one', 'tow']"], "sweep.compare.scale: got 'tow'; allowed: one, two (did you"),
        (["fake", "--seeds", "0"], "sweep.seeds: got 0; allowed: a whole number from 1 to 1000"),
        (["fake", "--seeds", "1001"], "sweep.seeds: got 1001; allowed: a whole number from 1 to 1000"),
        (["fake", "-s", "seeds=3"], "seeds: got 3; allowed: 1, or left out: sweep.seeds says"),
        (["fake", "-s", "sweep.tuning_seeds=0", *GRID], "sweep.tuning_seeds: got 0; allowed: at least 1 with a grid"),
        (["fake", "-s", "sweep.sedes=3"], "did you mean 'seeds'?"),
        (["fake", "-s", "sweep.validation=accuracy"], "sweep.validation: got 'accuracy'; allowed: a field that is not"),
        (["plain", *GRID], "sweep.validation: got None; allowed: a field of the rows of plain, which declares none"),
        (["plain", "-s", "sweep.validation=v", *GRID], "sweep.test: got []"),
        (["plain", "-s", "sweep.validation=v", "-s", "sweep.test=['t']"], "sweep.grid: got {}"),
        (["seedless", *GRID], "experiment: got 'seedless'; allowed: an experiment with an option seed"),
        (["fkae"], "did you mean 'fake'?"),
        (["none.toml"], "none.toml"),
        (["fake", *GRID, "--out", "full"], "allowed: a new or empty folder, or the folder of a sweep"),
        (["fake", *GRID, "--out", "full/kept"], "allowed: a new or empty folder, or the folder of a sweep"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(call, fake, tmp_path, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    code, out, err = call(*arguments)
    assert (code, out, fake.runs) == (2, "", [])
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["full", "full/kept"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-s", "sweep.validation=score"], "sweep.validation: got 'score, in a,rate=0.01,seed=1000-"),
        (["-s", "sweep.test=['score']", "-s", "sweep.tuning_seeds=0"], "sweep.test: got 'score, in a"),
        (["-s", 'methods=["twice"]'], "rows: got '2 rows of twice,rate=0.01,seed=1000-"),
        (["-s", 'methods=["beside"]'], "rows: got '2 rows of beside,rate=0.01,seed=1000-"),
    ],
)
def test_rows_that_do_not_fit_end_the_sweep_at_once(call, fake, options, message):
    grid = () if "sweep.tuning_seeds=0" in options else GRID
    code, _, err = call("fake", *grid, *options)
    assert (code, len(fake.runs)) == (2, 1)
    assert message in err.splitlines()[-1]


def test_two_sweeps_do_not_share_a_folder(call, fake):
    fcntl = pytest.importorskip("fcntl")
    call("fake", *GRID, "--seeds", "1", "--out", "here")
    with saved.Path("here/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = call("fake", *GRID, "--seeds", "2", "--out", "here")
    assert code == 6
    assert "--out: another process works in here" in err
