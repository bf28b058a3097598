"""The certificate of a peer, and checks that other peers will accept it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hyperpush.base.checks import require
from hyperpush.base.errors import InvalidInput

x509 = require("cryptography.x509", "peers")
exceptions = require("cryptography.exceptions", "peers")
serialization = require("cryptography.hazmat.primitives.serialization", "peers")


@dataclass(frozen=True)
class Identity:
    """Files of a peer's certificate, its private key and the authority that it trusts."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def ends(self) -> int:
        """End of the certificate, in seconds since 1970."""
        own = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        return int(own.not_valid_after_utc.timestamp())

    def check_name(self, name: str) -> "Identity":
        """Raise InvalidInput if a file is missing or the certificate has another name than `name`."""
        for field, path in (("authority", self.authority), ("certificate", self.certificate), ("key", self.key)):
            if not path.is_file():
                raise InvalidInput(field, str(path), "a PEM file")
        if (named := common_name(self.certificate)) != name:
            raise InvalidInput("certificate", f"one for {named}", f"one whose common name is {name}")
        return self

    def check(self, name: str) -> "Identity":
        """Raise InvalidInput for a certificate that other peers would reject, or a private key of another one."""
        self.check_name(name)
        try:
            own, authority = (
                x509.load_pem_x509_certificate(path.read_bytes()) for path in (self.certificate, self.authority)
            )
            key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            allowed = f"PEM files without a password, which this user can read ({error})"
            raise InvalidInput("certificate", str(self.certificate), allowed) from None
        now = datetime.now(UTC)
        if not own.not_valid_before_utc <= now <= own.not_valid_after_utc:
            given = f"one from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M}"
            raise InvalidInput("certificate", given, f"one that is valid now, {now:%Y-%m-%d %H:%M}, UTC")
        try:
            own.verify_directly_issued_by(authority)
        except (ValueError, TypeError, exceptions.InvalidSignature):
            raise InvalidInput("certificate", str(self.certificate), f"one issued by {self.authority}") from None
        if own.public_key() != key.public_key():
            raise InvalidInput("key", str(self.key), f"the private key of {self.certificate}")
        return self


def common_name(path: Path, field: str = "certificate") -> str:
    """Return the common name in a certificate's subject."""
    try:
        subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
        return str(subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise InvalidInput(field, str(path), f"a PEM certificate with a common name ({error})") from None
