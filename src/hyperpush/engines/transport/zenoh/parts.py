"""Split long payloads into parts, each sent as a separate message, and join received parts.

The header of a part holds the number, step and length of the payload, and the part's place there. It also holds the run
and the sender's incarnation. All parts but the last have the same size, so places and sizes can be checked. For each
sender, the number of incomplete payloads and their bytes are bounded.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from hyperpush.engines.transport.wire import VERSION, RefusalReason, Rejected

# Largest size of a Zenoh message in bytes; longer payloads are split. Zenoh would take 256 MB at once, but slowly
# (0.2 GB/s instead of 1 GB/s on loopback), and a control message behind it would wait for 0.3 s instead of 10 ms.
PART_BYTES = 4 << 20
# Largest number of incomplete payloads of one sender. An honest sender sends payloads one after the other. It leaves
# one incomplete if it is killed; then newer payloads replace it.
OPEN = 4

RUN_BYTES = 8  # size of the digest that identifies a run
# Fields: magic, version, place, number, length, step, run, incarnation.
_HEADER = struct.Struct("<2sBxHIIQ8sQ")
_MAGIC = b"ht"
_NUMBERS = 1 << 32  # payloads are numbered modulo this


class Stamp(NamedTuple):
    """The run to which a part belongs, and the incarnation of the process that sent it."""

    run: bytes = bytes(RUN_BYTES)
    incarnation: int = 0


NO_STAMP = Stamp()


def split(
    number: int, step: int, payload: bytes | bytearray, stamp: Stamp = NO_STAMP
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (header, part) for each part of payload `number`."""
    view, number = memoryview(payload), number % _NUMBERS
    for place, start in enumerate(range(0, max(len(view), 1), PART_BYTES)):
        header = _HEADER.pack(_MAGIC, VERSION, place, number, len(view), step, *stamp)
        yield header, view[start : start + PART_BYTES]


def stamp_of(header: bytes) -> Stamp:
    """Return the stamp in a header; raise `Rejected` unless it is a header of this version."""
    if len(header) != _HEADER.size:
        raise Rejected(RefusalReason.BAD_PART, f"a header of {len(header)} bytes")
    magic, version, *_, run, incarnation = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise Rejected(RefusalReason.BAD_PART, f"it starts with {magic!r}")
    if version != VERSION:
        raise Rejected(RefusalReason.WRONG_VERSION, f"version {version}, this is {VERSION}")
    return Stamp(run, incarnation)


@final
class Assembly:
    """Joins the parts of one sender's payloads.

    Payloads of more than `limit` bytes are refused. `drop` is called with the reason when an incomplete one is dropped.
    """

    def __init__(self, limit: int, drop: Callable[[RefusalReason], None] = lambda reason: None):
        self.limit, self._drop = limit, drop
        self._open: dict[int, tuple[int, int, dict[int, bytes]]] = {}  # number: step, length, parts by place

    def add(self, header: bytes, part: bytes) -> tuple[int, bytes] | None:
        """Return (step, payload) if this part completes a payload, else None; raise `Rejected` for an invalid part."""
        stamp_of(header)
        _, _, place, number, length, step, *_ = _HEADER.unpack(header)
        if length > self.limit:
            raise Rejected(RefusalReason.OVERSIZED, f"{length} bytes, at most {self.limit} expected")
        start = place * PART_BYTES
        if start > max(length - 1, 0) or len(part) != min(PART_BYTES, length - start):
            raise Rejected(RefusalReason.BAD_PART, f"part {place} of {len(part)} bytes, of a payload of {length}")
        if length <= PART_BYTES:
            return step, part
        if number in self._open and self._open[number][:2] != (step, length):
            self._give_up(number)  # the sender was killed between parts, and its successor counts payloads from 0
        if number not in self._open:
            while len(self._open) >= OPEN:  # the oldest payload is abandoned
                self._give_up(next(iter(self._open)))
            self._open[number] = step, length, {}
        parts = self._open[number][2]
        parts[place] = part
        if len(parts) * PART_BYTES < length:
            return None
        del self._open[number]
        return step, b"".join(parts[place] for place in sorted(parts))

    def _give_up(self, number: int) -> None:
        del self._open[number]
        self._drop(RefusalReason.INCOMPLETE)
