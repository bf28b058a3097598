"""The transport itself: three peers with mutual TLS in one process."""

import threading
import time

import numpy as np
import pytest
from peers.parties import Places, certified, together

from hyperpush.engine.transport import Transport
from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.peers.parts import PART_BYTES
from hyperpush.peers.zenoh import Zenoh

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
            return transport.status(), transport.rejections.total, transport.sent_messages
        finally:
            transport.close()
            transport.close()

    for seen, rejected, sent in together(CLIENTS, party):
        assert (rejected, sent) == (0, 16)
        for link in seen.values():
            assert link["step"] == 7
            assert link["received_bytes"] >= LONG + 70


def test_a_peer_that_dies_is_noticed_and_what_it_missed_is_sent_again(places):
    at = places()
    first, second, third = (at.open(client) for client in range(CLIENTS))
    try:
        together(CLIENTS, lambda client: (first, second, third)[client].ready())
        second.close()
        until(lambda: not first.alive(1) and not third.alive(1))
        for step in range(4):
            first.send(1, step, body(0, step))
            first.send(2, step, body(0, step))
            assert third.collect(step, [0]) == [(0, body(0, step))]
        again = at.open(1)
        try:
            again.ready(step=2)  # it has stored what came before
            until(lambda: first.alive(1) and third.alive(1))
            assert again.collect(2, [0]) == [(0, body(0, 2))]
            assert again.collect(3, [0]) == [(0, body(0, 3))]
            again.acknowledge(4)
            until(lambda: not first._others[1].kept)
        finally:
            again.close()
    finally:
        first.close()
        third.close()


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
        with pytest.raises(HyperpushError, match=r"peer p0: no hello within 0\.3 s from p1, p2"):
            alone.ready()
        with pytest.raises(HyperpushError, match=r"peer p0, step 5: no message within 0\.3 s from p1 \(gone\)"):
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
        until(lambda: not first.alive(2) and not second.alive(2))
        second.send(0, 0, b"here")
        got = []
        until(lambda: got.extend(first.collect(0, [1, 2])) or got)
        assert got == [(1, b"here")]
        until(lambda: first.collect(1, [2]) == [] and first.closed == {2})
        until(lambda: second.closed == {2})  # it was told, or saw it itself
        late = at.open(2, **options)
        try:
            with pytest.raises(HyperpushError, match="closed out by p"):
                until(lambda: late.ready(everyone=False), 30)
        finally:
            late.close()
    finally:
        first.close()
        second.close()


def test_bad_arguments_are_named():
    names, there = ["a", "b"], None
    for options, field in (
        ({"client": 2}, "client"),
        ({"links": {"c": there}}, "links"),
        ({"links": {"a": there}}, "links"),
        ({"mode": "sometimes"}, "mode"),
        ({"patience": 0.0}, "patience"),
        ({"close_after": -1.0}, "close_after"),
        ({"run": "a/b"}, "run"),
    ):
        given = {"run": "test", "names": names, "client": 0, "links": {"b": there}, **options}
        with pytest.raises((InvalidInput, TypeError), match=field):
            Zenoh(**given)
