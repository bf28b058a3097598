"""Parties with privacy: their noise comes from secrets of their own."""

import numpy as np
import pytest
from peers.parties import together
from safetensors.numpy import load_file

from hyperpush.config import validate
from hyperpush.peers.options import Peers
from hyperpush.peers.party import take_part
from hyperpush.peers.swarm import laid_out

NAMES = ["peer-0", "peer-1"]


def run(base, secrets=None, epsilon=50.0):
    """The params of two parties, which find these secrets in their folders."""
    config = validate(
        Peers,
        {
            "private_draws": True,
            "experiment": {
                "problem": "logistic",
                "clients": 2,
                "network": "fully-connected",
                "inner": {"steps": 5, "rate": 0.5},
                "estimator": {"method": "HGP", "order": 2, "pushes": 2, "step": 0.5},
                "outer": {"steps": 1},
                "privacy": {"epsilon": epsilon, "delta": 0.0},
            },
        },
    )
    assert isinstance(config, Peers)
    config = laid_out(config, 2, base, secure=False)
    for name, secret in (secrets or {}).items():
        (base / name).mkdir(parents=True)
        (base / name / "secret.key").write_bytes(secret)
    results = together(2, lambda client: take_part(config, NAMES[client], say=lambda line: None))
    assert [result["epsilon"] for result in results] == [epsilon] * 2
    return np.stack([load_file(base / name / "params.safetensors")[""] for name in NAMES])


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
    assert np.all(changed.max(1) > 1e-4)  # its neighbour mixes in what it sends
