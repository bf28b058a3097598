"""Real faults of processes with mutual TLS: stops, an expired certificate, and a member's flood of messages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from deploy.commands import Parties
from deploy.test_floods import NAMES, compare, training
from engines.peer.impostor import Impostor
from engines.peer.parties import identity

from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy import certificates
from hyperpush.engines.transport.zenoh import session
from hyperpush.engines.transport.zenoh.links import ROOM, WINDOW
from hyperpush.engines.transport.zenoh.parts import OPEN, PART_BYTES, Stamp, split

MODES = ["synchronous", "asynchronous"]


@pytest.mark.faults
def test_two_are_killed_and_one_is_stopped_in_step_and_the_result_is_the_simulators(tmp_path):
    """Two parties are killed at once; a third is stopped for longer than all parties need to start."""
    parties = Parties(tmp_path, NAMES, training(600), patience=120.0)
    try:
        for name in NAMES:
            parties.start(name)
        parties.wait_for("alice", 30)
        for name in ("bob", "carol"):
            parties.running[name].kill()
            parties.running[name].communicate()
        parties.running["alice"].send_signal(signal.SIGSTOP)
        for name in ("bob", "carol"):
            parties.start(name)
        time.sleep(5)
        parties.running["alice"].send_signal(signal.SIGCONT)
        codes, said = parties.end()
    finally:
        parties.kill()
    assert codes == dict.fromkeys(NAMES, 0), said
    assert "continues from step" in said["bob"]
    assert "continues from step" in said["carol"]
    compare(parties)


@pytest.mark.faults
def test_at_its_own_pace_a_party_that_was_stopped_changes_little(tmp_path):
    parties = Parties(tmp_path, NAMES, training(400), mode="asynchronous", patience=120.0, close_after=60.0)
    try:
        for name in NAMES:
            parties.start(name)
        parties.wait_for("bob", 60)
        parties.running["bob"].send_signal(signal.SIGSTOP)
        time.sleep(5)
        parties.running["bob"].send_signal(signal.SIGCONT)
        codes, said = parties.end()
    finally:
        parties.kill()
    assert codes == dict.fromkeys(NAMES, 0), said
    assert not any("isolated" in line or "growing" in line for line in said.values()), said
    compare(parties, atol=0.1)  # rounds in another order give another bias of the constant step


@pytest.mark.faults
@pytest.mark.parametrize("mode", MODES)
def test_a_certificate_that_ends_in_the_run_is_the_reason_in_words(mode, tmp_path):
    """Bob's certificate expires 45 s after it was made, before the run can end."""
    names = NAMES[:2]
    parties = Parties(tmp_path, names, training(100_000), mode=mode, patience=5.0, close_after=5.0)
    for file in (tmp_path / "keys").glob("bob.*"):
        file.unlink()
    certificates.make_certificate(tmp_path / "keys", "bob", ["127.0.0.1"], days=45 / 86400)
    try:
        for name in names:
            parties.start(name)
        if mode == "asynchronous":  # alice continues alone
            parties.running["bob"].wait(200)
            until = time.monotonic() + 60
            while parties.status("alice").get("closed_out") != ["bob"] and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1)
            parties.running["alice"].kill()
        codes, said = parties.end(200)
    finally:
        parties.kill()
    assert "alice: warning: bob's certificate ends at " in said["alice"], said
    if mode == "synchronous":
        assert codes == {"alice": 4, "bob": 4}, said
        assert "bob's certificate ended at " in said["alice"].splitlines()[-1]
        assert "bob's certificate ended at " in said["bob"].splitlines()[-1]
    else:
        assert "lost: bob" in said["alice"], said
        assert "removed: bob, by alice" in said["alice"], said
        assert codes["bob"] == 4, said
        assert "bob's certificate ended at " in said["bob"].splitlines()[-1]


def memory(process):
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["far rounds", "near rounds", "incomplete"])
def test_a_member_that_floods_with_messages_fills_a_bounded_memory(kind, tmp_path):
    """A member sends 100 messages of 8 MB, none of which is due; only a few of the longest message are kept."""
    certificates.make(tmp_path, ["alice", "bob", "carol"], ["127.0.0.1"])
    port, size = free_ports(1)[0], 2 * PART_BYTES
    script = Path(__file__).parents[1] / "engines/transport/zenoh/guarded.py"
    command = [sys.executable, str(script), str(tmp_path), str(port), "synchronous", str(size)]
    alice = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert alice.stdout is not None
    assert alice.stdin is not None
    try:
        assert alice.stdout.readline().strip() == "ready"
        there = session.Address("127.0.0.1", port)
        with Impostor("test", "bob", "alice", there, identity(tmp_path, "bob"), 3) as bob:
            bob.hello()
            before = memory(alice)
            for number in range(100):
                step = number + (10_000 if kind == "far rounds" else 0)
                stamp, payload = Stamp(bob.digest, bob.incarnation), np.zeros(size, np.uint8).tobytes()
                for header, part in list(split(number, step, payload, stamp))[: 1 if kind == "incomplete" else 2]:
                    bob.put("data", bytes(part), header)
            time.sleep(3)
            grown = memory(alice) - before
        alice.stdin.write("\n")
        alice.stdin.flush()
        said = alice.stdout.readline()
    finally:
        alice.kill()
        alice.wait()
    assert ("incomplete" if kind == "incomplete" else "overflow") in said
    # Limit: waiting and incomplete messages, and as much again for the network's own buffers.
    assert grown < 2 * (ROOM + OPEN + WINDOW // 4) * size, grown
