"""A private certificate authority and certificates that name a peer, for trials.

Keep `ca.key` secret and away from the peers: whoever holds it can admit new peers. You may also use another authority.
Then a certificate's common name must be the peer's name, and its alternative names must include the peer's address.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from hyperpush.base.checks import require
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.transport.zenoh.addresses import check_name

x509 = require("cryptography.x509", "peers")
ec = require("cryptography.hazmat.primitives.asymmetric.ec", "peers")
hashes = require("cryptography.hazmat.primitives.hashes", "peers")
serialization = require("cryptography.hazmat.primitives.serialization", "peers")

DAYS = 365
USES = ("digital_signature", "key_cert_sign", "crl_sign", "content_commitment", "key_encipherment")
USES += ("data_encipherment", "key_agreement", "encipher_only", "decipher_only")


class Issued(NamedTuple):
    """Paths of a new certificate and of its private key."""

    certificate: Path
    key: Path


def make_authority(folder: Path, days: int = DAYS, name: str = "hyperpush trial authority") -> Issued:
    """Make a new private authority: `ca.pem`, which all peers need, and `ca.key`, which must stay secret."""
    key = ec.generate_private_key(ec.SECP256R1())
    built = _start(_subject(name), _subject(name), key.public_key(), days, "key_cert_sign", "crl_sign").add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return _write(folder, "ca", built.sign(key, hashes.SHA256()), key)


def make_certificate(
    folder: Path, name: str, hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: float = DAYS
) -> Issued:
    """Make a certificate for the peer `name`, which listens on `hosts`, signed by the authority in `folder`.

    With `days` of 0 or less the certificate has already expired.
    """
    check_name("names", name)
    signer, signing_key = _load(folder)
    key, purposes = ec.generate_private_key(ec.SECP256R1()), x509.oid.ExtendedKeyUsageOID
    built = (
        _start(_subject(name), signer.subject, key.public_key(), days, "digital_signature")
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purposes.SERVER_AUTH, purposes.CLIENT_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
    )
    return _write(folder, name, built.sign(signing_key, hashes.SHA256()), key)


def make(folder: Path, names: Iterable[str], hosts: Sequence[str], days: int = DAYS) -> list[Issued]:
    """Make an authority in `folder`, unless it has one, and a certificate for each of `names`. Overwrite nothing."""
    names = [check_name("names", name) for name in names]
    if not names or len(set(names)) < len(names):
        raise InvalidInput("names", names, "one or more different names")
    if "ca" in names:
        raise InvalidInput("names", "ca", "another name: this is the authority's")
    if days < 1:
        raise InvalidInput("days", days, "1 or more")
    for host in hosts:
        _alternative(host)
    for name in names:
        if (folder / f"{name}.pem").exists() or (folder / f"{name}.key").exists():
            raise InvalidInput("names", name, f"a name without files in {folder}: nothing is overwritten")
    if not (folder / "ca.pem").exists():
        if (folder / "ca.key").exists():
            raise InvalidInput("folder", str(folder), "one with both ca.pem and ca.key, or neither")
        make_authority(folder, days)
    return [make_certificate(folder, name, hosts, days) for name in names]


def _subject(name: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> Any:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise InvalidInput("hosts", host, "an IP address or a host name")
    return x509.DNSName(host)


def _start(subject: Any, issuer: Any, public_key: Any, days: float, *uses: str) -> Any:
    """Start building a certificate: its subject, its issuer, its validity and the uses of its key."""
    # The certificate is valid from a day earlier, because clocks may disagree.
    end = datetime.now(UTC) + timedelta(days=days) - timedelta(seconds=0 if days > 0 else 60)
    start = min(datetime.now(UTC), end) - timedelta(days=1)
    return (
        x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.KeyUsage(**{use: use in uses for use in USES}), critical=True)
    )


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        signer = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        return signer, serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput("folder", str(folder), f"a folder with ca.pem and ca.key ({error})") from None


def _write(folder: Path, name: str, certificate: Any, key: Any) -> Issued:
    files, form = Issued(folder / f"{name}.pem", folder / f"{name}.key"), serialization.Encoding.PEM
    secret = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.key.touch(mode=0o600)
        files.key.write_bytes(secret)
        files.certificate.write_bytes(certificate.public_bytes(form))
    except OSError as error:
        raise InvalidInput("folder", str(folder), f"a folder that can be written ({error.strerror})") from None
    return files
