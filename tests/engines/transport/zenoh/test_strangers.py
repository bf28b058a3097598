"""Connections without a certificate, or with a wrong one, reach no peer and are counted."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zenoh
from engines.peer.impostor import Impostor
from engines.peer.parties import identity

from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy import certificates
from hyperpush.engines.transport.zenoh import session

pytestmark = pytest.mark.long  # a process under attack, which later tests find as earlier ones left it
PATIENCE = 60


class Alice:
    """The peer under attack, in a separate process."""

    def __init__(self, folder):
        self.port = free_ports(1)[0]
        script = Path(__file__).with_name("guarded.py")
        command = [sys.executable, str(script), str(folder), str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def read(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self):
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.read())


@pytest.fixture(scope="module")
def trust(tmp_path_factory):
    folder, foreign = tmp_path_factory.mktemp("certificates"), tmp_path_factory.mktemp("foreign")
    certificates.make(folder, ["alice", "bob", "carol", "mallory"], ["127.0.0.1"])
    certificates.make_certificate(folder, "expired", days=0)
    certificates.make_authority(foreign)
    certificates.make_certificate(foreign, "bob")
    return folder, foreign


@pytest.fixture(scope="module")
def alice(trust):
    peer = Alice(trust[0])
    yield peer
    try:
        peer.process.communicate(timeout=20)
    finally:
        peer.process.kill()


def attack(port, who, name="bob", change=None, sender="bob", hello=False):
    """Dial alice with a custom client without access control, and write to her as `sender`."""
    there = session.Address("127.0.0.1", port)
    with Impostor("test", name, "alice", there, who, 3, sender, change) as stranger:
        time.sleep(0.5)
        stranger.digest = bytes(8)
        if hello:
            stranger.hello()
        stranger.send(1, f"from {name}".encode())
        stranger.put("control", b"rubbish")
        stranger.live()
        time.sleep(0.3)


def without_certificate(tls):
    for side in ("listen", "connect"):
        del tls[f"{side}_certificate"], tls[f"{side}_private_key"]
    tls["enable_mtls"] = False


def test_strangers_reach_nothing_and_are_counted(alice, trust):
    folder, foreign = trust

    def counted(*args, **options):
        before = alice.ask()["counts"]
        attack(alice.port, *args, **options)
        until = time.monotonic() + PATIENCE
        while (after := alice.ask())["counts"] == before and time.monotonic() < until:
            time.sleep(0.1)
        assert (after["mail"], after["bytes"], after["alive"]) == ([], {"bob": 0, "carol": 0}, [])
        return {name for name, count in after["counts"].items() if count > before.get(name, 0)}

    assert counted(None) == {"bad-handshake"}  # no TLS
    assert counted(identity(folder, "bob"), change=without_certificate) == {"no-certificate"}

    def swap(tls):  # bob's name signed by another authority; the client itself still trusts alice's authority
        for side in ("listen", "connect"):
            tls[f"{side}_certificate"] = str(foreign / "bob.pem")
            tls[f"{side}_private_key"] = str(foreign / "bob.key")

    assert counted(identity(folder, "bob"), change=swap) == {"foreign-certificate"}
    assert counted(identity(folder, "expired"), name="expired") == {"expired-certificate"}
    # signed by the right authority, but the name is no member
    assert counted(identity(folder, "mallory"), name="mallory") == {"stranger"}

    # The same client with bob's own certificate is accepted, so the refusals concerned the identity, not the content.
    attack(alice.port, identity(folder, "bob"), hello=True)
    after = alice.ask()
    assert after["mail"] == [["bob", "from bob"]]
    assert after["bytes"] == {"bob": len("from bob"), "carol": 0}
    assert after["counts"]["bad-control"] == 1


def test_a_peer_writes_under_its_own_name_only(trust, alice):
    before = alice.ask()["bytes"]
    attack(alice.port, identity(trust[0], "mallory"), name="mallory", sender="bob")
    attack(alice.port, identity(trust[0], "bob"), sender="mallory")
    after = alice.ask()
    assert (after["mail"], after["bytes"]) == ([], before)


def test_a_neighbor_cannot_write_as_another_neighbor(trust, alice):
    """Carol has her own link to alice; alice drops everything that carol sends on it in bob's name."""
    before = alice.ask()
    attack(alice.port, identity(trust[0], "carol"), name="carol", sender="bob")
    attack(alice.port, identity(trust[0], "bob"), name="bob", sender="carol")
    after = alice.ask()
    assert (after["mail"], after["bytes"], after["alive"]) == ([], before["bytes"], [])
    # Bob has said hello before, so messages of another session on a link with his certificate are noticed.
    assert after["counts"] == {
        **before["counts"],
        "others-certificate": 1 + before["counts"].get("others-certificate", 0),
    }
    attack(alice.port, identity(trust[0], "carol"), name="carol", sender="carol", hello=True)
    after = alice.ask()
    assert after["mail"] == [["carol", "from carol"]]
    assert after["bytes"] == {**before["bytes"], "carol": before["bytes"]["carol"] + len("from carol")}


def test_nobody_reads_what_is_for_another(tmp_path):
    certificates.make(tmp_path, ["alice", "bob", "carol"], ["127.0.0.1"])
    there = session.Address("127.0.0.1", free_ports(1)[0])
    links = {"bob": None, "carol": None}
    heard = {"bob": [], "carol": []}
    with session.open_session(session.settings("test", "alice", there, links, identity(tmp_path, "alice"))) as alice:
        spies = []
        for name in heard:
            made = session.settings("test", name, None, {"alice": there}, identity(tmp_path, name))
            made.pop("access_control")
            spy = session.open_session(made)
            everything = spy.declare_subscriber("hyperpush/**", lambda sample, n=name: heard[n].append(1))
            own = spy.declare_subscriber(
                session.message_key("test", "alice", name, "data"), lambda sample, n=name: heard[n].append(2)
            )
            spies.append((spy, everything, own))
        publisher = alice.declare_publisher(session.message_key("test", "alice", "bob", "data"))
        until = time.monotonic() + PATIENCE
        while not heard["bob"] and time.monotonic() < until:
            publisher.put(b"for bob")
            time.sleep(0.05)
        time.sleep(0.2)
        for spy, *_ in spies:
            spy.close()
    assert 2 in heard["bob"]
    assert heard["carol"] == []


def test_a_certificate_of_another_name_is_refused_at_home(trust):
    there = session.Address("127.0.0.1", 7800)
    with pytest.raises(session.InvalidInput, match=r"certificate: got 'one for mallory'.*common name is bob"):
        session.settings("test", "bob", there, {"alice": None}, identity(trust[0], "mallory"))


def test_without_certificates_peers_stay_on_loopback():
    near, far = session.Address("127.0.0.1", 7800), session.Address("192.0.2.1", 7800)
    assert "tls" not in session.settings("test", "bob", near, {"alice": None}, None)["transport"]["link"]
    for listen, links in ((far, {"alice": None}), (near, {"alice": far})):
        with pytest.raises(session.InvalidInput, match=r"certificate.*192\.0\.2\.1.*loopback"):
            session.settings("test", "bob", listen, links, None)


def test_nothing_is_searched_shared_or_forwarded():
    made = session.settings("test", "bob", session.Address("127.0.0.1", 7800), {"alice": None}, None)
    read = json.loads(str(zenoh.Config.from_json5(json.dumps(made))))
    assert read["mode"] == "peer"
    assert read["scouting"]["multicast"]["enabled"] is False
    assert read["scouting"]["gossip"]["enabled"] is False
    assert read["transport"]["shared_memory"]["enabled"] is False
