"""A personal model for everybody on digits, on links that lose up to half of the messages."""

import jax
import numpy as np
import optax
import pytest
from peers.digits import accuracy, digits
from safetensors.numpy import load_file

import hyperpush as hp
from hyperpush.config import validate
from hyperpush.peers.options import Peers
from hyperpush.peers.swarm import swarm

CLIENTS, STEPS, ORDER, PUSHES, OUTER = 4, 420, 60, 2, 3
RATE, MILESTONES, OUTER_RATE = 0.3, (300, 380), 0.1


def options(loss):
    made = validate(
        Peers,
        {
            "mode": "asynchronous",
            "longest_wait": 0.1,
            "experiment": {
                "problem": "peers.digits:digits",
                "clients": CLIENTS,
                "inner": {"steps": STEPS, "rate": RATE, "milestones": list(MILESTONES)},
                "estimator": {"method": "TrackedHGP", "order": ORDER, "pushes": PUSHES, "step": RATE},
                "outer": {"steps": OUTER, "rate": OUTER_RATE},
            },
            "faults": {"loss": loss, "duplicate": 0.1, "delay": 2, "seed": 3},
        },
    )
    assert isinstance(made, Peers)
    return made


@pytest.fixture(scope="module")
def without_loss():
    made = digits(CLIENTS, 0)
    found = hp.solve(
        made.problem,
        hp.networks.RandomDirected(CLIENTS),
        inner=hp.SGP(STEPS, hp.milestones(RATE, MILESTONES)),
        hypergradient=hp.TrackedHGP(ORDER, RATE, PUSHES, tolerance=None),
        outer=optax.adam(OUTER_RATE),
        outer_steps=OUTER,
        params=made.params,
        hypers=made.hypers,
        inner_data=made.inner_data,
        outer_data=made.outer_data,
        key=jax.random.key(0),
    )
    return accuracy(jax.tree.map(np.asarray, found.params), np.asarray(found.hypers), CLIENTS, 0)


@pytest.mark.faults
@pytest.mark.parametrize("loss", [0.3, 0.5])
def test_the_accuracy_is_within_a_point_of_that_without_loss(loss, without_loss, tmp_path):
    found = swarm(options(loss), CLIENTS, tmp_path / "run", seconds=900)
    models = [load_file(tmp_path / "run" / name / "params.safetensors") for name in found["peers"]]
    params = {key: np.stack([model[key] for model in models]) for key in ("w", "b")}
    hypers = np.stack([load_file(tmp_path / "run" / name / "hypers.safetensors")[""] for name in found["peers"]])
    assert np.abs(hypers).max() > 0.15
    reached = accuracy(params, hypers, CLIENTS, 0)
    print(f"{loss:.0%} loss: {reached:.2f} %, without: {without_loss:.2f} %")
    assert without_loss > 80
    assert abs(reached - without_loss) <= 1.0
