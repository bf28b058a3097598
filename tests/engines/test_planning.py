"""Plans count rounds and bytes as the run itself does, and neither compute nor write anything."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.cli import app as cli
from hyperpush.engines import planning
from hyperpush.engines.compiled import hostloop
from hyperpush.engines.planning import Planner
from hyperpush.engines.simulate import Simulate
from hyperpush.programs import Local, Repeat
from hyperpush.runs.run import plan_run
from hyperpush.spec import studies
from hyperpush.spec.config import load_config

# Train, then estimate: two calls.
TRAINED = """
[task]
name = "logistic"
clients = 4
seed = 0
[network]
name = "random-directed"
[train]
name = "SGP"
steps = 30
step_size = 0.5
[method]
name = "HGP"
steps = 5
pushes = 3
step_size = 0.5
"""
# Three inner solves and two estimates in one call.
SOLVED = """
[task]
name = "logistic"
clients = 4
seed = 0
[network]
name = "random-directed"
[method]
name = "PDBO"
steps = 2
inner = { name = "SGP", steps = 30, step_size = 0.5 }
hypergradient = { name = "HGP", steps = 5, pushes = 3, step_size = 0.5 }
outer = { name = "adam", learning_rate = 0.1 }
"""


@pytest.fixture
def spec(tmp_path):
    """Return a function that writes a spec and returns its path."""

    def write(text):
        (tmp_path / "my.toml").write_text(text)
        return str(tmp_path / "my.toml")

    return write


def test_a_plan_counts_what_the_algorithms_send(spec, monkeypatch):
    monkeypatch.setattr(hostloop, "call_compiled", None)  # every run calls this function
    experiment, config = load_config(spec(SOLVED), [], studies.experiments())
    (solve,) = plan_run(experiment, config, processes=2)["pieces"]
    # Three inner solves take 30 pushes each, two estimates 5·3. A push carries six params and a weight in float32.
    assert solve["rounds"] == 3 * 30 + 2 * 15
    assert solve["bytes_per_round"] == 4 * 7
    assert solve["floats"] == 7 * solve["rounds"]
    assert (solve["call"], solve["clients"]) == ("start, SGP, iterations, HGP", 4)
    one = plan_run(experiment, config)
    assert one["stopped"] is None
    assert one["megabytes_per_process"] > 0
    assert jnp.ones(()).dtype == jnp.float32


def test_a_plan_lists_every_call(spec, monkeypatch):
    monkeypatch.setattr(hostloop, "call_compiled", None)
    experiment, config = load_config(spec(TRAINED), [], studies.experiments())
    found = plan_run(experiment, config, processes=2)
    assert found["stopped"] is None
    train, estimate = found["pieces"]
    assert (train["rounds"], estimate["rounds"]) == (30, 15)
    assert train["bytes_per_round"] == estimate["bytes_per_round"] == 4 * 7
    assert (train["floats"], estimate["floats"]) == (7 * 30, 7 * 15)


def test_the_command_prints_a_plan_and_writes_nothing(spec, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = spec(SOLVED)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", path, "--json"])
    assert not caught.value.code
    assert json.loads(capsys.readouterr().out)["rounds"] == 3 * 30 + 2 * 15
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", path, "-s", "task.clients=0"])
    assert caught.value.code == 2
    assert "task.clients: got 0" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["my.toml"]


def test_only_what_is_divided_is_divided():
    """There are 5 clients with 100 numbers and 10 of data each; of two processes, one holds three clients."""
    states, data = jnp.ones((5, 100)), jnp.ones((5, 10))
    program = Repeat(Local(lambda s, ctx: s * 2), 3, name="loop")
    found = {}
    for processes in (1, 2):
        with (planner := Planner(processes)).active():
            Simulate().run(program, hp.networks.Ring(5), states, data, jax.random.key(0))
        (piece,) = planner.pieces
        found[processes] = piece["megabytes_per_process"] * 2**20
    assert found[1] == 2 * 5 * 400 + 5 * 40
    # A process holds its own clients' part, the complete start and data, and the complete result.
    assert found[2] == pytest.approx(3 / 5 * found[1] + 5 * 400 + 5 * 40 + 5 * 400)


def test_loops_that_clients_agree_to_end_count_at_most():
    """The outer loop runs a loop of at most four votes three times; each vote takes one flood."""
    vote = Repeat(Local(lambda s, ctx: s), 4, until=lambda s, ctx: s > 0, name="vote")
    network = hp.networks.Ring(5)
    with (planner := Planner()).active():
        result = Simulate().run(Repeat(vote, 3), network, jnp.ones(5), jnp.ones(5), jax.random.key(0), step=2)
    assert planner.pieces[0]["rounds"] == planner.pieces[0]["floats"] == 3 * 4 * network.flood_rounds()
    assert result.step == 2 + result.rounds == 2 + planner.pieces[0]["rounds"]


def test_the_answers_of_a_plan_take_no_memory():
    made = planning.ones(jax.ShapeDtypeStruct((10_000, 2_278_334), np.float32))
    assert made.shape == (10_000, 2_278_334)  # would take 91 GB
    assert made.strides == (0, 0)
    assert made[17, 5] == 1
