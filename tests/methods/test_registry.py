"""Methods and networks by name, read from tables and written back."""

import inspect
import sys
import tomllib
from typing import Any

import optax
import pytest
import tomli_w

import hyperpush as hp
from hyperpush.methods import registry
from hyperpush.methods.registry import build, find, kind_of, registered, table

VARIED = [
    ("inner", hp.SGP(5, hp.schedule("milestones", 0.1, at=(2, 3), factor=0.5), "gradient-after", batch_size=3)),
    ("inner", hp.SGP(5, optimizer=hp.optimizer("adam", learning_rate=hp.schedule("cosine", 0.1, steps=5), b1=0.8))),
    ("hypergradients", hp.TrackedHGP(tolerance=None)),
    ("hypergradients", hp.hypergradients.ITDBackward(hp.SGP(5, hp.schedule("power", 0.1, exponent=0.5)))),
    ("algorithms", hp.algorithms.MDBO(3, 0.1, hp.schedule("power", 0.2, 0.5), inverse=hp.algorithms.Neumann(3, 0.2))),
]


def as_toml(written: dict[str, Any]) -> dict[str, Any]:
    return tomllib.loads(tomli_w.dumps({"method": written}))["method"]


@pytest.mark.parametrize(("kind", "method"), VARIED, ids=lambda each: type(each).__name__)
def test_toml_round_trip(kind, method):
    again = build(kind, as_toml(table(method)), "method")
    assert again == method
    assert hash(again) == hash(method)


def test_what_a_table_cannot_hold_is_refused():
    with pytest.raises(hp.InvalidInput, match=r"SGP.optimizer: got Gradient.*hp.optimizer\(…\)"):
        table(hp.SGP(1, optimizer=optax.sgd(0.1)))


@pytest.mark.parametrize(
    "kind", [kind for kind in registry.KINDS if kind != "methods"]
)  # the kind "methods" contains classes of the other kinds
def test_every_public_class_is_found_by_its_name(kind):
    known = registered(kind)
    assert known
    for name, each in known.items():
        assert find(kind, name) is each
        assert find(kind, each.__name__.upper()) is each
        assert not inspect.isabstract(each)


def test_public_methods_are_registered():
    places = (hp, hp.hypergradients, hp.algorithms)
    offered = {name for place in places for name in dir(place) if isinstance(getattr(place, name, None), type)}
    offered = {name for place in places for name in offered if hasattr(getattr(place, name, None), "info")}
    found = [each for kind in ("inner", "hypergradients", "algorithms") for each in registered(kind).items()]
    named = {name for name, each in found if each.__module__.startswith("hyperpush.")}
    assert offered == named
    assert kind_of(hp.HGP.example()) == "hypergradients"
    assert kind_of(hp.networks.Ring(3)) == "networks"
    assert kind_of(3) is None


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_methods.py").write_text(
        "import equinox as eqx\n"
        "from hyperpush.inner.sgp import SGP\n"
        "class Mine(SGP):\n"
        "    pass\n"
        "class Other:\n"
        "    pass\n"
    )
    (tmp_path / "broken_methods.py").write_text("import nothing_of_the_kind\n")
    yield tmp_path
    for name in ("mine_methods", "broken_methods"):
        sys.modules.pop(name, None)


