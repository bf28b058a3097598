"""How peers move bytes: the protocol, and a network in memory whose faults follow a seed."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, final, runtime_checkable

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.engines.faults import Faults
from hyperpush.errors import HyperpushError, InvalidInput

LAST = (1 << 62) - 1  # a step after all others: whatever has come is collected


@runtime_checkable
class Transport(Protocol):
    """One peer's access to the network: it moves bytes and does not look inside.

    - The sender that `collect` names is who the transport knows it to be (on a real network: the name in its
      certificate), never what the payload says. Pass it on to `wire.decode` as `expect_sender`.
    - Payloads may come late, twice, in any order, damaged or not at all: the receiver decides what still counts.
    - `send` does not wait for the receiver, and `payload` is the transport's once it is called.
    - The steps of one peer never decrease, but for 0: what belongs to no round, and is due at once.
    """

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """Hand over the message of round `step` for peer `to`."""
        ...

    def collect(self, step: int, expected: Collection[int]) -> Sequence[tuple[int, bytes | bytearray]]:
        """What is due by round `step` and was not collected before, late and repeated messages too: (sender, payload).

        Waits until the message of each `expected` sender for `step` has arrived or been given up on: known to be lost,
        or the transport's deadline has passed. With nobody expected it does not wait.
        """
        ...

    def close(self) -> None:
        """Leave the network. Closing twice is allowed."""
        ...


# At module level, so that one compilation serves every network of the same size and faults.
_compiled_fates = jax.jit(Faults.fates, static_argnames="clients")


@final
@dataclass(order=True, frozen=True)
class _Parcel:
    # The order of these fields is the order of delivery: it must not depend on which thread was first.
    step: int
    sender: int
    copy: int
    due: int = field(compare=False)
    payload: bytes | bytearray = field(compare=False)


@final
class Memory:
    """A network between threads of one process, with `faults` drawn from `key`.

    A copy delayed by d rounds and sent at step t is due at the receiver's step t + d. A lost or late message is
    announced to the receiver, which therefore waits only for peers that have not sent yet: what is delivered at which
    step, and in which order, follows from `key` alone as long as `expected` names everybody who sends. A peer that says
    nothing for `deadline` seconds, or has closed, is an error rather than a gap.
    """

    def __init__(
        self,
        clients: int,
        faults: Faults | None = None,
        key: PRNGKeyArray | None = None,
        deadline: float = 30.0,
    ):
        if clients < 1:
            raise InvalidInput("clients", clients, "1 or more")
        if not deadline > 0:
            raise InvalidInput("deadline", deadline, "a positive number of seconds")
        if faults is not None and key is None:
            raise InvalidInput("key", key, "a random key, because there are faults to draw")
        self.clients = clients
        self.deadline = deadline
        self._changed = threading.Condition()
        self._mail: list[list[_Parcel]] = [[] for _ in range(clients)]
        self._announced: list[set[tuple[int, int]]] = [set() for _ in range(clients)]
        self._closed: set[int] = set()
        self._failure: BaseException | None = None
        self._fates = None
        self._seed: list[int] = []
        if faults is not None and key is not None:
            self._fates = partial(_compiled_fates, faults, key, clients=clients)
            typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
            self._seed = np.asarray(jax.random.key_data(key) if typed else key).tolist()
        self._endpoints = [MemoryEndpoint(self, client) for client in range(clients)]

    def endpoint(self, client: int) -> "MemoryEndpoint":
        """The transport of one client, to be used by one thread."""
        return self._endpoints[self._check_client("client", client)]

    def abort(self, exception: BaseException) -> None:
        """Give up the run, because of `exception`: every `send` and `collect`, waiting or to come, raises."""
        with self._changed:
            self._failure = self._failure or exception
            self._changed.notify_all()

    def inject(self, to: int, step: int, sender: int, payload: bytes | bytearray) -> None:
        """Put raw bytes into the mailbox of `to`, as if from `sender`, whose own message is still waited for."""
        with self._changed:
            # Behind both copies of the real message.
            self._mail[self._check_client("to", to)].append(_Parcel(step, sender, 2, step, payload))

    def _check_client(self, name: str, client: int) -> int:
        if not 0 <= client < self.clients:
            raise InvalidInput(name, client, f"a client from 0 to {self.clients - 1}")
        return client

    def _check_open(self, client: int) -> None:
        if self._failure is not None:
            raise HyperpushError(f"peer {client}: the run was given up: {self._failure!r}") from self._failure
        if client in self._closed:
            raise HyperpushError(f"peer {client}: its transport is closed")

    def _post(self, to: int, sender: int, step: int, parcels: list[_Parcel]) -> None:
        with self._changed:
            self._check_open(sender)
            self._mail[to] += parcels
            self._announced[to].add((sender, step))
            self._changed.notify_all()

    def _collect(self, client: int, step: int, expected: Collection[int]) -> list[tuple[int, bytes | bytearray]]:
        announced = self._announced[client]

        def missing() -> list[int]:
            return sorted(sender for sender in expected if (sender, step) not in announced)

        def settled() -> bool:
            stopped = self._failure is not None or client in self._closed
            return stopped or not (waiting := missing()) or not self._closed.isdisjoint(waiting)

        with self._changed:
            in_time = self._changed.wait_for(settled, self.deadline)
            self._check_open(client)
            if waiting := missing():
                cause = "closed before sending" if in_time else f"no message within {self.deadline} s"
                raise HyperpushError(f"peer {client}, step {step}: {cause}: waiting for senders {waiting}")
            mail = self._mail[client]
            due = sorted(parcel for parcel in mail if parcel.due <= step)
            self._mail[client] = [parcel for parcel in mail if parcel.due > step]
            announced -= {notice for notice in announced if notice[1] < step}
        if self._seed:
            due = [due[place] for place in np.random.default_rng([*self._seed, client, step]).permutation(len(due))]
        return [(parcel.sender, parcel.payload) for parcel in due]

    def _close(self, client: int) -> None:
        with self._changed:
            self._closed.add(client)
            self._changed.notify_all()


@final
class MemoryEndpoint:
    """One client's `Transport` on a `Memory` network; it counts the messages and bytes that it was given to send."""

    def __init__(self, hub: Memory, client: int):
        self.client = client
        self.sent_messages = 0
        self.sent_bytes = 0
        self._hub = hub
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """See `Transport.send`."""
        self._hub._check_client("to", to)
        parcels = [_Parcel(step, self.client, copy, step + delay, payload) for copy, delay in self._copies(to, step)]
        self._hub._post(to, self.client, step, parcels)
        self.sent_messages += 1
        self.sent_bytes += len(payload)

    def collect(self, step: int, expected: Collection[int]) -> list[tuple[int, bytes | bytearray]]:
        """See `Transport.collect`."""
        for sender in expected:
            self._hub._check_client("expected", sender)
        return self._hub._collect(self.client, step, expected)

    def close(self) -> None:
        """See `Transport.close`."""
        self._hub._close(self.client)

    def _copies(self, to: int, step: int) -> list[tuple[int, int]]:
        """(copy, delay) of each copy that arrives."""
        if self._hub._fates is None:
            return [(0, 0)]
        # One draw serves all receivers of a round.
        if self._drawn is None or self._drawn[0] != step:
            arrives, delays = self._hub._fates(step, self.client)
            self._drawn = step, np.asarray(arrives), np.asarray(delays)
        _, arrives, delays = self._drawn
        return [(copy, int(delays[to, copy])) for copy in (0, 1) if arrives[to, copy]]
