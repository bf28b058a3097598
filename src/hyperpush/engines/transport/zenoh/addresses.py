"""Parse and check names and addresses of peers."""

import re
from dataclasses import dataclass
from ipaddress import ip_address

from hyperpush.base.errors import InvalidInput

# Names become parts of key expressions (in which /, *, $, ? and # are special) and of file names.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def check_name(field: str, name: str) -> str:
    """Return `name` if it is valid in certificates, keys and file names; else raise InvalidInput."""
    if not NAME.fullmatch(name):
        raise InvalidInput(field, name, "1 to 32 of a-z, 0-9, - and _, a letter or digit first")
    return name


@dataclass(frozen=True)
class Address:
    """The network address of a peer: a host and a port."""

    host: str
    port: int

    @staticmethod
    def parse(field: str, text: str) -> "Address":
        """Return the address in a text of the form host:port; errors name `field`."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(c in host for c in "/?#;= ") or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput(field, text, "host:port, such as 127.0.0.1:7800")
        return Address(host, int(port))

    @property
    def loopback(self) -> bool:
        """True for an address of this machine only."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def endpoint(self, secure: bool) -> str:
        """Return the address in Zenoh's notation."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if secure else 'tcp'}/{host}:{self.port}"
