"""A private certificate authority and certificates that name a peer, for trials.

Whoever holds `ca.key` decides who takes part: keep it away from the peers. With an authority of your own, issue
certificates whose common name is the peer's name and whose alternative names hold the address that it listens on.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from hyperpush.errors import InvalidInput

DAYS = 365
# Names become parts of key expressions, where /, *, $, ? and # mean something, and of file names.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class Issued(NamedTuple):
    """The files of one certificate."""

    certificate: Path
    key: Path


def check_name(field: str, name: str) -> str:
    """A name that can stand in certificates, keys and file names."""
    if not NAME.fullmatch(name):
        raise InvalidInput(field, name, "1 to 32 of a-z, 0-9, - and _, a letter or digit first")
    return name


def authority(folder: Path, days: int = DAYS, name: str = "hyperpush trial authority") -> Issued:
    """A new private authority: `ca.pem`, which everybody may have, and `ca.key`, which nobody else may."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(name)
    built = (
        _started(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    return _written(folder, "ca", built.sign(key, _hash()), key)


def certificate(folder: Path, name: str, hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: int = DAYS) -> Issued:
    """A certificate for the peer `name`, which listens on `hosts`, signed by the authority in `folder`.

    A number of `days` that is not positive makes one that has expired.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    check_name("names", name)
    signer, signing_key = _load(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    built = (
        _started(_subject(name), signer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
    )
    return _written(folder, name, built.sign(signing_key, _hash()), key)


def make(folder: Path, names: Iterable[str], hosts: Sequence[str], days: int = DAYS) -> list[Issued]:
    """An authority in `folder`, unless there is one, and a certificate for each of `names`; nothing is overwritten."""
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
        authority(folder, days)
    return [certificate(folder, name, hosts, days) for name in names]


def common_name(path: Path, field: str = "certificate") -> str:
    """The name in a certificate's subject."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
        return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise InvalidInput(field, str(path), f"a PEM certificate with a common name ({error})") from None


def _subject(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise InvalidInput("hosts", host, "an IP address or a host name")
    return x509.DNSName(host)


def _started(subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    from cryptography import x509

    # A day of slack for clocks that disagree.
    end = datetime.now(UTC) + timedelta(days=days) - timedelta(seconds=0 if days > 0 else 60)
    start = min(datetime.now(UTC), end) - timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _usage(signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _hash() -> Any:
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def _load(folder: Path) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        signer = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        return signer, load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput("folder", str(folder), f"a folder with ca.pem and ca.key ({error})") from None


def _written(folder: Path, name: str, made: Any, key: Any) -> Issued:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    files = Issued(folder / f"{name}.pem", folder / f"{name}.key")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.key.touch(mode=0o600)
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        files.certificate.write_bytes(made.public_bytes(Encoding.PEM))
    except OSError as error:
        raise InvalidInput("folder", str(folder), f"a folder that can be written ({error.strerror})") from None
    return files
