"""Strangers without a certificate open thousands of connections: no run ends, and a killed party can reconnect."""

import numpy as np
import pytest
from deploy.commands import Flood, Parties
from safetensors.numpy import load_file

import hyperpush as hp
from hyperpush.deploy.options import read
from hyperpush.spec import objects

NAMES = ["alice", "bob", "carol"]
FILES = 1024


def training(steps):
    return {
        "task": {"name": "logistic", "seed": 0, "log_rates": True},
        "network": {"name": "fully-connected"},
        "method": {"name": "SGP", "steps": steps, "step_size": 0.5},
    }


def compare(parties, atol=1e-5):
    """The params of all parties against the simulator's."""
    config = read(parties.file)
    truth = objects.read(config.spec.tables()).run()
    assert isinstance(truth, hp.Training)
    found = [load_file(parties.base / n / "models" / "params" / f"{n}.safetensors")[""] for n in parties.names]
    assert np.abs(truth.params).max() > 0.1
    np.testing.assert_allclose(np.stack(found), truth.params, atol=atol)


@pytest.mark.faults
def test_two_thousand_connections_end_nobody_though_files_are_few(tmp_path):
    parties = Parties(tmp_path, NAMES, training(2000), patience=100.0)
    try:
        for name in NAMES:
            parties.start(name, files=FILES)
        parties.wait_for("alice", 5)
        with Flood(parties.ports["alice"], 2000) as flood:
            flood.wait()
            parties.wait_for("alice", parties.status("alice")["round"] + 100)
            codes, said = parties.end()
    finally:
        parties.kill()
    assert codes == dict.fromkeys(NAMES, 0), said
    assert flood.made == 2000
    compare(parties)


@pytest.mark.faults
def test_a_party_with_an_address_comes_back_past_the_queue_of_strangers(tmp_path):
    """Behind 2,400 handshakes that fail after 0.1 s each, the party would return too late."""
    parties = Parties(tmp_path, NAMES, training(2000), patience=60.0)
    try:
        for name in NAMES:
            parties.start(name)
        parties.wait_for("carol", 20)
        with Flood(parties.ports["alice"], 2400, rate=160.0) as flood:
            flood.wait_for(300)
            parties.running["carol"].kill()
            parties.running["carol"].communicate()
            parties.start("carol")
            codes, said = parties.end()
    finally:
        parties.kill()
    assert codes == dict.fromkeys(NAMES, 0), said
    assert "carol: continues from step" in said["carol"]
    assert "alice: lost: carol" in said["alice"]
    assert "alice: found: carol" in said["alice"]
    for name in NAMES[:2]:  # each sees one outage, which has ended
        link = parties.status(name)["links"]["carol"]
        assert link["outages"] == 1
        assert link["away"] > 0
        # run pytest with -s to print the row for docs/results/peers.md
        print(f"{name}: carol was away for {link['away']} s")
    compare(parties)


@pytest.mark.faults
def test_a_party_without_an_address_waits_behind_strangers_and_the_others_say_why(tmp_path):
    parties = Parties(tmp_path, NAMES[:2], training(20), addresses=["alice"], patience=15.0)
    try:
        alice = parties.start("alice")
        while not (tmp_path / "alice" / "status.json").exists():
            assert alice.poll() is None
        with Flood(parties.ports["alice"], 1200):
            parties.start("bob")
            codes, said = parties.end()
    finally:
        parties.kill()
    assert codes["alice"] == 4, said
    assert "no hello within 15 s from bob (absent): bob was never heard (handshakes refused here: " in said["alice"]
    assert "bad-handshake" in said["alice"]
