"""Run folders: their contents, reading them back, and leaving nothing behind."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tiny import TINY, TinyConfig

from hyperpush.base.errors import Diverged, InvalidInput
from hyperpush.runs.events import to_json
from hyperpush.runs.models import save_models
from hyperpush.spec.execute import execute
from hyperpush.verbs.saved import load


def test_a_run_folder_can_be_read_back(tmp_path):
    result, run = execute(TINY, TinyConfig(steps=2), tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    read = load(run.path)
    assert read.config["experiment"] == "tiny"
    assert read.config["steps"] == 2
    assert read.result == {"experiment": "tiny", "steps": 2, "value": [0.25, 0.25], "dtype": "float32"}
    assert read.result == json.loads(to_json(result))
    assert read.metrics == [{"step": 0, "value": 0.5}, {"step": 1, "value": 0.25}]
    assert [list(each) for each in read.events] == [["time", "kind", "step", "value"]] * 2
    assert {each["kind"] for each in read.events} == {"record"}
    np.testing.assert_array_equal(read.models("final")["layer"]["w"], np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(read.params["final"]["layer"]["b"], [0.25, 0.25])
    (figure,) = run.figures
    assert figure.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidInput, match="did you mean 'final'"):
        read.models("finl")


def test_default_folders_are_distinct(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {execute(TINY, TinyConfig())[1].path for _ in range(3)}
    assert {path.name for path in paths} == {path.name for path in (tmp_path / "runs").iterdir()}
    assert len(paths) == 3


@pytest.mark.parametrize(
    ("fail", "error"),
    [("clear", Diverged), ("bug", RuntimeError), ("interrupt", KeyboardInterrupt), ("not-finite", InvalidInput)],
)
def test_a_run_that_fails_leaves_nothing(tmp_path, fail, error):
    with pytest.raises(error):
        execute(TINY, TinyConfig(fail=fail), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_any_other_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    execute(TINY, TinyConfig(), out)
    before = (out / "result.json").read_bytes()
    with pytest.raises(InvalidInput, match="new or empty folder"):
        execute(TINY, TinyConfig(steps=9), out)
    assert (out / "result.json").read_bytes() == before
    with pytest.raises(InvalidInput, match="Not a directory"):
        execute(TINY, TinyConfig(), out / "result.json")
    (tmp_path / ".busy.partial").mkdir()
    with pytest.raises(InvalidInput, match="no other run"):
        execute(TINY, TinyConfig(), tmp_path / "busy")


def test_precision_is_set_for_the_run_only(tmp_path):
    result, _ = execute(TINY, TinyConfig(precision="float64"), tmp_path / "out")
    assert result["dtype"] == "float64"
    assert jnp.ones(1).dtype == jnp.float32


def test_progress_and_tables_reach_the_terminal(tmp_path):
    screen = io.StringIO()
    execute(TINY, TinyConfig(), tmp_path / "out", Console(file=screen, force_terminal=True, width=80))
    assert "steps" in screen.getvalue()
    assert "100%" in screen.getvalue()
    assert "0.125" in screen.getvalue()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), jnp.array([1.0, jnp.inf])])
def test_numbers_that_are_not_finite_are_refused_by_name(value):
    with pytest.raises(InvalidInput, match=r"errors\[1\]\.mean.*finite"):
        to_json({"errors": [{"mean": 1.0}, {"mean": value}]})


def test_models_of_any_pytree_keep_values_and_types(tmp_path):
    tree = {
        "list": [jnp.arange(6, dtype=jnp.int32).reshape(3, 2), jnp.ones(3, dtype=jnp.bfloat16)],
        "column": np.arange(12.0).reshape(4, 3).T,
        "name": "not an array",
    }
    (tmp_path / "models").mkdir()
    save_models(tmp_path / "models" / "tree", tree)
    save_models(tmp_path / "models" / "array", jnp.eye(3))
    assert len(list((tmp_path / "models" / "tree").iterdir())) == 1
    for name, text in (("config.toml", ""), ("metrics.jsonl", ""), ("result.json", "{}")):
        (tmp_path / name).write_text(text)
    params = load(tmp_path).params
    np.testing.assert_array_equal(params["array"], np.eye(3))
    assert set(params["tree"]) == {"list", "column"}
    for key, leaf in (("0", tree["list"][0]), ("1", tree["list"][1])):
        np.testing.assert_array_equal(params["tree"]["list"][key], leaf)
        assert params["tree"]["list"][key].dtype == leaf.dtype
    np.testing.assert_array_equal(params["tree"]["column"], tree["column"])


@pytest.mark.parametrize(
    "tree",
    [{}, {"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.ones(())}, {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}],
)
def test_models_without_one_client_axis_are_refused(tmp_path, tree):
    with pytest.raises(InvalidInput, match="models"):
        save_models(tmp_path / "final", tree)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="finished run"):
        load(tmp_path)
    _, run = execute(TINY, TinyConfig(), tmp_path / "out")
    (run.path / "models" / "final" / "all.safetensors").write_bytes(b"short")
    with pytest.raises(InvalidInput, match="a readable file"):
        load(run.path).models("final")
    (run.path / "result.json").write_text("{")
    with pytest.raises(InvalidInput, match="Expecting"):
        load(run.path)


def test_the_tests_see_four_devices():
    assert len(jax.devices("cpu")) == 4
