"""Configure and open the Zenoh session of a peer, which has links to its neighbors only.

Messages have keys `hyperpush/<run>/<sender>/<receiver>/<channel>`. The presence token of a peer has the key
`hyperpush/<run>/<name>/alive`. Discovery, forwarding and shared memory are off.

With certificates, links use mutual TLS. Every incoming or outgoing message is checked against the common name of the
certificate at the other end of its link. So a peer can write only under its own name, and read only messages that are
addressed to it.
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
# Limit for a TLS handshake in milliseconds, enough for two round trips around the world and a busy machine. A silent
# stranger can occupy a socket for that long. Zenoh's default is 10 s.
HANDSHAKE = 2000


def settings(
    run: str,
    name: str,
    listen: Address | None,
    neighbors: Mapping[str, Address | None],
    identity: Identity | None,
) -> dict[str, Any]:
    """Return the configuration of the session of `name`, which dials the neighbors that have an address."""
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
            "timeout_ms": -1,  # keep dialing forever, in the background
            "retry": {"period_init_ms": 100, "period_max_ms": 1000, "period_increase_factor": 2},
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "timestamping": {"enabled": False},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": {"max_sessions": 4 * len(neighbors) + 4, "accept_pending": 4 * len(neighbors) + 4},
            "link": {
                "protocols": ["tls" if secure else "tcp"],
                # Enough for one part and its headers; it bounds the memory that a stranger can occupy.
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
    """Return the endpoint to listen on in Zenoh's notation, with a time limit for handshakes."""
    return address.endpoint(secure) + (f"#tls_handshake_timeout_ms={HANDSHAKE}" if secure else "")


def message_key(run: str, sender: str, receiver: str, channel: str) -> str:
    return f"hyperpush/{run}/{sender}/{receiver}/{channel}"


def alive_key(run: str, name: str) -> str:
    return f"hyperpush/{run}/{name}/alive"


def _access(run: str, name: str, neighbors: list[str]) -> dict[str, Any]:
    """Return Zenoh's access control rules, which apply by the common name at the other end of a link.

    Each neighbor may send to this peer under its own name, and gets only messages addressed to it.
    """
    rules: list[dict[str, Any]] = []
    policies: list[dict[str, Any]] = []
    for other in neighbors:
        from_them = [message_key(run, other, name, channel) for channel in CHANNELS]
        to_them = [message_key(run, name, other, channel) for channel in CHANNELS]
        theirs, mine = [alive_key(run, other)], [alive_key(run, name)]
        allowed = (
            ("ingress", "put", from_them),  # the neighbor sends to this peer
            ("egress", "put", to_them),  # this peer sends to the neighbor
            ("egress", "declare_subscriber", from_them),  # this peer subscribes to the neighbor's messages
            ("ingress", "declare_subscriber", to_them),  # the neighbor subscribes to this peer's messages
            ("ingress", "liveliness_token", theirs),  # the neighbor shows its presence
            ("egress", "liveliness_token", mine),  # this peer shows its presence
            ("egress", "declare_liveliness_subscriber", theirs),  # this peer watches the neighbor's presence
            ("ingress", "declare_liveliness_subscriber", mine),  # the neighbor watches this peer's presence
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
    """Return the number of a Zenoh session as 16 bytes."""
    return int(str(zid), 16).to_bytes(16, "big")


def session_number(session: Any) -> bytes:
    """Return the number of this process's own session."""
    return number_of(session.info.zid())


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files and sockets to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS reports an infinite limit, but accepts less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_session(configuration: Mapping[str, Any]) -> Any:
    """Open a Zenoh session; raise HyperpushError if that fails."""
    raise_file_limit()
    try:
        return zenoh.open(zenoh.Config.from_json5(json.dumps(configuration)))
    except zenoh.ZError as error:
        where = ", ".join(configuration["listen"]["endpoints"]) or "no address"
        said = re.sub(r" at /\S+", "", str(error).splitlines()[0]).rstrip(".")  # remove positions in Zenoh's sources
        raise HyperpushError(f"the network cannot be opened on {where}: {said}") from None
