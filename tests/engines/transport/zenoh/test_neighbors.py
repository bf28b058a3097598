"""A peer's records of its neighbors, as numbers and text: outages, ends, removals and versions."""

import resource
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engines.peer.parties import Places

from hyperpush.base.errors import Absent, Refused
from hyperpush.engines.transport.wire import VERSION, RefusalReason, Rejected
from hyperpush.engines.transport.zenoh import neighbors, session
from hyperpush.engines.transport.zenoh.control import ControlMessage, Departure, Topic
from hyperpush.engines.transport.zenoh.deadlines import Deadline
from hyperpush.engines.transport.zenoh.guests import OTHERS, SILENCE
from hyperpush.engines.transport.zenoh.incoming import Incoming
from hyperpush.engines.transport.zenoh.links import Link
from hyperpush.engines.transport.zenoh.membership import REFUSALS, Membership
from hyperpush.engines.transport.zenoh.neighbors import Neighbor, explain
from hyperpush.engines.transport.zenoh.parts import Stamp, split

NAMES = ("alice", "bob", "carol")


def membership(asynchronous=False, **options):
    """Return Alice's membership without a network: her messages are dropped."""
    others = {1: Neighbor("bob", Deadline()), 2: Neighbor("carol", Deadline())}
    given: dict[str, Any] = {"asynchronous": asynchronous, "close_after": 5.0, "closed": (), "left": (), **options}
    calls: dict[str, Any] = {name: lambda *said: None for name in ("tell", "forget", "send_again")}
    return Membership(NAMES, 0, others, **given, **calls)


def agree(made, place=1):
    other = made.neighbors[place]
    made.hear_life(place, True)
    other.incarnation, other.agreed = 7, True
    return other


def done(made, place=1):
    said = Topic.DONE, Departure.NO, 0, made.neighbors[place].incarnation, made.incarnation, made.run
    made.hear(place, ControlMessage(*said, frozenset(), frozenset()))


@pytest.mark.parametrize("first", ["done", "gone"])
def test_the_end_of_a_party_that_is_done_is_no_outage(first, monkeypatch):
    """The end of the liveliness token may arrive before the message that the party is done."""
    monkeypatch.setattr(neighbors, "LOST", 0.05)
    made = membership()
    other = agree(made)
    for step in ("done", "gone") if first == "done" else ("gone", "done"):
        done(made) if step == "done" else made.hear_life(1, False)
    time.sleep(0.1)
    made.look_for_lost()
    assert list(made.news) == []
    assert (other.outages, other.status()["away"]) == (0, 0.0)


def test_a_party_that_vanishes_is_lost_once_and_found_again(monkeypatch):
    made = membership()
    other = agree(made)
    made.hear_life(1, False)
    made.look_for_lost()
    assert list(made.news) == []  # the message that it is done may still arrive
    monkeypatch.setattr(neighbors, "LOST", 0.0)
    made.look_for_lost()
    made.look_for_lost()
    made.hear_life(1, True)
    assert list(made.news) == ["lost: bob", "found: bob"]
    assert other.outages == 1


def test_another_version_under_a_living_members_certificate_is_not_its_reason():
    made = membership()
    incoming = Incoming(made, {}, threading.Condition())
    old = Rejected(RefusalReason.WRONG_VERSION, f"version 4, this is {VERSION}")
    incoming._note(1, old)  # no peer is present yet, so this is the only information
    assert explain(made.neighbors[1]) == f"bob has version 4, this is {VERSION}"
    other = agree(made, 2)
    incoming._note(2, old)
    assert other.unfit == ""
    assert explain(other).startswith("carol is there, in step")
    assert incoming.rejections == {"wrong-version": 2}


def test_with_its_certificate_a_members_messages_end_though_its_link_may_not():
    """TLS resumes sessions without checking the certificate again, so the peer itself must check its end."""
    made = membership()
    other = agree(made)
    incoming = Incoming(made, {}, threading.Condition())
    incoming.links, taken = {1: SimpleNamespace(add=lambda *part: taken.append(1))}, []  # pyright: ignore[reportAttributeAccessIssue]
    header, part = next(split(0, 0, b"data", Stamp(made.run, other.incarnation)))
    guarded, control = incoming.guard(incoming.on_data), incoming.guard(incoming.on_control)
    other.ends = int(time.time()) + 60
    made.check_certificates()
    guarded(1, header, bytes(part))
    assert (taken, other.alive, incoming.rejections) == ([1], True, {})
    other.ends = int(time.time()) - 1
    made.check_certificates()
    guarded(1, header, bytes(part))
    made.hear_life(1, True)
    assert (taken, other.alive, incoming.rejections) == ([1], False, {"expired-certificate": 1})
    assert explain(other).startswith("bob's certificate ended at ")
    # A new process of bob with a new certificate is accepted.
    said = Topic.HELLO, Departure.NO, 0, 99, made.incarnation, made.run, frozenset(), frozenset()
    for ends, found in ((other.ends, False), (int(time.time()) + 60, True)):
        hello = ControlMessage(*said, pace=1, more=replace(made.card, ends=ends))
        control(1, b"", hello.pack(len(NAMES)))
        assert (other.incarnation == 99, other.alive) == (found, found)
    assert made.failure is None
    made.card = replace(made.card, ends=int(time.time()) - 1)
    made.check_certificates()
    assert isinstance(made.failure, Absent)
    assert str(made.failure).startswith("alice's certificate ended at ")


