"""Control messages of peers: who is there, what is needed, and how fast rounds are.

header    64 bytes: magic and version, topic, departure, step, incarnations of both ends, pace, times, run
closed    a bit for each peer that is removed
left      a bit for each peer that has left for good
more      a `Card` with HELLO, an `Accusation` with ENDED, else nothing
checksum  CRC32 of everything before it
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from hyperpush.engines.transport.wire import VERSION, RefusalReason, Rejected

_HEADER = struct.Struct("<4sBBxxQQQQQQ8s")
_CARD = struct.Struct("<32s16s16sQ16s")
_ACCUSATION = struct.Struct("<IB")
_CHECKSUM = struct.Struct("<I")
_FAMILY = b"hpc"
_MAGIC = _FAMILY + str(VERSION).encode()
_REASONS = tuple(RefusalReason)


class Topic(IntEnum):
    """Why a control message is sent."""

    HELLO = 1  # who I am; I need your messages from `step` on
    ACKNOWLEDGE = 2  # I need nothing before `step`
    DONE = 3  # I am done and need nothing more
    MEMBERS = 4  # a peer is removed, leaves or has left
    HEARTBEAT = 5  # I am at `step`, and a round takes me `pace`
    WAITING = 6  # the same, and I wait for a peer that is further behind
    ENDED = 7  # I end, because a message of a member was refused in `step`


class Departure(IntEnum):
    """Whether the sender stays."""

    NO = 0
    LEAVING = 1  # for good: send me your last totals
    LEFT = 2  # all that I held is in other hands


@final
@dataclass(frozen=True)
class Card:
    """What a peer brings to a run; peers with other cards do not run together."""

    configuration: bytes  # digest of 32 bytes
    code: bytes  # digest of 16 bytes; zeros: not compared
    jax: str  # its version
    ends: int = 0  # when the certificate ends, in seconds since 1970; 0: there is none
    session: bytes = bytes(16)  # the number of its session on the network below

    def pack(self) -> bytes:
        """Its bytes."""
        return _CARD.pack(self.configuration, self.code, self.jax.encode()[:16], self.ends, self.session)

    @staticmethod
    def unpack(data: bytes) -> "Card":
        """The card that some bytes are; raises `Rejected`."""
        configuration, code, jax, ends, session = _CARD.unpack(data)
        try:
            return Card(configuration, code, jax.rstrip(b"\0").decode("ascii"), ends, session)
        except UnicodeDecodeError:
            raise Rejected(RefusalReason.BAD_CONTROL, "a version that is no text") from None


NO_CARD = Card(bytes(32), bytes(16), "")


@final
@dataclass(frozen=True)
class Accusation:
    """A member's message that was refused, which ended a peer."""

    member: int
    reason: RefusalReason

    def pack(self) -> bytes:
        """Its bytes."""
        return _ACCUSATION.pack(self.member, _REASONS.index(self.reason))

    @staticmethod
    def unpack(data: bytes, clients: int) -> "Accusation":
        """The accusation that some bytes are; raises `Rejected`."""
        member, place = _ACCUSATION.unpack(data)
        if member >= clients or place >= len(_REASONS):
            raise Rejected(RefusalReason.BAD_CONTROL, "it accuses a peer that does not exist, or of nothing")
        return Accusation(member, _REASONS[place])


@final
@dataclass(frozen=True)
class ControlMessage:
    """A control message."""

    topic: Topic
    departure: Departure
    step: int  # see `Topic`
    incarnation: int  # of the sender
    known: int  # the receiver's incarnation: in a hello the one heard last, else the one agreed with
    run: bytes  # digest of 8 bytes that names the run
    closed: frozenset[int]
    left: frozenset[int]
    pace: int = 0  # microseconds of a round; 0: it has not begun, and `step` of a heartbeat says nothing
    sent: int = 0  # when a heartbeat was sent, by the sender's clock
    echo: int = 0  # see `Deadline.echo`
    more: Card | Accusation | None = None

    def pack(self, clients: int) -> bytes:
        """Its bytes, in a run of so many clients."""
        numbers = self.topic, self.departure, self.step, self.incarnation, self.known, self.pace, self.sent, self.echo
        head = _HEADER.pack(_MAGIC, *numbers, self.run)
        more = b"" if self.more is None else self.more.pack()
        data = head + _mask(self.closed, clients) + _mask(self.left, clients) + more
        return data + _CHECKSUM.pack(zlib.crc32(data))


_MORE = {Topic.HELLO: _CARD.size, Topic.ENDED: _ACCUSATION.size}


def unpack(data: bytes, clients: int) -> ControlMessage:
    """The message that some bytes are; raises `Rejected`."""
    _check_start(data)
    mask = -(-clients // 8)
    topic = Topic(data[4])
    start = _HEADER.size + 2 * mask
    if len(data) != start + _MORE.get(topic, 0) + _CHECKSUM.size:
        raise Rejected(RefusalReason.BAD_CONTROL, f"{len(data)} bytes")
    body = data[: -_CHECKSUM.size]
    if data[-_CHECKSUM.size :] != _CHECKSUM.pack(zlib.crc32(body)):
        raise Rejected(RefusalReason.BAD_CONTROL, "damaged on the way")
    _, _, departure, step, incarnation, known, *times, run = _HEADER.unpack_from(body)
    masks = body[_HEADER.size : start]
    closed, left = (_members(each, clients) for each in (masks[:mask], masks[mask:]))
    pace, sent, echo = times
    about = topic, Departure(departure), step, incarnation, known, run, closed, left, pace, sent, echo
    return ControlMessage(*about, _read_more(topic, body[start:], clients))


def _check_start(data: bytes) -> None:
    """Refuse what does not start like a control message of this version."""
    if len(data) < _HEADER.size:
        raise Rejected(RefusalReason.BAD_CONTROL, f"{len(data)} bytes")
    if data[:3] == _FAMILY and data[:4] != _MAGIC and data[3:4].isdigit():
        raise Rejected(RefusalReason.WRONG_VERSION, f"version {int(data[3:4])}, this is {VERSION}")
    known = data[4] in tuple(Topic) and data[5] in tuple(Departure)
    if data[:4] != _MAGIC or not known or any(data[6:8]):
        raise Rejected(RefusalReason.BAD_CONTROL, f"it starts with {data[:8]!r}")


def _read_more(topic: Topic, data: bytes, clients: int) -> Card | Accusation | None:
    if topic == Topic.HELLO:
        return Card.unpack(data)
    return Accusation.unpack(data, clients) if topic == Topic.ENDED else None


def _mask(members: frozenset[int], clients: int) -> bytes:
    return sum(1 << each for each in members).to_bytes(-(-clients // 8), "little")


def _members(mask: bytes, clients: int) -> frozenset[int]:
    bits = int.from_bytes(mask, "little")
    if bits >> clients:
        raise Rejected(RefusalReason.BAD_CONTROL, "it names peers that do not exist")
    return frozenset(each for each in range(clients) if bits >> each & 1)
