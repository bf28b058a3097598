"""A network in memory, between threads of one process, with seeded faults."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import final

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.faults import Faults
from hyperpush.engines.keys import as_bits

# At module level, so that one compilation serves every network of the same size and faults.
_compiled_fates = jax.jit(Faults.fates, static_argnames="clients")


@final
@dataclass(order=True, frozen=True)
class _Parcel:
    # The order of these fields is the order of delivery, which must not depend on the order of threads.
    step: int
    sender: int
    copy: int
    due: int = field(compare=False)
    payload: bytes | bytearray = field(compare=False)


@final
class MemoryTransport:
    """A network in memory between threads of one process, with `faults` drawn from `key`.

    A copy delayed by d rounds and sent at step t is due at the receiver's step t + d. A lost or late message is
    announced to the receiver, which therefore waits only for peers that have not sent yet. So deliveries and their
    order follow from `key` alone, as long as `expected` names all senders. A peer that sends nothing for `deadline`
    seconds causes an error.
    """

    def __init__(
        self, clients: int, faults: Faults | None = None, key: PRNGKeyArray | None = None, deadline: float = 30.0
    ):
        self.clients, self.deadline = clients, deadline
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.fates, self.seed = None, []
        if faults is not None and key is not None:
            self.fates = partial(_compiled_fates, faults, key, clients=clients)
            self.seed = np.asarray(as_bits(key)).tolist()
        self._endpoints = [MemoryEndpoint(self, client) for client in range(clients)]

    def endpoint(self, client: int) -> "MemoryEndpoint":
        """Return the transport of one client, to be used by one thread."""
        return self._endpoints[client]

    def abort(self, exception: BaseException) -> None:
        """Abort the run because of `exception`: all present and future calls of `send` and `collect` raise."""
        with self.changed:
            self.failure = self.failure or exception
            self.changed.notify_all()

    def inject(self, to: int, step: int, sender: int, payload: bytes | bytearray) -> None:
        """Put raw bytes into the mailbox of `to`, as if from `sender`, without replacing the real message."""
        with self.changed:
            # Copy number 2 sorts it behind both copies of the real message.
            self._endpoints[to].mail.append(_Parcel(step, sender, 2, step, payload))


@final
class MemoryEndpoint:
    """One client's `Transport` on a `MemoryTransport` network."""

    def __init__(self, hub: MemoryTransport, client: int):
        self.client, self._hub = client, hub
        self.mail: list[_Parcel] = []
        self.announced: set[tuple[int, int]] = set()  # (sender, step) of all messages sent here, lost or not
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """See `Transport.send`."""
        parcels = [_Parcel(step, self.client, copy, step + delay, payload) for copy, delay in self._copies(to, step)]
        with self._hub.changed:
            self._check()
            receiver = self._hub.endpoint(to)
            receiver.mail += parcels
            receiver.announced.add((self.client, step))
            self._hub.changed.notify_all()

    def collect(self, step: int, expected: Collection[int]) -> list[tuple[int, bytes | bytearray]]:
        """See `Transport.collect`."""
        hub = self._hub

        def missing() -> list[int]:
            return sorted(sender for sender in expected if (sender, step) not in self.announced)

        with hub.changed:
            hub.changed.wait_for(lambda: hub.failure is not None or not missing(), hub.deadline)
            self._check()
            if waiting := missing():
                where = f"peer {self.client}, step {step}"
                raise HyperpushError(f"{where}: no message within {hub.deadline} s: waiting for senders {waiting}")
            due = sorted(parcel for parcel in self.mail if parcel.due <= step)
            self.mail = [parcel for parcel in self.mail if parcel.due > step]
            self.announced -= {notice for notice in self.announced if notice[1] < step}
        if hub.seed:
            due = [due[place] for place in np.random.default_rng([*hub.seed, self.client, step]).permutation(len(due))]
        return [(parcel.sender, parcel.payload) for parcel in due]

    def close(self) -> None:
        """See `Transport.close`. Messages that were sent stay in their mailboxes."""

    def _check(self) -> None:
        failure = self._hub.failure
        if failure is not None:
            raise HyperpushError(f"peer {self.client}: the run was given up: {failure!r}") from failure

    def _copies(self, to: int, step: int) -> list[tuple[int, int]]:
        """Return (copy, delay) of each copy of a message to `to` that arrives."""
        if self._hub.fates is None:
            return [(0, 0)]
        # One draw serves all receivers of a round.
        if self._drawn is None or self._drawn[0] != step:
            arrives, delays = self._hub.fates(step, self.client)
            self._drawn = step, np.asarray(arrives), np.asarray(delays)
        _, arrives, delays = self._drawn
        return [(copy, int(delays[to, copy])) for copy in (0, 1) if arrives[to, copy]]
