"""A Zenoh session of one peer: links to its neighbours and nothing else.

Keys are `hyperpush/<run>/<sender>/<receiver>/<channel>` for messages and `hyperpush/<run>/<name>/alive` for liveliness.
Nobody is searched for, nothing is forwarded, and no memory is shared. With certificates, links are mutual TLS and every
message that comes in or goes out is checked against the common name of the certificate at the other end of its link: a
peer can write under its own name only, and read only what is addressed to it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.peers.certificates import check_name, common_name

CHANNELS = ("data", "control", "pace")
PART_BYTES = 4 << 20  # of one Zenoh message: longer payloads come in parts


@dataclass(frozen=True)
class Identity:
    """Where a peer's certificate, its private key and the authority that it trusts are."""

    authority: Path
    certificate: Path
    key: Path

    def checked(self, name: str) -> "Identity":
        """Refuse files that cannot be read, and a certificate that names somebody else."""
        for field, path in (("authority", self.authority), ("certificate", self.certificate), ("key", self.key)):
            if not path.is_file():
                raise InvalidInput(field, str(path), "a PEM file")
        if (named := common_name(self.certificate)) != name:
            raise InvalidInput("certificate", f"one for {named}", f"one whose common name is {name}")
        return self

    def valid(self, name: str) -> "Identity":
        """Refuse also a certificate that nobody would accept, and a key that is not its own."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        self.checked(name)
        try:
            own, authority = (
                x509.load_pem_x509_certificate(path.read_bytes()) for path in (self.certificate, self.authority)
            )
            key = load_pem_private_key(self.key.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                "certificate", str(self.certificate), f"PEM files without a password ({error})"
            ) from None
        now = datetime.now(UTC)
        if not own.not_valid_before_utc <= now <= own.not_valid_after_utc:
            given = f"one from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M}"
            raise InvalidInput("certificate", given, f"one that is valid now, {now:%Y-%m-%d %H:%M}, UTC")
        try:
            own.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise InvalidInput("certificate", str(self.certificate), f"one issued by {self.authority}") from None
        if own.public_key() != key.public_key():
            raise InvalidInput("key", str(self.key), f"the private key of {self.certificate}")
        return self


@dataclass(frozen=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @staticmethod
    def parse(field: str, text: str) -> "Address":
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(c in host for c in "/?#;= ") or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput(field, text, "host:port, such as 127.0.0.1:7800")
        return Address(host, int(port))

    @property
    def loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def endpoint(self, secure: bool) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if secure else 'tcp'}/{host}:{self.port}"


def settings(
    run: str,
    name: str,
    listen: Address | None,
    neighbours: Mapping[str, Address | None],
    identity: Identity | None,
) -> dict[str, Any]:
    """The configuration of the session of `name`, who dials the neighbours that have an address."""
    check_name("run", run)
    for each in (name, *neighbours):
        check_name("name", each)
    addresses = [address for address in (listen, *neighbours.values()) if address is not None]
    far = [address for address in addresses if not address.loopback]
    if identity is None and far:
        raise InvalidInput(
            "certificate", None, f"a certificate, to talk to {far[0].host}: without one peers stay on loopback"
        )
    secure = identity is not None
    made: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": [] if listen is None else [listen.endpoint(secure)], "exit_on_failure": True},
        "connect": {
            "endpoints": [each.endpoint(secure) for each in neighbours.values() if each is not None],
            "exit_on_failure": False,
            "timeout_ms": -1,  # dial again for ever, in the background
            "retry": {"period_init_ms": 100, "period_max_ms": 1000, "period_increase_factor": 2},
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "timestamping": {"enabled": False},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": {"max_sessions": 4 * len(neighbours) + 4, "accept_pending": 4 * len(neighbours) + 4},
            "link": {
                "protocols": ["tls" if secure else "tcp"],
                # Room for one part and its headers: a stranger cannot make us hold more.
                "rx": {"max_message_size": PART_BYTES + 4096},
            },
        },
    }
    if identity is not None:
        identity.checked(name)
        made["transport"]["link"]["tls"] = {
            "root_ca_certificate": str(identity.authority),
            "listen_certificate": str(identity.certificate),
            "listen_private_key": str(identity.key),
            "connect_certificate": str(identity.certificate),
            "connect_private_key": str(identity.key),
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
        }
        made["access_control"] = _access(run, name, list(neighbours))
    return made


def message_key(run: str, sender: str, receiver: str, channel: str) -> str:
    return f"hyperpush/{run}/{sender}/{receiver}/{channel}"


def alive_key(run: str, name: str) -> str:
    return f"hyperpush/{run}/{name}/alive"


def _access(run: str, name: str, neighbours: list[str]) -> dict[str, Any]:
    """Allow, by the common name at the other end: what it sends to us under its name, what we send to it."""
    rules: list[dict[str, Any]] = []
    subjects: list[dict[str, Any]] = []
    policies: list[dict[str, Any]] = []

    def allow(rule: str, flow: str, messages: list[str], keys: list[str]) -> str:
        rules.append({"id": rule, "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": keys})
        return rule

    for other in neighbours:
        from_them = [message_key(run, other, name, channel) for channel in CHANNELS]
        to_them = [message_key(run, name, other, channel) for channel in CHANNELS]
        theirs, mine = alive_key(run, other), alive_key(run, name)
        subjects.append({"id": other, "cert_common_names": [other]})
        policies.append(
            {
                "subjects": [other],
                "rules": [
                    allow(f"{other} writes to us", "ingress", ["put"], from_them),
                    allow(f"we write to {other}", "egress", ["put"], to_them),
                    allow(f"we hear {other}", "egress", ["declare_subscriber"], from_them),
                    allow(f"{other} hears us", "ingress", ["declare_subscriber"], to_them),
                    allow(f"{other} lives", "ingress", ["liveliness_token"], [theirs]),
                    allow(f"we live for {other}", "egress", ["liveliness_token"], [mine]),
                    allow(f"we watch {other}", "egress", ["declare_liveliness_subscriber"], [theirs]),
                    allow(f"{other} watches us", "ingress", ["declare_liveliness_subscriber"], [mine]),
                ],
            }
        )
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


def opened(configuration: Mapping[str, Any]) -> Any:
    """A Zenoh session; what is wrong with it is one error."""
    import zenoh

    try:
        return zenoh.open(zenoh.Config.from_json5(json.dumps(configuration)))
    except zenoh.ZError as error:
        where = ", ".join(configuration["listen"]["endpoints"]) or "no address"
        raise HyperpushError(f"the network cannot be opened on {where}: {str(error).splitlines()[0]}") from None
