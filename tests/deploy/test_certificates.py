from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from hyperpush.base.errors import InvalidInput
from hyperpush.cli.app import main
from hyperpush.deploy.certificates import make, make_certificate
from hyperpush.engines.transport.zenoh.identity import common_name
from hyperpush.engines.transport.zenoh.session import Identity


def loaded(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_certificate_names_its_peer_and_address_and_is_signed_by_the_authority(tmp_path):
    made = make(tmp_path, ["alice", "bob"], ["192.0.2.7", "lab.example"], days=10)
    authority = loaded(tmp_path / "ca.pem")
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for name, files in zip(["alice", "bob"], made, strict=True):
        own = loaded(files.certificate)
        assert common_name(files.certificate) == name
        own.verify_directly_issued_by(authority)
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.IPAddress) == [ip_address("192.0.2.7")]
        assert names.get_values_for_type(x509.DNSName) == ["lab.example"]
        assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert timedelta(days=9) < own.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=10)
        key = load_pem_private_key(files.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key() == own.public_key()
        assert files.key.stat().st_mode & 0o077 == 0


def test_an_authority_is_used_again_and_nothing_is_overwritten(tmp_path):
    make(tmp_path, ["alice"], ["127.0.0.1"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make(tmp_path, ["carol"], ["127.0.0.1"])
    loaded(tmp_path / "carol.pem").verify_directly_issued_by(loaded(tmp_path / "ca.pem"))
    with pytest.raises(InvalidInput, match=r"names: got 'alice'.*nothing is overwritten"):
        make(tmp_path, ["dave", "alice"], ["127.0.0.1"])
    assert not (tmp_path / "dave.pem").exists()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_certificate_that_nobody_would_accept_is_refused_at_home(tmp_path):
    make(tmp_path / "ours", ["alice", "bob"], ["127.0.0.1"])
    make(tmp_path / "theirs", ["alice"], ["127.0.0.1"])
    make_certificate(tmp_path / "ours", "old", days=0)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    Identity(ours / "ca.pem", ours / "alice.pem", ours / "alice.key").check("alice")
    for name, files, says in (
        ("old", (ours / "ca.pem", ours / "old.pem", ours / "old.key"), "certificate: got .*valid now"),
        ("alice", (theirs / "ca.pem", ours / "alice.pem", ours / "alice.key"), "certificate: got .*issued by"),
        ("alice", (ours / "ca.pem", ours / "alice.pem", ours / "bob.key"), "key: got .*the private key of"),
        ("bob", (ours / "ca.pem", ours / "alice.pem", ours / "alice.key"), "certificate: got .*common name is bob"),
    ):
        with pytest.raises(InvalidInput, match=says):
            Identity(*files).check(name)
    (ours / "ca.pem").unlink()
    before = (ours / "ca.key").read_bytes()
    with pytest.raises(InvalidInput, match=r"both ca\.pem and ca\.key"):
        make(ours, ["carol"], ["127.0.0.1"])
    assert (ours / "ca.key").read_bytes() == before


def test_one_that_has_expired(tmp_path):
    make(tmp_path, ["alice"], ["127.0.0.1"])
    own = loaded(make_certificate(tmp_path, "old", days=0).certificate)
    assert own.not_valid_before_utc < own.not_valid_after_utc < datetime.now(UTC)


@pytest.mark.parametrize(
    ("names", "hosts", "days", "field"),
    [
        (["a/b"], ["127.0.0.1"], 1, "names"),
        (["*"], ["127.0.0.1"], 1, "names"),
        (["../x"], ["127.0.0.1"], 1, "names"),
        (["Alice"], ["127.0.0.1"], 1, "names"),
        (["alice", "alice"], ["127.0.0.1"], 1, "names"),
        ([], ["127.0.0.1"], 1, "names"),
        (["ca"], ["127.0.0.1"], 1, "names"),
        (["alice"], ["no host"], 1, "hosts"),
        (["alice"], ["127.0.0.1"], 0, "days"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(names, hosts, days, field, tmp_path):
    with pytest.raises(InvalidInput, match=f"^{field}: got"):
        make(tmp_path / "new", names, hosts, days)
    assert not (tmp_path / "new").exists()


def test_on_the_command_line(tmp_path, capsys):
    main_exit = pytest.raises(SystemExit)
    with main_exit as ended:
        main(["certificates", str(tmp_path), "alice", "bob", "--host", "192.0.2.1"])
    assert ended.value.code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("alice.key", "alice.pem", "bob.key", "bob.pem", "ca.key", "ca.pem")
    ]
    with pytest.raises(SystemExit) as ended:
        main(["certificates", str(tmp_path), "bad name"])
    assert ended.value.code == 2
    assert "names: got 'bad name'" in capsys.readouterr().err


def test_files_that_are_no_certificate(tmp_path):
    (tmp_path / "x.pem").write_text("nonsense")
    with pytest.raises(InvalidInput, match="certificate"):
        common_name(tmp_path / "x.pem")
    with pytest.raises(InvalidInput, match="certificate"):
        common_name(tmp_path / "absent.pem")
    with pytest.raises(InvalidInput, match=r"ca\.pem and ca\.key"):
        make_certificate(tmp_path, "alice")
