"""Count the TLS handshakes that Zenoh refuses.

Zenoh says so in its log only, which goes to the standard output of the process. So this is for processes that host one
peer: the log goes through a pipe, refused handshakes are counted by reason, and all else is passed on. The reasons are
Zenoh's words: one that is not known counts as a bad handshake.
"""

import os
import sys
import threading

from hyperpush.engines.wire import Rejections

_REASONS = (
    ("no certificates", "no-certificate"),
    ("certificate expired", "expired-certificate"),
    ("not valid yet", "expired-certificate"),
    ("invalid peer certificate", "foreign-certificate"),
)
BAD = "bad-handshake"


def reason(line: str) -> str | None:
    """Why a handshake was refused, if that is what a line of Zenoh's log says."""
    if "zenoh_link_tls" not in line or "WARN" not in line:
        return None
    return next((name for words, name in _REASONS if words in line), BAD)


def count_handshakes() -> Rejections:
    """Start Zenoh's log and count what it refuses from now on, for the rest of the process."""
    import zenoh

    counts = Rejections()
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
                    counts.add(found)

    threading.Thread(target=watch, name="handshakes", daemon=True).start()
    os.environ.pop("RUST_LOG", None)  # it would win over what is asked for here
    zenoh.init_log_from_env_or("off,zenoh_link_tls=warn")
    return counts
