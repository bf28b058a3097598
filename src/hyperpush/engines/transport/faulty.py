"""Seeded faults on top of a real transport, for trials: messages are lost, duplicated, delayed and so reordered."""

from collections.abc import Collection, Sequence
from typing import Any, final

import numpy as np

from hyperpush.engines.faults import Faults


@final
class Faulty:
    """A transport wrapper that loses, duplicates and delays outgoing payloads.

    What happens to the k-th payload for a target follows from (seed, sender, target, k). A payload with a delay of d
    rounds is passed on at the d-th `collect` after it was sent. All other calls go to the transport unchanged.
    """

    def __init__(self, transport: Any, faults: Faults, seed: int, client: int):
        self.transport, self.faults, self.seed, self.client = transport, faults, seed, client
        self.lost = 0
        self._sent: dict[int, int] = {}
        self._rounds = 0
        self._waiting: list[tuple[int, int, int, bytes | bytearray]] = []  # round due, target, step, payload

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """See `Transport.send`."""
        number = self._sent[to] = self._sent.get(to, -1) + 1
        random = np.random.default_rng([self.seed, self.client, to, number])
        copies = 1 + (random.random() < self.faults.duplicate)
        for _ in range(copies):
            lost, delay = random.random() < self.faults.loss, int(random.integers(self.faults.delay + 1))
            if lost:
                self.lost += 1
            elif delay:
                self._waiting.append((self._rounds + delay, to, step, payload))
            else:
                self.transport.send(to, step, payload)

    def collect(self, step: int, expected: Collection[int]) -> Sequence[tuple[int, bytes | bytearray]]:
        """See `Transport.collect`."""
        self._rounds += 1
        due = [late for late in self._waiting if late[0] <= self._rounds]
        self._waiting = [late for late in self._waiting if late[0] > self._rounds]
        for _, to, at, payload in reversed(due):
            self.transport.send(to, at, payload)
        return self.transport.collect(step, expected)

    def close(self) -> None:
        """See `Transport.close`."""
        self.transport.close()
