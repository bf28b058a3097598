"""What every transport does: it moves bytes between peers."""

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

LAST = (1 << 62) - 1  # a step after all others: whatever has come is collected
# Rounds that a peer may be ahead of a neighbor before it waits for it, asynchronously. One round is on its way at any
# time, and one more evens out rounds that take different times. More would only push away more mass.
LEAD = 2


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

        Where peers go at their own pace, that is all that has come, also of rounds that are yet to be reached.

        Waits until the message of each `expected` sender for `step` has arrived or been given up on: known to be lost,
        or the transport's deadline has passed. With nobody expected it does not wait.
        """
        ...

    def close(self) -> None:
        """Leave the network. Closing twice is allowed."""
        ...
