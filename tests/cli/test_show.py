"""`hyperpush show` prints the options of every named object as TOML that can be read back."""

import dataclasses
import tomllib

import pytest

from hyperpush.cli.app import main
from hyperpush.cli.explain import options_toml
from hyperpush.methods.registry import build, registered

METHODS = [("algorithms", "PDBO"), ("hypergradients", "HGP"), ("inner", "SGP"), ("networks", "random-directed")]


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=[name for _, name in METHODS])
def test_what_is_shown_makes_the_thing(kind, name):
    table = tomllib.loads(options_toml(kind, registered(kind)[name]))
    inside = table.get("method") or {**table["network"], "clients": 4}
    made = build(kind, inside, "shown")
    assert type(made) is registered(kind)[name]


def test_every_option_of_an_estimator_is_explained(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["show", "HGP"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in dataclasses.fields(registered("hypergradients")["HGP"]):
        assert option.name in shown
    assert "Rounds of averaging per step" in shown
    assert "# Allowed: push, gossip, exact" in shown
    assert "arXiv:2210.02129" in shown
