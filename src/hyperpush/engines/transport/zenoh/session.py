"""A Zenoh session of one peer: links to its neighbors and nothing else.

Keys are `hyperpush/<run>/<sender>/<receiver>/<channel>` for messages and `hyperpush/<run>/<name>/alive` for liveliness.
Nobody is searched for, nothing is forwarded, and no memory is shared. With certificates, links are mutual TLS and every
message that comes in or goes out is checked against the common name of the certificate at the other end of its link: a
peer can write under its own name only, and read only what is addressed to it.
"""

import json
import re
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hyperpush.base.checks import require
from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.engines.transport.zenoh.addresses import Address, check_name
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.parts import PART_BYTES

zenoh = require("zenoh", "peers")

CHANNELS = ("data", "control", "pace")
# Milliseconds for a TLS handshake: two round trips around the world and a busy machine. Until then a stranger that says
# nothing holds a socket. Zenoh's own limit is 10 s.
HANDSHAKE = 2000


def settings(
    run: str,
    name: str,
    listen: Address | None,
    neighbors: Mapping[str, Address | None],
    identity: Identity | None,
) -> dict[str, Any]:
    """The configuration of the session of `name`, which dials the neighbors that have an address."""
    check_name("run", run)
    for each in (name, *neighbors):
        check_name("name", each)
    addresses = [address for address in (listen, *neighbors.values()) if address is not None]
    far = [address for address in addresses if not address.loopback]
    if identity is None and far:
        raise InvalidInput(
            "certificate", None, f"a certificate, to talk to {far[0].host}: without one peers stay on loopback"
        )
    secure = identity is not None
    made: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": [] if listen is None else [_listening(listen, secure)], "exit_on_failure": True},
        "connect": {
            "endpoints": [each.endpoint(secure) for each in neighbors.values() if each is not None],
            "exit_on_failure": False,
            "timeout_ms": -1,  # dial again for ever, in the background
            "retry": {"period_init_ms": 100, "period_max_ms": 1000, "period_increase_factor": 2},
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "timestamping": {"enabled": False},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": {"max_sessions": 4 * len(neighbors) + 4, "accept_pending": 4 * len(neighbors) + 4},
            "link": {
                "protocols": ["tls" if secure else "tcp"],
                # Room for one part and its headers: a stranger cannot make us hold more.
                "rx": {"max_message_size": PART_BYTES + 4096},
            },
        },
    }
    if identity is not None:
        identity.check_name(name)
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
        made["access_control"] = _access(run, name, list(neighbors))
    return made


def _listening(address: Address, secure: bool) -> str:
    """An endpoint to listen on, which gives up on a handshake that takes too long."""
    return address.endpoint(secure) + (f"#tls_handshake_timeout_ms={HANDSHAKE}" if secure else "")


def message_key(run: str, sender: str, receiver: str, channel: str) -> str:
    return f"hyperpush/{run}/{sender}/{receiver}/{channel}"


def alive_key(run: str, name: str) -> str:
    return f"hyperpush/{run}/{name}/alive"


def _access(run: str, name: str, neighbors: list[str]) -> dict[str, Any]:
    """Allow, by the common name at the other end: what it sends to us under its name, what we send to it."""
    rules: list[dict[str, Any]] = []
    policies: list[dict[str, Any]] = []
    for other in neighbors:
        from_them = [message_key(run, other, name, channel) for channel in CHANNELS]
        to_them = [message_key(run, name, other, channel) for channel in CHANNELS]
        theirs, mine = [alive_key(run, other)], [alive_key(run, name)]
        allowed = (
            ("ingress", "put", from_them),  # it writes to us
            ("egress", "put", to_them),  # we write to it
            ("egress", "declare_subscriber", from_them),  # we hear it
            ("ingress", "declare_subscriber", to_them),  # it hears us
            ("ingress", "liveliness_token", theirs),  # it lives
            ("egress", "liveliness_token", mine),  # we live
            ("egress", "declare_liveliness_subscriber", theirs),  # we watch it
            ("ingress", "declare_liveliness_subscriber", mine),  # it watches us
        )
        ids = [f"{other} {flow} {message}" for flow, message, _ in allowed]
        for rule, (flow, message, keys) in zip(ids, allowed, strict=True):
            rules.append({"id": rule, "permission": "allow", "flows": [flow], "messages": [message], "key_exprs": keys})
        policies.append({"subjects": [other], "rules": ids})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": [{"id": other, "cert_common_names": [other]} for other in neighbors],
        "policies": policies,
    }


def number_of(zid: Any) -> bytes:
    """The number of a Zenoh session as 16 bytes."""
    return int(str(zid), 16).to_bytes(16, "big")


def session_number(session: Any) -> bytes:
    """The number of this process's own session."""
    return number_of(session.info.zid())


def raise_file_limit() -> None:
    """Let this process have as many files and sockets open as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS calls its limit infinite, and takes less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_session(configuration: Mapping[str, Any]) -> Any:
    """Open a Zenoh session; a failure is one error."""
    raise_file_limit()
    try:
        return zenoh.open(zenoh.Config.from_json5(json.dumps(configuration)))
    except zenoh.ZError as error:
        where = ", ".join(configuration["listen"]["endpoints"]) or "no address"
        said = re.sub(r" at /\S+", "", str(error).splitlines()[0]).rstrip(".")  # places in Zenoh's sources
        raise HyperpushError(f"the network cannot be opened on {where}: {said}") from None
