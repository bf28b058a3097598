"""Private parties draw their noise from their own secrets."""

import json
import threading
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from deploy.deployed import deployed
from engines.peer.parties import together
from safetensors.numpy import load_file

from hyperpush.base.errors import HyperpushError, InUse, InvalidInput
from hyperpush.deploy.folder import private_folder
from hyperpush.deploy.options import party_folder
from hyperpush.deploy.party import own_spec, run_peer
from hyperpush.deploy.swarm import on_loopback
from hyperpush.engines.peer.checkpoint import Checkpoint
from hyperpush.engines.peer.origin import Origin, arrays_digest, draws_key, new_start, problem_digest
from hyperpush.privacy import ASSUMPTION
from hyperpush.runs.lifecycle import Lifecycle

NAMES = ["peer-0", "peer-1"]
RELEASES = 2 * 5 + 2 + 1  # two solves of 5 gradients; one estimate of 2 products; one outer gradient


def made(base, epsilon=50.0, **deploy):
    """Return the deployment of two private parties with folders under `base`."""
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
    config = deployed(base / "run.toml", spec, 2, private_draws=True, **deploy)
    return on_loopback(config, NAMES, base, secure=False)


def quiet(line):
    pass


def run(base, secrets=None, epsilon=50.0, starts=1):
    """Return the params of two parties, which read these secrets from their folders."""
    config = made(base, epsilon)
    for name, secret in (secrets or {}).items():
        (base / name).mkdir(parents=True)
        (base / name / "secret.key").write_bytes(secret)
    results = together(2, lambda client: run_peer(config, NAMES[client], say=quiet))
    assert [result["epsilon"] for result in results] == pytest.approx([starts * epsilon] * 2, rel=1e-6)
    assert [result["delta"] for result in results] == [0, 0]
    assert all(sum(result["releases"].values()) == starts * RELEASES for result in results)
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
    assert {(base / name).stat().st_mode & 0o777 for name in NAMES} == {0o700}


def test_a_fresh_start_draws_new_noise_though_secrets_are_kept_and_the_budget_counts_both(first, tmp_path):
    base, params = first
    again = tmp_path / "again"
    for name in NAMES:
        (again / name).mkdir(parents=True)
        for file in ("secret.key", "releases.json"):
            (again / name / file).write_bytes((base / name / file).read_bytes())
    assert np.all(np.abs(run(again, starts=2) - params).max(1) > 1e-4)


def test_the_key_of_draws_follows_all_that_must_not_be_noised_alike():
    secret, digest = bytes(range(32)), b"a run"
    origin = Origin(arrays_digest(np.zeros(3)), arrays_digest(np.ones(1)), problem_digest(b"code", [0.5]))
    start = new_start()

    def drawn(secret=secret, digest=digest, origin=origin, start=start):
        return jax.random.key_data(draws_key(secret, digest, origin, start)).tolist()

    corrected = np.zeros(3)
    corrected[1] = 1e-6
    found = [
        drawn(),
        drawn(secret=bytes(32)),
        drawn(digest=b"another run"),
        drawn(origin=replace(origin, data=arrays_digest(corrected))),
        drawn(origin=replace(origin, problem=problem_digest(b"code", [0.25]))),
        drawn(origin=replace(origin, problem=problem_digest(b"kode", [0.5]))),
        drawn(start=new_start()),
    ]
    assert drawn() == found[0]
    assert len(set(map(tuple, found))) == len(found)


class Killed(Exception):
    pass


@pytest.mark.long
def test_a_record_that_is_corrected_after_a_kill_is_refused_by_name(tmp_path, monkeypatch):
    """With equal noise on old and corrected data, the difference of two messages reveals the correction."""
    config = made(tmp_path, checkpoint_every=10, patience=5)
    sent = threading.Event()

    def save(store, facts, save=Checkpoint.save):
        save(store, facts)
        if facts["step"] >= 0 and threading.current_thread().name == "victim":
            sent.set()
            raise Killed

    monkeypatch.setattr(Checkpoint, "save", save)

    def party(client):
        threading.current_thread().name = ("other", "victim")[client]
        with pytest.raises((Killed, HyperpushError)):
            run_peer(config, NAMES[client], say=quiet)

    together(2, party)
    assert sent.is_set()
    victim = NAMES[1]
    folder = tmp_path / victim
    assert (folder / "checkpoint.safetensors").stat().st_mode & 0o777 == 0o600
    task = own_spec(config, victim, tmp_path).task
    arrays: dict[str, Any] = {
        f"{name}/{place}": np.array(leaf)
        for name, each in task._sets.items()
        for place, leaf in enumerate(jax.tree.leaves(each.of(1)))
    }
    arrays["train/0"][0] += 0.1
    np.savez(tmp_path / "corrected.npz", **arrays)
    peers = {**config.peers, victim: replace(config.peers[victim], data=str(tmp_path / "corrected.npz"))}
    corrected = replace(config, peers=peers)
    with pytest.raises(InvalidInput, match=r"checkpoint: got 'one that began with other data'.*the same data as in"):
        run_peer(corrected, victim, say=quiet)
    secret = (folder / "secret.key").read_bytes()
    (folder / "secret.key").write_bytes(bytes(32))
    with pytest.raises(InvalidInput, match="began with another secret"):
        run_peer(config, victim, say=quiet)
    (folder / "secret.key").unlink()
    with pytest.raises(InvalidInput, match=r"secret: got .*which is missing"):
        run_peer(config, victim, say=quiet)
    (folder / "secret.key").write_bytes(secret)
    before = json.loads((folder / "releases.json").read_text())
    assert len(before) == 1


def test_a_folder_is_of_one_process_at_a_time(tmp_path):
    config = made(tmp_path)
    folder = party_folder(tmp_path / NAMES[0])
    with (
        private_folder(folder.path, "out"),
        Lifecycle(folder).hold(),
        pytest.raises(InUse, match="another process works"),
    ):
        run_peer(config, NAMES[0], say=quiet)
    assert InUse.exit_code == 6
