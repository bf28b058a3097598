"""Members of a run: what a transport must know of them, and the consequences of a change."""

from typing import Any, Protocol

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.transport import Transport
from hyperpush.engines.transport.wire import RefusalReason


class Members(Transport, Protocol):
    """A transport that knows which members are present."""

    patience: float  # seconds without any news after which a wait is given up
    closed: frozenset[int]  # those who vanished for good
    leaving: frozenset[int]  # those who said that they leave, and those who have left
    left: frozenset[int]  # those who have left
    settled: frozenset[int]  # those who have said that they are done

    def acknowledge(self, step: int) -> None:
        """Nothing before `step` will be needed again."""
        ...

    def done(self, finished: bool = True, again: bool = False, view: frozenset[int] = frozenset()) -> None:
        """Tell everybody whether this peer needs nothing more, as long as those in `view` are all who are removed.

        `again`: it had said so before it was restarted. Then others may have ended meanwhile, and who does not come
        back in the time after which one is removed is taken to have done so.
        """
        ...

    def everyone_done(self) -> bool:
        """Whether all others that are not removed are done."""
        ...

    def finish(self) -> None:
        """Be done and wait for the others."""
        ...

    def refuse(self, sender: int, reason: RefusalReason, step: int) -> None:
        """Note that a message was refused.

        One whose content cannot be true ends a run in step. At its own pace it does nothing, and the third removes its
        sender.
        """
        ...

    def leave(self, left: bool) -> None:
        """Tell everybody that this peer leaves for good, or that it has transferred all that it held."""
        ...

    def present(self, clients: list[int]) -> list[int]:
        """Who of them is there and has not left."""
        ...

    def missing(self) -> bool:
        """Whether somebody is gone who is not removed, and cannot have ended.

        Who is done ends only when its neighbors are: before this peer is, whoever is gone has been killed.
        """
        ...


def members_of(transport: Transport) -> Any:
    """The transport as `Members`, if it knows who is there or passes on what another knows; else None.

    Not by `isinstance`: from Python 3.12 on that looks at the class alone, where a wrapper has nothing.
    """
    knows = (*Members.__annotations__, *(name for name, part in vars(Members).items() if callable(part)))
    return transport if all(hasattr(transport, name) for name in knows) else None


class NewView(Exception):
    """Others have been removed: averages start anew among the rest."""


class Left(HyperpushError):
    """This peer has left the run, as it was asked to, and transferred its mass."""
