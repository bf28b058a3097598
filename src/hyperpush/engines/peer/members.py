"""Who takes part in a run: what a transport has to know of it, and what a change of it means."""

from typing import Protocol, runtime_checkable

from hyperpush.engines.transport import Transport
from hyperpush.errors import HyperpushError


@runtime_checkable
class Members(Transport, Protocol):
    """A transport that knows who is there."""

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


class NewView(Exception):
    """Others have been removed: averages start anew among the rest."""


class Left(HyperpushError):
    """This peer has left the run, as it was asked to, and transferred its mass."""
