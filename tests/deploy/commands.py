"""Parties as processes of the command with mutual TLS on loopback, and strangers who flood them."""

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import tomli_w

from hyperpush.base.processes.starter import free_ports
from hyperpush.deploy import certificates
from hyperpush.deploy.watch import STATUS

PROGRAM = str(Path(sys.executable).with_name("hyperpush"))


class Parties:
    """The processes of a run, with its files in `base`."""

    def __init__(self, base, names, spec, addresses=None, **deploy):
        self.base, self.names, self.running = base, names, {}
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        certificates.make(base / "keys", names, ["127.0.0.1"])
        peers = {
            name: {"certificate": f"keys/{name}.pem", "private_key": f"keys/{name}.key"}
            | ({"address": f"127.0.0.1:{self.ports[name]}"} if name in (addresses or names) else {})
            for name in names
        }
        self.table = {**spec, "deploy": {"authority": "keys/ca.pem", **deploy}, "peers": peers}
        self.file = base / "run.toml"
        self.file.write_text(tomli_w.dumps(self.table))

    def start(self, name, files=0, file=None):
        """Start a party with at most `files` open files; 0 keeps the limit of this process."""

        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        command = [PROGRAM, "peer", str(file or self.file), "--name", name]
        options = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        self.running[name] = subprocess.Popen(command, preexec_fn=limit if files else None, **options)
        return self.running[name]

    def status(self, name):
        try:
            return json.loads((self.base / name / STATUS).read_text())
        except (OSError, ValueError):
            return {}

    def wait_for(self, name, round, seconds=240):
        """Wait until a party has reached a round."""
        until = time.monotonic() + seconds
        while self.status(name).get("round", 0) < round:
            assert time.monotonic() < until
            assert self.running[name].poll() is None, self.end()
            time.sleep(0.02)

    def end(self, seconds=400):
        """Return the exit codes and stderr texts of all parties once they have ended."""
        said = {name: process.communicate(timeout=seconds)[1] for name, process in self.running.items()}
        return {name: process.returncode for name, process in self.running.items()}, said

    def kill(self):
        for process in self.running.values():
            process.kill()
            process.wait()


class Flood:
    """Context that opens a bounded number of plain connections to a port and sends nothing on them."""

    def __init__(self, port, count, rate=1000.0):
        self.port, self.count, self.rate, self.made, self.open = port, count, rate, 0, []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, self.count + 512)), hard))
        self._thread.start()
        return self

    def _work(self):
        while self.made < self.count and not self._over.is_set():
            try:
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", self.port))
                self.open.append(one)
            except OSError:
                pass
            self.made += 1
            time.sleep(1 / self.rate)

    def wait(self):
        self._thread.join(60)

    def wait_for(self, count):
        while self.made < count:
            self._over.wait(0.05)

    def __exit__(self, *error):
        self._over.set()
        self._thread.join(10)
        for one in self.open:
            one.close()
