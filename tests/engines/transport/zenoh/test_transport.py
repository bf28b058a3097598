"""The Zenoh transport: three peers with mutual TLS in one process."""

import threading
import time

import numpy as np
import pytest
from engines.peer.parties import Places, certified, together

from hyperpush.base.errors import Absent, HyperpushError, InvalidInput
from hyperpush.engines.transport import Transport
from hyperpush.engines.transport.zenoh.parts import PART_BYTES

CLIENTS = 3
LONG = 2 * PART_BYTES + 17


def body(sender, step):
    size = LONG if step == 3 else 10
    return np.random.default_rng([sender, step]).integers(0, 256, size, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return lambda: Places(CLIENTS, certified(folder / str(time.monotonic_ns()), [f"p{k}" for k in range(CLIENTS)]))


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_everybody_hears_everybody_in_step(places):
    at = places()

    def party(client):
        others = [other for other in range(CLIENTS) if other != client]
        transport = at.open(client)
        fits: Transport = transport
        assert isinstance(fits, Transport)
        try:
            transport.ready()
            for step in range(8):
                for other in others:
                    transport.send(other, step, body(client, step))
                got = transport.collect(step, others)
                assert [(sender, bytes(payload)) for sender, payload in got] == [(o, body(o, step)) for o in others]
            transport.finish()
            return transport.status(), transport.rejections.total()
        finally:
            transport.close()
            transport.close()

    for seen, rejected in together(CLIENTS, party):
        assert rejected == 0
        for link in seen.values():
            assert link["step"] == 7
            assert link["received_bytes"] >= LONG + 70


def test_a_peer_that_dies_is_noticed_and_what_it_missed_is_sent_again(places):
    at = places()
    first, second, third = (at.open(client) for client in range(CLIENTS))
    try:
        together(CLIENTS, lambda client: (first, second, third)[client].ready())
        second.close()
        until(lambda: not first.neighbors[1].alive and not third.neighbors[1].alive)
        for step in range(4):
            first.send(1, step, body(0, step))
            first.send(2, step, body(0, step))
            assert third.collect(step, [0]) == [(0, body(0, step))]
        again = at.open(1)
        try:
            again.ready(step=2)  # its checkpoint contains the earlier messages
            until(lambda: first.neighbors[1].alive and third.neighbors[1].alive)
            assert again.collect(2, [0]) == [(0, body(0, 2))]
            assert again.collect(3, [0]) == [(0, body(0, 3))]
            again.acknowledge(4)
            until(lambda: not first.links[1].unacknowledged.to_resend())
        finally:
            again.close()
    finally:
        first.close()
        third.close()


def test_the_news_that_somebody_is_done_may_overtake_its_last_message(places):
    at = places()
    transports = [at.open(client, patience=30.0) for client in range(CLIENTS)]
    try:
        together(CLIENTS, lambda client: transports[client].ready())
        transports[1].done()
        until(lambda: 1 in transports[0].settled)
        threading.Timer(0.5, transports[1].send, (0, 0, body(1, 0))).start()
        assert [(sender, bytes(payload)) for sender, payload in transports[0].collect(0, [1])] == [(1, body(1, 0))]
    finally:
        for transport in transports:
            transport.close()


def test_other_configurations_and_silent_peers_are_clear_errors(places):
    at = places()
    one, other = at.open(0, digest=b"a" * 32, patience=20), at.open(1, digest=b"b" * 32, patience=20)
    try:
        said = []

        def party(client):
            with pytest.raises(HyperpushError) as error:
                (one, other)[client].ready()
            said.append(str(error.value))

        together(2, party)
        for line in said:
            assert (b"a" * 8).hex() in line
            assert (b"b" * 8).hex() in line
            assert "p0" in line
            assert "p1" in line
    finally:
        one.close()
        other.close()
    at = places()
    alone = at.open(0, patience=0.3)
    try:
        with pytest.raises(
            Absent, match=r"peer p0: no hello within 0\.3 s from p1 \(absent\), p2 \(absent\): p1 was never"
        ):
            alone.ready()
        with pytest.raises(
            Absent, match=r"peer p0, step 5: no message within 0\.3 s from p1 \(absent\): p1 was never h"
        ):
            alone.collect(5, [1])
        waiting = threading.Timer(0.2, alone.close)
        alone.patience = 60
        waiting.start()
        with pytest.raises(HyperpushError, match="closed"):
            alone.collect(5, [1])
    finally:
        alone.close()


def test_at_its_own_pace_nobody_waits_for_the_dead_and_who_vanishes_is_closed_out(places):
    at = places()
    options = {"mode": "asynchronous", "close_after": 0.5, "longest_wait": 5.0}
    first, second, third = (at.open(client, **options) for client in range(CLIENTS))
    try:
        together(CLIENTS, lambda client: (first, second, third)[client].ready())
        third.close()
        until(lambda: not first.neighbors[2].alive and not second.neighbors[2].alive)
        second.send(0, 0, b"here")
        got = []
        until(lambda: got.extend(first.collect(0, [1, 2])) or got)
        assert got == [(1, b"here")]
        until(lambda: first.collect(1, [2]) == [] and first.closed == {2})
        until(lambda: second.closed == {2})  # it was informed, or noticed itself
        late = at.open(2, **options)
        try:
            with pytest.raises(HyperpushError, match="removed by p"):
                until(lambda: late.ready(everyone=False), 30)
        finally:
            late.close()
    finally:
        first.close()
        second.close()


@pytest.mark.long
def test_who_is_done_and_gone_is_closed_out_only_by_those_who_are_not_done(places):
    """While the others are not done, a vanished party was killed; once they are done, it may have ended."""
    options = {"mode": "asynchronous", "close_after": 0.5}
    for finished, closed in ((False, {1}), (True, set())):
        at = places()
        first, second, third = (at.open(client, **options) for client in range(CLIENTS))
        try:
            together(CLIENTS, lambda client, all=(first, second, third): all[client].ready())
            second.done()
            until(lambda here=first: here.settled == {1})
            if finished:
                first.done()
            second.close()
            until(lambda here=first: not here.neighbors[1].alive)
            assert first.missing() == (not finished)
            time.sleep(1.0)  # longer than `close_after`, after which a vanished party is removed
            assert not first.missing()
            assert first.closed == closed
            until(lambda here=third, closed=closed: here.closed == closed)
            third.done(view=frozenset({0}))  # belongs to another view than its own, so no peer is informed
            time.sleep(0.3)
            assert 2 not in first.settled
            third.done(view=frozenset(closed))
            until(lambda here=first: 2 in here.settled)
        finally:
            first.close()
            second.close()
            third.close()


def test_a_split_that_heals_leaves_both_sides_alone(places):
    """Each side has removed the other, and neither side accepts the other's claim about its own removal."""
    at = places()
    options = {"mode": "asynchronous", "close_after": 60.0}
    one, other = at.open(0, closed=[1], **options), at.open(1, closed=[0], **options)
    try:
        together(2, lambda client: (one, other)[client].ready(everyone=False))
        until(lambda: one.neighbors[1].incarnation and other.neighbors[0].incarnation)
        time.sleep(0.2)
        for transport, closed in ((one, {1}), (other, {0})):
            assert transport.missing()  # both still wait for the third
            assert transport.closed == closed
            assert transport.present([0, 1]) == []
    finally:
        one.close()
        other.close()


def test_a_message_that_nobody_would_take_is_not_sent(places):
    at = places()
    alone = at.open(0, limit=100)
    try:
        alone.send(1, 0, bytes(100))
        with pytest.raises(
            InvalidInput, match=r"message: got '101 bytes'; allowed: at most 100 bytes: smaller messages"
        ):
            alone.send(1, 0, bytes(101))
        assert alone.neighbors[1].sent_bytes == 100
    finally:
        alone.close()


def test_patience_does_not_begin_anew_with_what_does_not_fit(places):
    """A peer that collects a step again, because the first messages were invalid, waits no longer in total."""
    at = places()
    one, other = at.open(0, patience=20), at.open(1)
    ended = threading.Event()
    try:
        together(2, lambda client: (one, other)[client].ready(everyone=False))  # the third peer is absent

        def babble():
            for number in range(200):
                if ended.wait(0.05):
                    return
                other.send(0, 5, f"rubbish {number}".encode())

        one.patience, taken = 1.0, 0
        other.send(0, 5, b"rubbish")
        until(lambda: one.links[1].mail and one.neighbors[1].alive)
        talking = threading.Thread(target=babble, daemon=True)
        talking.start()
        said = ""
        while taken < 150 and not said:
            try:
                taken += len(one.collect(5, [1]))
            except HyperpushError as error:
                said = str(error)
        assert said == "peer p0, step 5: no message within 1 s from p1: p1 is there, in step 5"
        assert 0 < taken < 100
    finally:
        ended.set()
        one.close()
        other.close()


def test_who_was_away_when_another_left_learns_of_it_and_does_not_close_it_out(places):
    at = places()
    options = {"mode": "asynchronous", "close_after": 1.5}
    first, second, third = (at.open(client, **options) for client in range(CLIENTS))
    try:
        together(CLIENTS, lambda client: (first, second, third)[client].ready())
        first.members.close_after = 60.0
        second.close()
        until(lambda: not first.neighbors[1].alive and not third.neighbors[1].alive)
        third.leave(False)
        until(lambda: first.leaving == {2})
        assert first.left == set()
        assert first.missing()
        third.leave(True)
        until(lambda: first.left == {2})
        third.close()
        again = at.open(1, **options)
        try:
            again.ready()  # it does not wait for a party that has left
            until(lambda: again.left == {2})
            time.sleep(2.0)  # longer than `close_after`, after which a vanished party would be removed
            assert not again.missing()
            assert (again.closed, first.closed) == (set(), set())
            assert again.present([0, 2]) == [0]
            first.done()
            until(again.everyone_done)
            stored = at.open(2, **options, left=[1])  # its checkpoint says so, without a message
            try:
                assert stored.left == stored.leaving == {1}
            finally:
                stored.close()
        finally:
            again.close()
    finally:
        first.close()


@pytest.mark.long
def test_who_had_said_that_it_is_done_does_not_close_out_those_who_ended_meanwhile(places):
    for again in (True, False):
        alone = places().open(0, mode="asynchronous", close_after=1.0)
        try:
            alone.ready(everyone=False)
            alone.done(again=again)
            assert not alone.everyone_done()
            if again:
                until(alone.everyone_done)
            else:  # alone, it would end with a result of its own data only
                with pytest.raises(Absent, match="all others have ended or are absent; its checkpoint stays"):
                    until(alone.everyone_done)
            assert alone.closed == set()
        finally:
            alone.close()
