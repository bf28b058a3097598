"""Parties with privacy: their noise comes from secrets of their own."""

import numpy as np
import pytest
from deploy.deployed import deployed
from engines.peer.parties import together
from safetensors.numpy import load_file

from hyperpush.deploy.party import run_peer
from hyperpush.deploy.swarm import on_loopback
from hyperpush.privacy import ASSUMPTION

NAMES = ["peer-0", "peer-1"]
RELEASES = 2 * 5 + 2 + 1  # two solves of 5 gradients; one estimate of 2 products, and one outer gradient


def run(base, secrets=None, epsilon=50.0):
    """The params of two parties, which find these secrets in their folders."""
    noise = {"name": "Laplace", "scale": RELEASES / epsilon}
    spec = {
        "task": {
            "name": "logistic",
            "seed": 0,
            "log_rates": True,
            "private": {"clip": 1.0, "curvature": 0.35, "coupling": 0.3, "noise": noise},
        },
        "network": {"name": "fully-connected"},
        "method": {
            "name": "PDBO",
            "steps": 1,
            "inner": {"name": "SGP", "steps": 5, "step_size": 0.5},
            "hypergradient": {"name": "HGP", "steps": 2, "pushes": 2, "step_size": 0.5},
            "outer": {"name": "adam", "learning_rate": 0.1},
        },
    }
    base.mkdir(parents=True, exist_ok=True)
    config = deployed(base / "run.toml", spec, 2, private_draws=True)
    config = on_loopback(config, NAMES, base, secure=False)
    for name, secret in (secrets or {}).items():
        (base / name).mkdir(parents=True)
        (base / name / "secret.key").write_bytes(secret)
    results = together(2, lambda client: run_peer(config, NAMES[client], say=lambda line: None))
    assert [result["epsilon"] for result in results] == pytest.approx([epsilon] * 2, rel=1e-6)
    assert [result["delta"] for result in results] == [0, 0]
    assert all(sum(result["releases"].values()) == RELEASES for result in results)
    assert all(result["assumes"] == ASSUMPTION for result in results)
    return np.stack([load_file(base / name / "models" / "params" / f"{name}.safetensors")[""] for name in NAMES])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    base = tmp_path_factory.mktemp("first")
    return base, run(base)


def test_secrets_are_ones_own_and_private(first):
    base, _ = first
    one, two = (base / name / "secret.key" for name in NAMES)
    assert one.read_bytes() != two.read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (one, two)} == {0o600}


def test_noise_follows_the_secret_and_not_the_seed(first, tmp_path):
    base, params = first
    kept = {name: (base / name / "secret.key").read_bytes() for name in NAMES}
    np.testing.assert_array_equal(run(tmp_path / "same", kept), params)
    others = {**kept, NAMES[1]: bytes(range(32))}
    changed = np.abs(run(tmp_path / "others", others) - params)
    assert np.all(changed.max(1) > 1e-4)  # its neighbor mixes in what it sends