def test_a_class_of_ones_own(here):
    made = build("inner", {"name": "mine_methods:Mine", "steps": 3, "step_size": 0.1}, "method.inner")
    assert type(made).__name__ == "Mine"
    assert table(made)["name"] == "mine_methods:Mine"
    assert build("inner", table(made), "method.inner") == made


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SPG", "method.name: got 'SPG'; allowed: .*did you mean 'SGP'"),
        ("mine_methods:Mime", "method.name: got 'Mime'; allowed: Mine.*did you mean 'Mine'"),
        ("mine_methods:Other", "method.name: got 'mine_methods:Other'; allowed: an inner solver: a subclass of Inner"),
        ("broken_methods:Mine", "method.name: got 'broken_methods:Mine'; allowed: .*No module named 'nothing_of"),
        ("missing_methods:Mine", "method.name: .*No module named 'missing_methods'"),
        (3, "method.name: got 3; allowed: the name of an inner solver, or module:Class"),
    ],
)
def test_wrong_names_are_explained(here, name, message):
    with pytest.raises(hp.InvalidInput, match=message):
        build("inner", {"name": name, "steps": 3, "step_size": 0.1}, "method")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 3}, "method.inner.step: got 'step'; allowed: .*did you mean 'steps'"),
        ({"step_size": 0.1}, "method.inner.steps: got None; allowed: a value"),
        ({"steps": -1, "step_size": 0.1}, "method.inner.steps: got -1"),
        ({"steps": 1, "step_size": "fast"}, "method.inner.step_size: got 'fast'"),
        ({"steps": 1, "step_size": {"value": 0.1}}, "method.inner.step_size.name: got None"),
        ({"steps": 1, "step_size": {"name": "cosin"}}, "method.inner.step_size.name: got 'cosin'.*'cosine'"),
        (
            {"steps": 1, "step_size": {"name": "cosine", "value": 0.1, "steps": 0}},
            "method.inner.step_size.steps: got 0",
        ),
        ({"steps": 1, "optimizer": {"name": "adam", "learning_rat": 0.1}}, "method.inner.optimizer.learning_rat: got"),
        (
            {"steps": 1, "optimizer": {"name": "adam", "learning_rate": -1}},
            "method.inner.optimizer.learning_rate: got -1",
        ),
        (
            {"steps": 1, "optimizer": {"name": "adam", "learning_rate": {"name": "cosine", "value": -1, "steps": 3}}},
            "method.inner.optimizer.learning_rate.value: got -1",
        ),
    ],
)
def test_wrong_options_are_named_by_their_key(options, message):
    with pytest.raises(hp.InvalidInput, match=message):
        build("inner", {"name": "SGP", **options}, "method.inner")


def test_nested_ones_too():
    solver = {"name": "SGP", "steps": -1, "step_size": 1}
    with pytest.raises(hp.InvalidInput, match=r"method\.solver\.steps: got -1"):
        build("hypergradients", {"name": "ITDBackward", "solver": solver}, "method")
    other = {"name": "DSGD", "steps": 1, "step_size": 1}
    with pytest.raises(hp.InvalidInput, match=r"method\.solver: got DSGD"):
        build("hypergradients", {"name": "ITDBackward", "solver": other}, "method")
    with pytest.raises(hp.InvalidInput, match=r"method\.name: got None; allowed: the name of an algorithm"):
        build("algorithms", {"steps": 3}, "method")
    with pytest.raises(hp.InvalidInput, match="method: got 'HGP'; allowed: a table"):
        build("hypergradients", "HGP", "method")


def test_networks_from_tables():
    made = build("networks", {"name": "random-directed", "clients": 4, "probability": [0.3, 0.6]}, "network")
    assert made == hp.networks.RandomDirected(4, (0.3, 0.6))
    assert build("networks", table(made), "network") == made
    with pytest.raises(hp.InvalidInput, match=r"network\.clients: got 1"):
        build("networks", {"name": "random-directed", "clients": 1}, "network")


def test_entry_points_are_registered(monkeypatch, tmp_path):
    (tmp_path / "their_code.py").write_text("import hyperpush as hp\nclass Theirs(hp.SGP):\n    pass\n")
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    named = "Theirs = their_code:Theirs\nGone = their_code:Gone\nMissing = not_there:Missing\n"
    (about / "entry_points.txt").write_text(f"[hyperpush.methods]\n{named}")
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    registry.extension_classes.cache_clear()
    assert find("inner", "theirs").__name__ == "Theirs"
    assert [kind for kind in registry.KINDS if "Theirs" in registered(kind)] == ["inner", "methods"]
    assert find("inner", "SGP") is hp.SGP
    for name, reason in (("Gone", "has no attribute 'Gone'"), ("Missing", "No module named 'not_there'")):
        with pytest.raises(hp.HyperpushError, match=rf"{name} of theirs 1.0 .* cannot be loaded: .*{reason}"):
            find("inner", name)
    monkeypatch.undo()
    registered.cache_clear()
    registry.extension_classes.cache_clear()
