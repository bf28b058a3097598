"""One of two processes: the second one dies, and the first one exits right after it. No heavy library is imported."""

import os
import signal
import sys
import time
from pathlib import Path


def dies() -> None:
    sign, how, index = Path(sys.argv[1]), sys.argv[2], sys.argv[-1]
    if index == "1":
        sign.touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    while not sign.exists():
        time.sleep(0.001)
    time.sleep(0.02)
    os._exit(2 if how == "killed" else 1)
