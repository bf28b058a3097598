"""Members of a run: the knowledge that a transport must have, and the exceptions for changes."""

from collections.abc import Collection
from typing import Any, Protocol

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.transport import Transport
from hyperpush.engines.transport.wire import RefusalReason


class Members(Transport, Protocol):
    """A transport that knows which members are present."""

    patience: float  # seconds without any news after which a wait is given up
    closed: frozenset[int]  # members that were removed
    leaving: frozenset[int]  # members that have announced their leaving, and those that have left
    left: frozenset[int]  # members that have left
    settled: frozenset[int]  # members that have announced that they are done

    def acknowledge(self, step: int) -> None:
        """Announce that nothing before `step` will be needed again."""
        ...

    def done(self, finished: bool = True, again: bool = False, view: frozenset[int] = frozenset()) -> None:
        """Announce whether this peer is done: it needs nothing more as long as `view` holds all removed members.

        `again` is True if the peer was already done before it was restarted. Then others may have ended meanwhile. A
        member that does not return within the time for removal is taken to have ended.
        """
        ...

    def everyone_done(self) -> bool:
        """Return True if all other members that are not removed are done."""
        ...

    def finish(self) -> None:
        """Announce that this peer is done, and wait until the others are."""
        ...

    def refuse(self, sender: int, reason: RefusalReason, step: int) -> None:
        """Note that a message was refused.

        Impossible content ends a synchronous run. Asynchronously the third such message removes its sender.
        """
        ...

    def failure(self, what: str, clients: Collection[int], then: str = "") -> HyperpushError:
        """Return the error "what, these members, then", with the name of this peer and the reason for each member."""
        ...

    def leave(self, left: bool) -> None:
        """Announce that this peer leaves for good, or with `left` that it has transferred its whole mass."""
        ...

    def present(self, clients: list[int]) -> list[int]:
        """Return those of `clients` that are present, and have neither left nor been removed."""
        ...

    def missing(self) -> bool:
        """Return True if a member is absent that is not removed and cannot have ended.

        A member that is done ends only when its neighbors are done. So an absent member was killed if this peer is not
        done.
        """
        ...


def members_of(transport: Transport) -> Any:
    """Return the transport if it has all members of `Members`, itself or as a wrapper; else None.

    `isinstance` would not do: from Python 3.12 on it looks only at the class, which in a wrapper lacks them.
    """
    knows = (*Members.__annotations__, *(name for name, part in vars(Members).items() if callable(part)))
    return transport if all(hasattr(transport, name) for name in knows) else None


class NewView(Exception):
    """Raised when members have been removed: averages start anew among the rest."""


class Left(HyperpushError):
    """Raised when this peer has left the run on request, and transferred its mass."""
