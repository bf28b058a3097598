"""The end of a peer: after all others have received its messages, or earlier, after it has transferred its mass.

Draining ends a run. Each peer sends its last totals again until every receiver has made them durable. Then it announces
that it is done. It ends when all neighbors are done, in the same view of the membership.

Leaving ends a peer's participation in a run that continues (`transfer_mass`), in three steps:

1. It announces that it leaves. Neighbors put nothing more on its links, and send it their last totals.
2. When it has the last totals of all, it adds its whole mass to the total of one neighbor, its heir.
3. It sends its totals until all have made them durable, and announces that it has left.

Every step is saved before it is announced, so a peer that is killed in between continues to leave. Two
neighbors never transfer at once: the one with the lower number leaves first (after Ricart and Agrawala 1981).
"""

import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn, final

import numpy as np
from jaxtyping import PyTree

from hyperpush.engines.peer.channels import Channel
from hyperpush.engines.peer.members import Left
from hyperpush.engines.peer.messenger import Messenger
from hyperpush.engines.peer.state import PeerState, Stage
from hyperpush.engines.transport import LAST
from hyperpush.engines.transport.retransmission import Backoff
from hyperpush.engines.transport.wire import Kind

# Seconds between two checks for arrived messages: below the travel time on most networks, and a small load on a core.
LOOK = 0.01
TAKE_IN = "to take in what was sent to them"

Save = Callable[[], None]


@final
class _Wait:
    """A wait during which messages are received; it raises an error after `patience` seconds without any change.

    While a member is absent, the wait continues: within a time that the transport bounds, the member returns or is
    removed.
    """

    def __init__(self, messenger: Messenger, save: Save):
        assert messenger.members is not None
        self.messenger, self.members, self._save = messenger, messenger.members, save
        self._news: Any = None
        self._since = time.monotonic()
        self.resend = Backoff()

    def look(self) -> None:
        """Receive messages. If last totals are among them, save the peer and acknowledge these totals as durable."""
        self.messenger.take_arrived(LAST, [])
        if self.messenger.owes:
            self._save()
            self.messenger.acknowledge_owed()

    def rest(self, who: Collection[int], what: str, *news: Any) -> None:
        """Wait a moment for the members in `who`; raise an error if nothing has changed for `patience` seconds.

        Error messages use `what` to say what this peer waits for.
        """
        members = self.members
        seen = members.closed, members.leaving, members.left, members.settled, dict(self.messenger.heard), *news
        if seen != self._news or members.missing():
            self._news, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > members.patience:
            raise members.failure(f"no news within {members.patience:g} s, waiting for", who, f" {what}")
        time.sleep(LOOK)


def await_missing(messenger: Messenger) -> None:
    """Wait, before an average ends, until absent members return or are removed.

    Otherwise part of an absent member's mass would stay in the average forever.
    """
    if messenger.members is not None:
        while messenger.members.missing():
            time.sleep(LOOK)
        messenger.check_view()


def drain(messenger: Messenger, lasting: list[Channel], save: Save) -> None:
    """Wait until all members have received this peer's totals on the `lasting` channels, and all are done.

    `save` makes the result, and totals received later, durable. It is called before they are announced.
    """
    state, wait = messenger.state, _Wait(messenger, save)
    members = wait.members
    before = told = state.stage >= Stage.DONE
    if before:  # members still running have met the new process, but do not know that it is done
        members.done(again=True, view=state.closed)
    if state.stage == Stage.OVER:
        return None
    if state.stage == Stage.RUNNING:
        _reach(state, Stage.ENDED, save)
    while True:
        wait.look()
        if lasting:
            messenger.check_view()
        if members.closed != state.closed:  # nothing here depends on the removed members
            state.closed, told = members.closed, False
        unheard = [(channel, t) for channel in lasting for t in channel.unacknowledged(state.closed | members.left)]
        if wait.resend.is_due():
            _send_last(messenger, unheard)
        if not unheard and not told:
            _reach(state, Stage.DONE, save)
            members.done(again=before, view=state.closed)
            told = True
        if told and members.everyone_done() and members.closed == state.closed:
            return _reach(state, Stage.OVER, save)
        news = told, [(channel.number, target) for channel, target in unheard]
        if unheard:
            wait.rest({target for _, target in unheard}, TAKE_IN, *news)
        else:
            others = set(range(messenger.clients)) - {messenger.client}
            wait.rest(others - members.closed - members.settled, "to be done", *news)


