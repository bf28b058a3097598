"""Personal models of digits for all parties, on links that lose up to half of the messages."""

import jax
import numpy as np
import pytest
from deploy.deployed import deployed
from deploy.digits import accuracy

import hyperpush as hp
from hyperpush.deploy.swarm import swarm
from hyperpush.spec import objects

CLIENTS, STEPS, ORDER, PUSHES, OUTER = 4, 420, 60, 2, 3
RATE, MILESTONES, OUTER_RATE = 0.3, (300, 380), 0.1


def options(file, loss):
    steps = {"name": "milestones", "value": RATE, "at": list(MILESTONES)}
    made = {
        "task": {"name": "deploy.digits:digits", "clients": CLIENTS, "seed": 0},
        "network": {"name": "random-directed"},
        "method": {
            "name": "PDBO",
            "steps": OUTER,
            "inner": {"name": "SGP", "steps": STEPS, "step_size": steps},
            "hypergradient": {
                "name": "TrackedHGP",
                "steps": ORDER,
                "pushes": PUSHES,
                "step_size": RATE,
                "tolerance": "none",
            },
            "outer": {"name": "adam", "learning_rate": OUTER_RATE},
        },
    }
    faults = {"loss": loss, "duplicate": 0.1, "delay": 2}
    return deployed(file, made, mode="asynchronous", longest_wait=0.1, faults=faults, fault_seed=3)


@pytest.fixture(scope="module")
def without_loss(tmp_path_factory):
    config = options(tmp_path_factory.mktemp("spec") / "run.toml", 0.0)
    found = objects.read(config.spec.tables()).run()
    assert isinstance(found, hp.Solution)
    return accuracy(jax.tree.map(np.asarray, found.params), np.asarray(found.hypers), CLIENTS, 0)


@pytest.mark.faults
@pytest.mark.parametrize("loss", [0.3, 0.5])
def test_the_accuracy_is_within_a_point_of_that_without_loss(loss, without_loss, tmp_path):
    found = swarm(options(tmp_path / "run.toml", loss), CLIENTS, tmp_path / "run", seconds=900)
    folders = [hp.load(tmp_path / "run" / name) for name in found["peers"]]
    params = {key: np.concatenate([folder.arrays("params")[key] for folder in folders]) for key in ("w", "b")}
    hypers = np.concatenate([folder.models("hypers") for folder in folders])
    assert np.abs(hypers).max() > 0.15
    reached = accuracy(params, hypers, CLIENTS, 0)
    print(f"{loss:.0%} loss: {reached:.2f} %, without: {without_loss:.2f} %")
    assert without_loss > 80
    assert abs(reached - without_loss) <= 1.0
