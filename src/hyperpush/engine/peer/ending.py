"""How a peer ends among others: when all have what was sent to them, or earlier, with its mass in other hands."""

import time
from collections.abc import Callable

from jaxtyping import PyTree

from hyperpush.engine.peer.mail import LAST_TOTAL, Mail
from hyperpush.engine.peer.members import Left, Members
from hyperpush.engine.peer.places import Place, flattened
from hyperpush.errors import HyperpushError

RESEND = 0.05  # seconds before totals that nobody has acknowledged are sent again, at first
LAST = (1 << 62) - 1  # a step after all others


def settle(mail: Mail, lasting: list[Place]) -> None:
    """Wait until everybody has taken in what was sent to it at the places that last, and needs nothing more."""
    members = mail.transport
    assert isinstance(members, Members)
    pause, due, told = RESEND, 0.0, False
    while True:
        owed = {
            (place.number, header.sender) for header, _, place in mail.arrived(LAST, []) if place.tolerant
        }  # who sends again has not heard that we have it
        if due == 0.0:
            owed = {(place.number, sender) for place in lasting for sender in place.incoming.counters}
        if members.closed - mail.walked.closed:
            if lasting:
                mail.check_view()
            mail.walked.closed, told = members.closed, False
        for number, sender in owed:
            if sender not in mail.walked.closed:
                mail.acknowledge(mail.places.numbered[number], sender)
        out = mail.walked.closed | mail.leaving
        waiting = [
            (place, target)
            for place in lasting
            for target, counter in place.outgoing.counters.items()
            if target not in out and place.acknowledged.get(target, 0) < counter
        ]
        if time.monotonic() >= due:
            mail.say_farewell()
            for place, target in waiting:
                mail.post_total(place, target)
            due, pause = time.monotonic() + pause, min(2 * pause, 1.0)
        if not waiting and not told:
            members.done()
            told = True
        if told and members.everyone_done():
            return
        time.sleep(0.01)


def hand_over(
    mail: Mail, place: Place, others: list[int], held: Callable[[], PyTree], emptied: Callable[[], None]
) -> None:
    """Take in what is still on its way, push all of it to one neighbour, and be gone: raises `Left`.

    `held` says what there is to push, once all has been taken in; `emptied` makes durable that it is on the link.
    Who has gone on to another stage of the run, where this mass is of no use, is not waited for.
    """
    members = mail.transport
    assert isinstance(members, Members)
    members.leave(False)

    def until(ready: Callable[[], bool], again: Callable[[], None] = lambda: None) -> None:
        while not ready():
            again()
            mail.arrived(LAST, [])
            mail.check_view()
            time.sleep(0.02)

    def here() -> set[int]:
        return set(members.present(others)) - mail.leaving

    def waiting() -> list[int]:
        there = members.present(list(place.outgoing.counters))
        return [target for target in there if place.acknowledged.get(target, 0) < place.outgoing.counters[target]]

    def resend() -> None:
        for target in waiting():
            mail.post_total(place, target, LAST_TOTAL)

    until(lambda: here() <= place.last)
    heirs = sorted(here())
    if not heirs:
        raise HyperpushError(f"peer {mail.client}: nobody is there to hand its mass to")
    place.outgoing.add(heirs[0], flattened(held()))
    emptied()
    until(lambda: not waiting(), resend)
    members.leave(True)
    raise Left(f"peer {mail.client} has left and handed its mass to {heirs[0]}")
