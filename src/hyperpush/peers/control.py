"""What peers say to each other besides the messages of their program: who is there, and what is needed still.

header    64 bytes: magic, kind, whether the sender leaves, step, incarnations of both ends, digest of the run
closed    a bit for each peer that is closed out
left      a bit for each peer that has left for good
checksum  CRC32 of everything before it
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from hyperpush.engines.wire import Reason, Rejected

_HEADER = struct.Struct("<4sBBxxQQQ32s")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"hpc2"


class Kind(IntEnum):
    """Why a control message is sent."""

    HELLO = 1  # I am here; I need your messages from `step` on
    ACKNOWLEDGE = 2  # I need nothing before `step`
    DONE = 3  # I am done and need nothing more
    MEMBERS = 4  # somebody is closed out, leaves or has left


class Leaves(IntEnum):
    """Whether the sender stays."""

    NO = 0
    LEAVING = 1  # for good: send me your last totals
    LEFT = 2  # all that I held is in other hands


@final
@dataclass(frozen=True)
class Said:
    """A control message; `answer` is the incarnation of the receiver that the sender knows."""

    kind: Kind
    leaves: Leaves
    step: int
    incarnation: int
    answer: int
    digest: bytes
    closed: frozenset[int]
    left: frozenset[int]

    def packed(self, clients: int) -> bytes:
        """Its bytes, in a run of so many clients."""
        head = _HEADER.pack(
            _MAGIC, self.kind, self.leaves, self.step, self.incarnation, self.answer, bytes(self.digest)
        )
        data = head + _mask(self.closed, clients) + _mask(self.left, clients)
        return data + _CHECKSUM.pack(zlib.crc32(data))


def unpacked(data: bytes, clients: int) -> Said:
    """The message that some bytes are; raises `Rejected`."""
    mask = -(-clients // 8)
    if len(data) != _HEADER.size + 2 * mask + _CHECKSUM.size:
        raise Rejected(Reason.BAD_CONTROL, f"{len(data)} bytes")
    body = data[: -_CHECKSUM.size]
    magic, kind, leaves, step, incarnation, answer, digest = _HEADER.unpack_from(body)
    if magic != _MAGIC or kind not in tuple(Kind) or leaves not in tuple(Leaves) or any(body[6:8]):
        raise Rejected(Reason.BAD_CONTROL, f"it starts with {body[:8]!r}")
    if data[-_CHECKSUM.size :] != _CHECKSUM.pack(zlib.crc32(body)):
        raise Rejected(Reason.BAD_CONTROL, "damaged on the way")
    closed, left = (_members(each, clients) for each in (body[_HEADER.size : -mask], body[-mask:]))
    return Said(Kind(kind), Leaves(leaves), step, incarnation, answer, digest, closed, left)


def _mask(members: frozenset[int], clients: int) -> bytes:
    return sum(1 << each for each in members).to_bytes(-(-clients // 8), "little")


def _members(mask: bytes, clients: int) -> frozenset[int]:
    bits = int.from_bytes(mask, "little")
    if bits >> clients:
        raise Rejected(Reason.BAD_CONTROL, "it names peers that do not exist")
    return frozenset(each for each in range(clients) if bits >> each & 1)