def _send_last(messenger: Messenger, unheard: list[tuple[Channel, int]]) -> None:
    messenger.say_farewell()
    for channel, target in unheard:
        messenger.send_total(channel, target, Kind.LAST_TOTAL)


def _reach(state: PeerState, stage: Stage, save: Save) -> None:
    state.stage = stage
    save()


def transfer_mass(
    messenger: Messenger, channel: Channel, others: list[int], held: Callable[[], PyTree], save: Save
) -> NoReturn:
    """Receive all messages in transit, push the whole mass to one neighbor, and raise `Left`.

    This requires the last totals of all neighbors: after it, a neighbor sends nothing more, and does not transfer its
    own mass. The peer waits for leaving peers with lower numbers, and for absent members. It does not wait for a
    neighbor in another stage of the run, in which this mass is useless.

    Args:
        messenger: The messenger of the leaving peer.
        channel: The channel that holds the mass.
        others: All other clients.
        held: Function that returns the message to push. It is called after all totals have been received.
        save: Function that makes received totals and the transfer durable.
    """
    state, members = messenger.state, messenger.members
    assert members is not None
    if state.stage < Stage.OVER:
        members.leave(False)
        if state.heir is None:
            heir = _await_heir(messenger, channel, others, save)
            everything = held()
            messenger.check_finite(everything)
            channel.put(everything, np.eye(len(others) + 1)[heir])
            channel.mass = 0.0
            state.heir = heir
            save()
        _await_acknowledgments(messenger, channel, save)
        _reach(state, Stage.OVER, save)
    members.leave(True)
    raise Left(f"peer {messenger.client} has left and transferred its mass to {state.heir}")


def _await_heir(messenger: Messenger, channel: Channel, others: list[int], save: Save) -> int:
    """Wait until all neighbors have sent their last totals; return the neighbor that gets the mass."""
    wait = _Wait(messenger, save)
    members = wait.members
    while True:
        wait.look()
        messenger.check_view()
        here, missing = set(members.present(others)), members.missing()
        channel.last &= here  # a member that was absent may have put more on the link
        first = {each for each in here & messenger.leaving if each < messenger.client}
        silent = here - channel.last
        if not (missing or first or silent):
            break
        if wait.resend.is_due():
            messenger.say_farewell()
        who, what = (first, "to leave first") if first else (silent, "to send their last totals")
        wait.rest(who, what, sorted(channel.last))
    if not here:
        save()
        said = "all others have left or ended, so none can take its mass, which stays in its checkpoint"
        raise members.failure(said, ())
    return min(here, key=lambda each: (each in channel.elsewhere, each in messenger.leaving, each))


def _await_acknowledgments(messenger: Messenger, channel: Channel, save: Save) -> None:
    """Send the totals until all remaining members have made them durable."""
    state, wait = messenger.state, _Wait(messenger, save)
    assert state.heir is not None
    while True:
        wait.look()
        messenger.check_view()
        if channel.pending.any():  # from a member that was absent and did not know about the transfer
            channel.outgoing.add(state.heir, channel.take_flat())
            save()
        unheard = channel.unacknowledged(state.closed | wait.members.left | channel.elsewhere)
        if not unheard:
            return
        if wait.resend.is_due():
            for target in unheard:
                messenger.send_total(channel, target, Kind.TRANSFER)
        wait.rest(unheard, TAKE_IN, unheard)
