"""A peer in a process of its own that says, when asked, what has reached it: `python guarded.py FOLDER PORT`."""

import json
import sys
import time
from pathlib import Path

from hyperpush.deploy.handshakes import count_handshakes
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.transport import Zenoh

folder, port = Path(sys.argv[1]), int(sys.argv[2])
handshakes = count_handshakes()
transport = Zenoh(
    "test",
    ["alice", "bob", "carol"],
    0,
    {"bob": None, "carol": None},
    listen=Address("127.0.0.1", port),
    identity=Identity(folder / "ca.pem", folder / "alice.pem", folder / "alice.key"),
    mode="asynchronous",
    digest=bytes(32),
)
print("ready", flush=True)
for _ in sys.stdin:
    time.sleep(0.2)
    counts = {**handshakes, **transport.rejections}
    mail = [(transport.names[sender], bytes(payload).decode()) for sender, payload in transport.collect(1 << 40, [])]
    seen = transport.status()
    received = {name: link["received_bytes"] for name, link in seen.items()}
    alive = [name for name, link in seen.items() if link["alive"]]
    print(json.dumps({"counts": counts, "mail": mail, "bytes": received, "alive": alive}), flush=True)
transport.close()
