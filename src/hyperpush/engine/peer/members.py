"""Who takes part in a run: what a transport has to know of it, and what becomes of a walk when it changes."""

from typing import Protocol, runtime_checkable

from hyperpush.engine.transport import Transport
from hyperpush.errors import HyperpushError


@runtime_checkable
class Members(Transport, Protocol):
    """A transport that knows who is there."""

    closed: frozenset[int]  # those who vanished for good
    leaving: frozenset[int]  # those who said that they leave, and those who have left

    def acknowledge(self, step: int) -> None:
        """Nothing before `step` will be needed again."""
        ...

    def done(self, finished: bool = True) -> None:
        """Tell everybody whether this peer needs nothing more."""
        ...

    def everyone_done(self) -> bool:
        """Whether all others that are not closed out are done."""
        ...

    def finish(self) -> None:
        """Be done and wait for the others."""
        ...

    def leave(self, left: bool) -> None:
        """Tell everybody that this peer leaves for good, or that it has handed over all that it held."""
        ...

    def present(self, clients: list[int]) -> list[int]:
        """Who of them is there and not done."""
        ...

    def missing(self) -> bool:
        """Whether somebody is gone who is neither done nor closed out."""
        ...


class NewView(Exception):
    """Others have been closed out: averages start anew among the rest."""


class Left(HyperpushError):
    """This peer has left the run, as it was asked to, and handed its mass over."""
