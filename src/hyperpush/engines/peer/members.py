"""Members of a run: the protocol of transports that track them, and exceptions for changes of the membership."""

from collections.abc import Collection
from typing import Any, Protocol

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.transport import Transport
from hyperpush.engines.transport.wire import RefusalReason


class Members(Transport, Protocol):
    """A transport that knows which members of the run are present, done, leaving or removed."""

    patience: float  # seconds without any change after which a wait ends with an error
    closed: frozenset[int]  # members that were removed
    leaving: frozenset[int]  # members that have announced their leaving, and those that have left
    left: frozenset[int]  # members that have left
    settled: frozenset[int]  # members that have announced that they are done

    def acknowledge(self, step: int) -> None:
        """Announce that this peer will not need messages of steps before `step` again."""
        ...

    def done(self, finished: bool = True, again: bool = False, view: frozenset[int] = frozenset()) -> None:
        """Announce that this peer is done, or with `finished=False` that it is not.

        A peer that is done needs no more messages, as long as `view` holds all removed members. `again` is True if the
        peer was already done before it was restarted. Then other members may have ended meanwhile, and those that do
        not return within the time for removal count as ended.
        """
        ...

    def everyone_done(self) -> bool:
        """Return True if all other members are done or removed."""
        ...

    def finish(self) -> None:
        """Announce that this peer is done, and wait until all others are done."""
        ...

    def refuse(self, sender: int, reason: RefusalReason, step: int) -> None:
        """Note that a message was refused.

        If its content is invalid, a synchronous run ends. In an asynchronous run the third such message removes its
        sender.
        """
        ...

    def failure(self, what: str, clients: Collection[int], then: str = "") -> HyperpushError:
        """Return an error that names this peer, `what` happened, the members `clients`, `then`, and known reasons."""
        ...

    def leave(self, left: bool) -> None:
        """Announce that this peer leaves for good; with `left=True`, that it has transferred its whole mass."""
        ...

    def present(self, clients: list[int]) -> list[int]:
        """Return the `clients` that are present, and have neither left nor been removed."""
        ...

    def missing(self) -> bool:
        """Return True if a member is absent that is not removed and cannot have ended.

        A member that is done ends only when its neighbors are done. So if this peer is not done, an absent member was
        killed.
        """
        ...


def members_of(transport: Transport) -> Any:
    """Return the transport, which may be a wrapper, if it has all attributes of `Members`; else None.

    `isinstance` cannot test this: from Python 3.12 on it looks only at the class, and a wrapper's class lacks them.
    """
    knows = (*Members.__annotations__, *(name for name, part in vars(Members).items() if callable(part)))
    return transport if all(hasattr(transport, name) for name in knows) else None


class NewView(Exception):
    """Raised when members have been removed. Averages then restart with the remaining members."""


class Left(HyperpushError):
    """Raised when this peer has left the run on request, and transferred its mass."""
