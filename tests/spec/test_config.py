"""Files, names and overrides become validated options."""

from typing import cast

import pytest
from tiny import TINY, TinyConfig

from hyperpush.base.errors import InvalidInput
from hyperpush.base.imports import load_function
from hyperpush.spec.config import default_toml, load_config, to_toml
from hyperpush.spec.studies import experiments

KNOWN = {"tiny": TINY}


def config(*overrides: str, source: str = "tiny") -> TinyConfig:
    return cast(TinyConfig, load_config(source, overrides, KNOWN)[1])


def test_a_name_gives_the_defaults():
    assert config() == TinyConfig()


def test_overrides_are_toml_or_bare_strings_and_reach_into_tables():
    made = config("steps=7", "pushes=[2, 5]", "network.kind=random-directed", 'batch="all"', "rate=1")
    assert (made.steps, made.pushes, made.network.kind, made.batch, made.rate) == (
        7,
        (2, 5),
        "random-directed",
        "all",
        1.0,
    )


def test_an_override_inside_a_table_keeps_the_rest_of_its_defaults():
    assert config("network.kind=ring").network.probability == (0.1, 0.2)


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('experiment = "tiny"\nsteps = 5\nrate = 0.25\n[network]\nkind = "random-directed"\n')
    made = config("steps=6", "network.probability=[0.5, 0.5]", source=str(file))
    assert (made.steps, made.rate) == (6, 0.25)
    assert (made.network.kind, made.network.probability) == ("random-directed", (0.5, 0.5))


@pytest.mark.parametrize(
    ("override", "field", "message"),
    [
        ("stepz=3", "stepz", "did you mean 'steps'"),
        ("network.kindd=ring", "network.kindd", "did you mean 'kind'"),
        ("steps=three", "steps", "got 'three'; allowed: a whole number"),
        ("steps=true", "steps", "got True; allowed: a whole number"),
        ('steps="3"', "steps", "a whole number"),
        ("steps=0", "steps", "got 0; allowed: a whole number from 1 to 100"),
        ("rate=nan", "rate", "finite"),
        ("rate=[1", "rate", "got '[1'; allowed: a finite number"),
        ("batch=half", "batch", "a whole number or all"),
        ("pushes=[1, 2.5]", "pushes[1]", "got 2.5; allowed: a whole number"),
        ("pushes=[]", "pushes", "got []; allowed: a list of 1 or more"),
        ("network.kind=rnig", "network.kind", "did you mean 'ring'"),
        ("network.probability=[0.5]", "network.probability", "(a finite number, a finite number)"),
        ("network=ring", "network", "got 'ring'"),
        ("steps.more=1", "steps", "got {'more': 1}; allowed: a whole number"),
        ("precision=float16", "precision", "float32, float64"),
        ("steps", "-s", "key=value"),
        ("=3", "-s", "key=value"),
    ],
)
def test_bad_values_name_the_field_and_what_is_allowed(override, field, message):
    with pytest.raises(InvalidInput) as caught:
        config(override)
    assert caught.value.field == field
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("steps = ", "file", "well-formed TOML"),
        ("steps = 3", "experiment", "got None; allowed: tiny"),
        ('experiment = "tinny"', "experiment", "did you mean 'tiny'"),
        ("experiment = [1]", "experiment", "tiny"),
        ('experiment = "tiny"\nnetwork = "ring"', "network", "got 'ring'"),
    ],
)
def test_bad_files(tmp_path, text, field, message):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        config(source=str(file))
    assert caught.value.field == field
    assert message in str(caught.value)


def test_a_file_that_is_missing_or_not_text(tmp_path):
    with pytest.raises(InvalidInput, match="No such file"):
        config(source=str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="well-formed TOML"):
        config(source=str(tmp_path / "binary.toml"))


def test_shown_defaults_and_saved_options_can_be_run_again(tmp_path):
    shown = default_toml(TINY)
    assert "# How many steps to take; 1 to 100\nsteps = 3" in shown
    (tmp_path / "shown.toml").write_text(shown)
    assert config(source=str(tmp_path / "shown.toml")) == TinyConfig()
    made = config("limit=0.5", "network.kind=random-directed")
    (tmp_path / "saved.toml").write_text(to_toml("tiny", made))
    assert config(source=str(tmp_path / "saved.toml")) == made


def test_every_experiment_shows_a_file_that_gives_its_defaults(tmp_path):
    known = experiments()
    for name, experiment in known.items():
        assert name == experiment.name
        file = tmp_path / f"{name}.toml"
        file.write_text(default_toml(experiment))
        assert load_config(str(file), [], known) == (experiment, experiment.config())


def test_load_function_finds_functions_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_problem.py").write_text("constant = 1\ndef make():\n    return 42\n")
    assert load_function("problem", "my_problem:make")() == 42
    with pytest.raises(InvalidInput, match="did you mean 'my_problem:make'"):
        load_function("problem", "my_problem:mkae")
    with pytest.raises(InvalidInput, match="my_problem:make"):
        load_function("problem", "my_problem:constant")


@pytest.mark.parametrize("spec", ["my_problem", ":make", "no_such_module_here:make", "broken_problem:make"])
def test_load_function_refuses_what_does_not_import(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_problem.py").write_text("1 / 0\n")
    with pytest.raises(InvalidInput) as caught:
        load_function("outer.problem", spec)
    assert caught.value.field == "outer.problem"
