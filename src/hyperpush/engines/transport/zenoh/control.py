"""Control messages of peers, which report presence, required messages, membership and the pace of rounds.

An incarnation is a random number that identifies one process of a peer. Messages are laid out as follows:

header    64 bytes: magic, version, topic, departure, step, both incarnations, pace, times, run
closed    a bit per peer: 1 if it is removed
left      a bit per peer: 1 if it has left for good
more      a `Card` in HELLO, an `Accusation` in ENDED, else empty
checksum  CRC32 of all bytes before it
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
    """Subject of a control message. In the comments, "I" is the sender."""

    HELLO = 1  # who I am; I need your messages from `step` on
    ACKNOWLEDGE = 2  # I need nothing before `step`
    DONE = 3  # I am done and need nothing more
    MEMBERS = 4  # a peer is removed, leaves or has left
    HEARTBEAT = 5  # I am at `step`, and my rounds take `pace`
    WAITING = 6  # a heartbeat of a sender that waits for a peer further behind
    ENDED = 7  # I end, because I refused a member's message in `step`


class Departure(IntEnum):
    """Progress of a control message's sender in leaving the run."""

    NO = 0
    LEAVING = 1  # I leave for good: send me your last totals
    LEFT = 2  # I have transferred my whole mass


@final
@dataclass(frozen=True)
class Card:
    """Facts by which a peer introduces itself. The first three fields must agree among the peers of a run."""

    configuration: bytes  # digest of 32 bytes
    code: bytes  # digest of 16 bytes; zeros: not compared
    jax: str  # version of JAX
    ends: int = 0  # end of the certificate, in seconds since 1970; 0: no certificate
    session: bytes = bytes(16)  # number of its Zenoh session

    def pack(self) -> bytes:
        """Return the card as bytes."""
        return _CARD.pack(self.configuration, self.code, self.jax.encode()[:16], self.ends, self.session)

    @staticmethod
    def unpack(data: bytes) -> "Card":
        """Return the card in `data`; raise `Rejected` if it is invalid."""
        configuration, code, jax, ends, session = _CARD.unpack(data)
        try:
            return Card(configuration, code, jax.rstrip(b"\0").decode("ascii"), ends, session)
        except UnicodeDecodeError:
            raise Rejected(RefusalReason.BAD_CONTROL, "the version of JAX is not text") from None


NO_CARD = Card(bytes(32), bytes(16), "")


@final
@dataclass(frozen=True)
class Accusation:
    """The reason why a synchronous peer ends: it refused a message of `member`."""

    member: int
    reason: RefusalReason

    def pack(self) -> bytes:
        """Return the accusation as bytes."""
        return _ACCUSATION.pack(self.member, _REASONS.index(self.reason))

    @staticmethod
    def unpack(data: bytes, clients: int) -> "Accusation":
        """Return the accusation in `data`; raise `Rejected` if it is invalid."""
        member, place = _ACCUSATION.unpack(data)
        if member >= clients or place >= len(_REASONS):
            raise Rejected(
                RefusalReason.BAD_CONTROL, "it accuses a peer that does not exist, or gives an unknown reason"
            )
        return Accusation(member, _REASONS[place])


@final
@dataclass(frozen=True)
class ControlMessage:
    """The contents of one control message."""

    topic: Topic
    departure: Departure
    step: int  # see `Topic`
    incarnation: int  # incarnation of the sender
    known: int  # incarnation of the receiver: in a hello the last one heard, else the accepted one
    run: bytes  # digest of 8 bytes that identifies the run
    closed: frozenset[int]
    left: frozenset[int]
    # In a heartbeat: microseconds per round; 0 if they are not known yet, and then `step` is meaningless, too. In a
    # hello: 1 if the sender may continue what an earlier process began, 0 for a fresh start.
    pace: int = 0
    sent: int = 0  # time of a heartbeat, by the sender's clock
    echo: int = 0  # see `Deadline.echo`
    more: Card | Accusation | None = None

    @property
    def resumed(self) -> bool:
        """True for a hello whose sender may continue from the checkpoint of an earlier process."""
        return self.pace > 0

    def pack(self, clients: int) -> bytes:
        """Return the message as bytes, in a run of `clients` clients."""
        numbers = self.topic, self.departure, self.step, self.incarnation, self.known, self.pace, self.sent, self.echo
        head = _HEADER.pack(_MAGIC, *numbers, self.run)
        more = b"" if self.more is None else self.more.pack()
        data = head + _mask(self.closed, clients) + _mask(self.left, clients) + more
        return data + _CHECKSUM.pack(zlib.crc32(data))


_MORE = {Topic.HELLO: _CARD.size, Topic.ENDED: _ACCUSATION.size}


def unpack(data: bytes, clients: int) -> ControlMessage:
    """Return the control message in `data`; raise `Rejected` if it is invalid."""
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
    """Raise `Rejected` unless data start like a control message of this version."""
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
