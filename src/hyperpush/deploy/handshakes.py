"""Count the TLS handshakes that Zenoh refuses, by reading Zenoh's log.

Zenoh reports a refused handshake only in its log. Its Python package (1.10) offers no callback for the log, and writes
it to file descriptor 1. So, in a process that hosts one party, this module replaces that descriptor by a pipe. Lines
about refused handshakes are counted by reason. All other lines are passed on to the descriptor's former target. The
reason is found by Zenoh's wording; an unknown wording counts as a bad handshake.
"""

import os
import sys
import threading
from collections import Counter
from functools import cache

from hyperpush.base.checks import require

zenoh = require("zenoh", "peers")

_REASONS = (
    ("no certificates", "no-certificate"),
    ("certificate expired", "expired-certificate"),
    ("not valid yet", "expired-certificate"),
    ("invalid peer certificate", "foreign-certificate"),
)
BAD = "bad-handshake"


def reason(line: str) -> str | None:
    """Return the reason for a refused handshake; None if a line of Zenoh's log is about something else."""
    if "zenoh_link_tls" not in line or "WARN" not in line:
        return None
    return next((name for words, name in _REASONS if words in line), BAD)


@cache  # once per process
def count_handshakes() -> Counter[str]:
    """Start Zenoh's log and count refused handshakes from now on, for the rest of the process."""
    counts = Counter[str]()
    sys.stdout.flush()
    real = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    sys.stdout = os.fdopen(os.dup(real), "w", encoding="utf-8", buffering=1)

    def watch() -> None:
        with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                found = reason(line)
                if found is None:
                    os.write(real, line.encode())
                else:
                    counts[found] += 1

    threading.Thread(target=watch, name="handshakes", daemon=True).start()
    os.environ.pop("RUST_LOG", None)  # it would take precedence over the filter below
    zenoh.init_log_from_env_or("off,zenoh_link_tls=warn")
    return counts