@pytest.mark.parametrize("resumed", [False, True])
def test_the_next_call_of_a_party_that_is_done_does_not_hear_this_one(resumed):
    """A party calls one program again: messages of the next call must not get answers of the last one."""
    made = membership()
    other = agree(made)
    done(made)
    made.finish(True, False, frozenset())
    check_fresh(made, other, resumed)
    assert other.done != resumed


@pytest.mark.parametrize("resumed", [False, True])
def test_in_the_middle_of_a_run_nobody_starts_anew_without_a_checkpoint(resumed):
    """The others' states contain its earlier messages, which do not fit the messages of a fresh start."""
    made = membership()
    other = agree(made)
    incoming = Incoming(made, {1: Link(100, True)}, threading.Condition())
    for header, part in split(0, 0, b"hello", Stamp(made.run, other.incarnation)):
        incoming.on_data(1, header, bytes(part))
    check_fresh(made, other, resumed)
    assert ("a process has started anew in its place, without its checkpoint" in explain(other)) != resumed


def check_fresh(made, other, resumed):
    """Check that a hello of a member's new process is accepted only if it continues the earlier process."""
    said = Topic.HELLO, Departure.NO, 0, 99, made.incarnation, made.run, frozenset(), frozenset()
    hello = ControlMessage(*said, pace=int(resumed), more=made.card)
    if resumed:  # the new process requests the last messages again
        made.hear(1, hello)
        assert other.incarnation == 99
        return
    with pytest.raises(Rejected, match="a process of bob has started anew, without the checkpoint") as told:
        made.hear(1, hello)
    assert told.value.reason == RefusalReason.ANOTHER_INCARNATION
    assert (other.incarnation, other.heard) == (7, 0)


@pytest.mark.parametrize("cause", ["absent", "stalled", "refused", "told"])
def test_a_removal_keeps_its_reason(cause):
    made = membership(asynchronous=True)
    other = agree(made)
    if cause == "absent":
        made.hear_life(1, False)
        other.lost -= 6
        made.remove_gone()
    elif cause == "stalled":
        other.advanced -= 20
        made.remove_stalled([1], 10.0)
    elif cause == "refused":
        for step in range(REFUSALS):
            made.refuse(1, RefusalReason.WRONG_MASS, step)
    else:
        agree(made, 2)
        said = Topic.MEMBERS, Departure.NO, 0, 7, made.incarnation, made.run, frozenset({1}), frozenset()
        made.hear(2, ControlMessage(*said))
    assert made.closed == {1}
    words = {
        "absent": "bob was absent for 5 s",
        "stalled": "bob was here, in step -1, and did not advance for 10 s",
        "refused": f"bob's message in step {REFUSALS - 1} was refused: wrong mass",
        "told": "bob was removed by carol",
    }
    assert explain(other) == words[cause]
    assert neighbors.waited_in_vain([other], 0) is (Refused if cause == "refused" else Absent)


def test_errors_of_the_program_name_members_and_reasons():
    at = Places(3)
    made = at.open(0, mode="asynchronous")
    try:
        for step in range(REFUSALS):
            made.refuse(2, RefusalReason.NOT_FINITE, step)
        said = made.failure("removed:", made.closed, ", and starting anew would cost more")
        assert isinstance(said, Refused)
        assert str(said).startswith("peer p0: removed: p2 (absent), and starting anew would cost more: p2's message in")
        waits = made.failure("waiting for", [1], " to be done")
        assert isinstance(waits, Absent)
        assert str(waits) == "peer p0: waiting for p1 (absent) to be done: p1 was never heard"
        assert str(made.failure("all others have left", ())) == "peer p0: all others have left"
    finally:
        made.close()


def test_a_liars_count_survives_a_restart_of_the_receiver():
    at = Places(3)
    again = at.open(0, mode="asynchronous", refused={1: {"wrong-mass": REFUSALS - 1}})
    try:
        assert again.closed == set()
        again.refuse(1, RefusalReason.NOT_FINITE, 9)
        assert again.closed == {1}
    finally:
        again.close()


def test_in_step_a_party_that_returns_when_all_have_ended_is_told_so():
    at = Places(3)
    again = at.open(0, patience=0.3)
    try:
        again.ready(5, everyone=False)
        with pytest.raises(Absent, match="since this one returned: all others have ended or are absent; its checkpoin"):
            again.collect(5, [1])
    finally:
        again.close()


def test_links_of_others_are_counted_though_nobody_asks_for_the_status(monkeypatch):
    at = Places(3)
    made = at.open(0)
    try:
        guests = made._incoming._guests
        with made._changed:
            guests._open[bytes(16)] = "p1", time.monotonic() - SILENCE - 1
        until = time.monotonic() + 20
        while not made.rejections[OTHERS] and time.monotonic() < until:
            time.sleep(0.05)
        assert made.rejections == Counter({OTHERS: 1})
    finally:
        made.close()


def test_handshakes_have_a_limit_and_files_the_hard_one():
    identity = SimpleNamespace(authority="ca", certificate="c", key="k", check_name=lambda name: None)
    made = session.settings("test", "bob", session.Address("127.0.0.1", 7800), {"alice": None}, identity)  # pyright: ignore[reportArgumentType]
    assert made["listen"]["endpoints"] == ["tls/127.0.0.1:7800#tls_handshake_timeout_ms=2000"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        session.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
