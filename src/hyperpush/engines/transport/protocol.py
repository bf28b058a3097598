"""The protocol that every transport implements; a transport moves bytes between peers."""

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

LAST = (1 << 62) - 1  # a step after all others: `collect` at this step returns all arrived messages
# Number of rounds that an asynchronous peer may be ahead of a neighbor before it waits. Messages of one round are
# always in transit, and one more round evens out different durations. A larger number would only push away more mass.
LEAD = 2


@runtime_checkable
class Transport(Protocol):
    """One peer's access to the network, which moves bytes without reading them.

    - The sender that `collect` returns is the one known to the transport, not the one in the payload. On a real network
      it comes from the certificate. Pass it on to `wire.decode` as `expect_sender`.
    - Payloads may come late, twice, in any order, damaged or not at all. The receiver decides which ones it uses.
    - `send` does not wait for the receiver, and takes ownership of `payload`.
    - The steps of one peer never decrease, except for step 0: messages outside of rounds, which are due at once.
    """

    def send(self, to: int, step: int, payload: bytes | bytearray) -> None:
        """Send the message of round `step` to peer `to`."""
        ...

    def collect(self, step: int, expected: Collection[int]) -> Sequence[tuple[int, bytes | bytearray]]:
        """Return (sender, payload) of all messages due by round `step` and not yet collected.

        Late and repeated messages are included. An asynchronous transport returns all arrived messages, also of later
        rounds.

        The call waits for the message of each `expected` sender for `step`. A wait ends when the message has arrived
        or is known to be lost, or when the transport's deadline has passed. Empty `expected` means no waiting.
        """
        ...

    def close(self) -> None:
        """Leave the network. Closing twice is allowed."""
        ...
