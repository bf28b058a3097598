"""How a peer ends among others: when all have what was sent to them, or earlier, with its mass in other hands."""

import time
from collections.abc import Callable
from typing import Any, final

from jaxtyping import PyTree

from hyperpush.engines.peer.mail import HANDED_OVER, LAST_TOTAL, Mail
from hyperpush.engines.peer.members import Left, Members
from hyperpush.engines.peer.places import Place, flattened
from hyperpush.engines.peer.walked import Stage
from hyperpush.engines.transport import LAST
from hyperpush.errors import HyperpushError

RESEND = 0.05  # seconds before totals that nobody has acknowledged are sent again, at first
LONGEST = 1.0  # and at most
LOOK = 0.01  # seconds between looks at the mail


@final
class _Waiting:
    """A wait among members: it takes in what comes, and is given up after `patience` seconds without any news.

    Who is away is no reason to give up: it comes back, or is closed out, in a time that the transport bounds.
    """

    def __init__(self, mail: Mail, save: Callable[[], None]):
        assert isinstance(mail.transport, Members)
        self.mail, self.members, self._save = mail, mail.transport, save
        self._news: Any = None
        self._since = time.monotonic()
        self._due, self._pause = 0.0, RESEND

    def look(self) -> None:
        """Take in what has come; what others wait to hear of is made durable first."""
        self.mail.arrived(LAST, [])
        if self.mail.owes:
            self._save()
            self.mail.acknowledge_owed()

    def again(self) -> bool:
        """Whether it is time to send again; less and less often."""
        if time.monotonic() < self._due:
            return False
        self._due, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LONGEST)
        return True

    def rest(self, what: str, *news: Any) -> None:
        """Wait a moment, unless nothing at all has changed for too long."""
        members = self.members
        seen = members.closed, members.leaving, members.left, members.settled, dict(self.mail.heard), *news
        if seen != self._news or members.missing():
            self._news, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > members.patience:
            raise HyperpushError(f"peer {self.mail.client}: no news within {members.patience:g} s, waiting for {what}")
        time.sleep(LOOK)


def settle(mail: Mail, lasting: list[Place], save: Callable[[], None]) -> None:
    """Wait until everybody has taken in what was sent to it at the places that last, and needs nothing more.

    `save` makes durable what the walk has left and what was taken in since: before anybody is told so.
    """
    walked, waiting = mail.walked, _Waiting(mail, save)
    members = waiting.members
    before = told = walked.stage >= Stage.DONE
    if before:  # those who have not ended have heard since that this peer is another, and not that it is done
        members.done(again=True, view=walked.closed)
    if walked.stage == Stage.OVER:
        return
    if walked.stage == Stage.WALKING:
        walked.stage = Stage.WALKED
        save()
    while True:
        waiting.look()
        if members.closed - walked.closed:
            if lasting:
                mail.check_view()
            walked.closed, told = members.closed, False
        out = walked.closed | members.left
        unheard = [
            (place, target)
            for place in lasting
            for target, counter in place.outgoing.counters.items()
            if target not in out and place.acknowledged.get(target, 0) < counter
        ]
        if waiting.again():
            mail.say_farewell()
            for place, target in unheard:
                mail.post_total(place, target, LAST_TOTAL)
        if not unheard and not told:
            walked.stage = Stage.DONE
            save()
            members.done(again=before, view=walked.closed)
            told = True
        if told and members.everyone_done() and not members.closed - walked.closed:
            walked.stage = Stage.OVER
            save()
            return
        targets = sorted({target for _, target in unheard})
        what = f"{targets} to take in what was sent to them" if targets else "the others to be done"
        waiting.rest(what, told, [(place.number, target) for place, target in unheard])


def hand_over(
    mail: Mail, place: Place, others: list[int], held: Callable[[], PyTree], save: Callable[[], None]
) -> None:
    """Take in what is still on its way, push all of it to one neighbour, and be gone: raises `Left`.

    `held` says what there is to push, once all has been taken in; `save` makes durable what was taken in or handed
    over. A neighbour's last total is its leave to go: nothing more will come from it, and it does not hand over itself
    meanwhile. Nobody goes before a leaver with a lower number, or while somebody is away. Who has gone on to another
    stage of the run, where this mass is of no use, is not waited for.
    """
    walked, waiting = mail.walked, _Waiting(mail, save)
    members = waiting.members
    if walked.stage == Stage.OVER:
        members.leave(True)
        raise Left(f"peer {mail.client} has left and handed its mass to {walked.heir}")
    members.leave(False)
    while walked.heir is None:
        waiting.look()
        mail.check_view()
        here, missing = set(members.present(others)), members.missing()
        place.last &= here  # who was away may have put more on the link
        first = {each for each in here & mail.leaving if each < mail.client}
        silent = here - place.last
        if not missing and not first and not silent:
            if not here:
                save()
                raise HyperpushError(
                    f"peer {mail.client}: everybody else has left or ended, so nobody can take its mass: it stays here,"
                    " in its checkpoint"
                )
            heir = min(here, key=lambda each: (each in place.elsewhere, each in mail.leaving, each))
            everything = flattened(held())
            mail.check_finite(everything)
            place.outgoing.add(heir, everything)
            walked.heir = heir
            save()
            break
        if waiting.again():
            mail.say_farewell()
        what = f"{sorted(first)} to leave first" if first else f"the last totals of {sorted(silent)}"
        waiting.rest(what, sorted(place.last))
    waiting = _Waiting(mail, save)
    while True:
        waiting.look()
        mail.check_view()
        if place.pending.any():  # of somebody who was away, and did not know
            place.outgoing.add(walked.heir, place.taken_flat())
            save()
        gone = walked.closed | members.left | place.elsewhere
        unheard = [
            target
            for target, counter in place.outgoing.counters.items()
            if target not in gone and place.acknowledged.get(target, 0) < counter
        ]
        if not unheard:
            break
        if waiting.again():
            for target in unheard:
                mail.post_total(place, target, HANDED_OVER)
        waiting.rest(f"{unheard} to take in what was sent to them", unheard)
    walked.stage = Stage.OVER
    save()
    members.leave(True)
    raise Left(f"peer {mail.client} has left and handed its mass to {walked.heir}")
