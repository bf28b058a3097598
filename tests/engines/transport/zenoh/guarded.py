"""A peer in a separate process that reports on request what has reached it.

`python guarded.py FOLDER PORT [MODE [LONGEST]]`
"""

import json
import sys
import time
from pathlib import Path

from hyperpush.deploy.handshakes import count_handshakes
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.engines.transport.zenoh.identity import Identity
from hyperpush.engines.transport.zenoh.transport import Zenoh

folder, port, mode, limit = Path(sys.argv[1]), int(sys.argv[2]), *[*sys.argv[3:], "asynchronous", str(1 << 20)][:2]
handshakes = count_handshakes()
transport = Zenoh(
    "test",
    ["alice", "bob", "carol"],
    0,
    {"bob": None, "carol": None},
    listen=Address("127.0.0.1", port),
    identity=Identity(folder / "ca.pem", folder / "alice.pem", folder / "alice.key"),
    mode=mode,  # pyright: ignore[reportArgumentType]
    limit=int(limit),
    digest=bytes(32),
)
print("ready", flush=True)
for _ in sys.stdin:
    time.sleep(0.2)
    counts = {**handshakes, **transport.rejections}
    mail = [
        (transport.names[sender], bytes(payload).decode())
        for sender, payload in transport.collect(1 << 40 if mode == "asynchronous" else 0, [])
    ]
    seen = transport.status()
    received = {name: link["received_bytes"] for name, link in seen.items()}
    alive = [name for name, link in seen.items() if link["alive"]]
    print(json.dumps({"counts": counts, "mail": mail, "bytes": received, "alive": alive}), flush=True)
transport.close()
