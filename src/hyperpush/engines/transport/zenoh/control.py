"""What peers say to each other besides the messages of their program: who is there, what is needed, and how fast.

header    88 bytes: magic, topic, whether the sender leaves, step, incarnations of both ends, pace, times, digest
closed    a bit for each peer that is removed
left      a bit for each peer that has left for good
checksum  CRC32 of everything before it
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from hyperpush.engines.transport.wire import RefusalReason, Rejected

_HEADER = struct.Struct("<4sBBxxQQQQQQ32s")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"hpc4"


class Topic(IntEnum):
    """Why a control message is sent."""

    HELLO = 1  # I am here; I need your messages from `step` on
    ACKNOWLEDGE = 2  # I need nothing before `step`
    DONE = 3  # I am done and need nothing more
    MEMBERS = 4  # somebody is removed, leaves or has left
    HEARTBEAT = 5  # I am at `step`, and a round takes me `pace`
    WAITING = 6  # the same, and I wait for somebody who is further behind


class Departure(IntEnum):
    """Whether the sender stays."""

    NO = 0
    LEAVING = 1  # for good: send me your last totals
    LEFT = 2  # all that I held is in other hands


@final
@dataclass(frozen=True)
class ControlMessage:
    """One of them."""

    topic: Topic
    departure: Departure
    step: int  # see `Topic`
    incarnation: int  # of the sender
    known: int  # the incarnation of the receiver, as the sender knows it
    digest: bytes  # of the sender's configuration
    closed: frozenset[int]
    left: frozenset[int]
    pace: int = 0  # microseconds of a round; 0: it has not begun, and `step` of a heartbeat says nothing
    sent: int = 0  # when a heartbeat was sent, by the sender's clock
    echo: int = 0  # see `Deadline.echo`

    def pack(self, clients: int) -> bytes:
        """Its bytes, in a run of so many clients."""
        numbers = self.topic, self.departure, self.step, self.incarnation, self.known, self.pace, self.sent, self.echo
        head = _HEADER.pack(_MAGIC, *numbers, bytes(self.digest))
        data = head + _mask(self.closed, clients) + _mask(self.left, clients)
        return data + _CHECKSUM.pack(zlib.crc32(data))


def unpack(data: bytes, clients: int) -> ControlMessage:
    """The message that some bytes are; raises `Rejected`."""
    mask = -(-clients // 8)
    if len(data) != _HEADER.size + 2 * mask + _CHECKSUM.size:
        raise Rejected(RefusalReason.BAD_CONTROL, f"{len(data)} bytes")
    body = data[: -_CHECKSUM.size]
    magic, topic, departure, step, incarnation, known, *times, digest = _HEADER.unpack_from(body)
    if magic != _MAGIC or topic not in tuple(Topic) or departure not in tuple(Departure) or any(body[6:8]):
        raise Rejected(RefusalReason.BAD_CONTROL, f"it starts with {body[:8]!r}")
    if data[-_CHECKSUM.size :] != _CHECKSUM.pack(zlib.crc32(body)):
        raise Rejected(RefusalReason.BAD_CONTROL, "damaged on the way")
    closed, left = (_members(each, clients) for each in (body[_HEADER.size : -mask], body[-mask:]))
    about = Topic(topic), Departure(departure), step, incarnation, known, digest, closed, left
    return ControlMessage(*about, *times)


def _mask(members: frozenset[int], clients: int) -> bytes:
    return sum(1 << each for each in members).to_bytes(-(-clients // 8), "little")


def _members(mask: bytes, clients: int) -> frozenset[int]:
    bits = int.from_bytes(mask, "little")
    if bits >> clients:
        raise Rejected(RefusalReason.BAD_CONTROL, "it names peers that do not exist")
    return frozenset(each for each in range(clients) if bits >> each & 1)
