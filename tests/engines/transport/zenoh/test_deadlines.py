import time

import numpy as np
import pytest
from engines.peer.parties import Places, together

from hyperpush.engines.faults import Faults
from hyperpush.engines.transport import LAST
from hyperpush.engines.transport.faulty import Faulty
from hyperpush.engines.transport.wire import Rejected
from hyperpush.engines.transport.zenoh import deadlines
from hyperpush.engines.transport.zenoh.control import ControlMessage, Departure, Topic, unpack
from hyperpush.engines.transport.zenoh.deadlines import Deadline, Rounds, Typical


def test_the_longest_but_one_of_the_last_sixteen():
    rounds = Typical()
    assert rounds.seconds is None
    rounds.add(9.0)  # includes compilation
    assert rounds.seconds == 9.0
    for number in range(14):
        rounds.add(0.1 * (number % 3))
        assert (rounds.seconds or 0.0) <= 0.2  # one long round does not count
    rounds.add(8.0)
    assert rounds.seconds == 8.0  # two long rounds do count
    rounds.add(0.1)
    assert rounds.seconds == 0.2  # the first long round is forgotten


def test_a_round_and_the_way_with_a_margin_within_bounds():
    link = Deadline(least=0.5, most=3.0)
    assert link.seconds == 3.0
    link.pace = 0.4
    assert link.seconds == 3.0  # the travel time is unknown
    link.way.add(0.2)
    assert link.seconds == pytest.approx(0.9)
    link.pace = 1e-6
    assert link.seconds == 0.5
    link.pace = 1e6
    assert link.seconds == 3.0
    link.forget()
    assert link.seconds == 3.0


@pytest.mark.parametrize("way", [0.0, 0.001, 0.12, 7.0])
def test_heartbeats_find_the_way_there_and_back_whatever_the_clocks_show(way, monkeypatch):
    """The clocks differ by a day, and each end holds messages for 13 ms; neither counts as travel time."""
    ends, clocks, now = [Deadline(), Deadline()], (0.0, 86400.0), 0.0

    def at(end):
        monkeypatch.setattr(deadlines, "microseconds", lambda: round((now + clocks[end]) * 1e6))

    for number in range(4):
        sender, receiver = number % 2, 1 - number % 2
        at(sender)
        sent, echo = deadlines.microseconds(), ends[sender].echo
        assert (echo == 0) == (number == 0)  # the first heartbeat has none to echo
        now += way
        at(receiver)
        ends[receiver].hear(70_000, sent, echo)
        now += 0.013
    for end in ends:
        assert end.way.seconds == pytest.approx(2 * way, abs=1e-5)
        assert end.pace == 0.07


def test_waits_for_others_and_steps_seen_before_are_no_rounds():
    rounds = Rounds()
    rounds.begin()
    rounds.end(3)
    assert rounds.step == 3
    assert rounds.typical.seconds is not None
    rounds.typical = Typical()
    rounds.begin()
    rounds.interrupt()
    rounds.end(4)
    rounds.begin()
    rounds.end(4)
    assert rounds.step == 4
    assert rounds.typical.seconds is None


def test_what_is_not_exactly_a_heartbeat_is_rejected():
    nobody = frozenset[int]()
    said = ControlMessage(Topic.HEARTBEAT, Departure.NO, 12, 1 << 63, 7, bytes(8), nobody, nobody, 70_000, 1 << 50, 9)
    data, random = said.pack(3), np.random.default_rng(0)
    assert unpack(data, 3) == said
    for _ in range(2000):
        bad = bytearray(data)
        bad[random.integers(len(bad))] ^= 1 << random.integers(8)
        with pytest.raises(Rejected):
            unpack(bytes(bad), 3)
    for bad in (b"", data[:-1], data + b"x", bytes(len(data))):
        with pytest.raises(Rejected):
            unpack(bad, 3)


def run(clients, rounds, faults, most=5.0, sleep=None):
    """Run empty rounds over Zenoh; return per peer its time, timely messages, longest lead and deadlines."""
    places, reached = Places(clients), {}

    def party(client):
        transport = places.open(client, mode="asynchronous", longest_wait=most)
        faulty = Faulty(transport, faults.get(client, Faults()), 5, client)
        others = [c for c in range(clients) if c != client]
        in_time, lead = dict.fromkeys(others, 0), 0
        try:
            transport.ready()
            began = time.monotonic()
            for step in range(rounds):
                time.sleep((sleep or {}).get(client, 0.0))
                reached[client] = step
                for other in others:
                    faulty.send(other, step, step.to_bytes(8, "little"))
                for sender, payload in faulty.collect(step, others):
                    in_time[sender] += int.from_bytes(payload, "little") == step
                lead = max(lead, step - min(reached.get(c, 0) for c in range(clients)))
            took, waits = time.monotonic() - began, [link["deadline"] for link in transport.status().values()]
            transport.done()
            return took, in_time, lead, max(waits), faulty.lost
        finally:
            transport.close()

    return together(clients, party)


@pytest.mark.parametrize(
    "faults", [Faults(loss=0.3), Faults(loss=0.5), Faults(loss=0.3, delay=2)], ids=["0.3", "0.5", "late"]
)
@pytest.mark.long
def test_waiting_in_vain_does_not_make_waits_longer(faults):
    rounds, most = 150, 5.0
    lossless = max(wait for *_, wait, _ in run(4, 50, {}, most))
    found = run(4, rounds, dict.fromkeys(range(4), faults), most)
    assert sum(lost for *_, lost in found) > 300
    # If deadlines were learned from waits, they would be near the longest wait after 60 rounds.
    assert max(wait for *_, wait, _ in found) < max(0.25, 10 * lossless)
    assert max(took for took, *_ in found) < rounds * most / 20


def test_a_slow_neighbor_is_waited_for():
    rounds = 40
    found = run(3, rounds, {}, sleep={1: 0.05})
    for client in (0, 2):
        assert found[client][1][1] > rounds / 2


def test_nobody_runs_away_from_a_slow_neighbor_that_is_not_heard():
    rounds = 40
    found = run(3, rounds, {2: Faults(loss=0.99)}, sleep={2: 0.05})
    assert max(lead for _, _, lead, _, _ in found) <= 5
    assert max(took for took, *_ in found) < 60  # the peers do not wait for the longest time in every round


def test_a_look_at_the_mail_after_all_steps_does_not_say_that_one_is_there():
    places = Places(2)

    def party(client):
        transport = places.open(client, mode="asynchronous", longest_wait=0.2)
        try:
            transport.ready()
            for step in range(3):
                transport.send(1 - client, step, b"x")
                transport.collect(step, [1 - client])
            for number in range(30):
                if client == 0:
                    transport.collect(LAST, [])
                else:
                    transport.collect(min(3 + number, 4), [])  # collecting a later step would wait
                time.sleep(0.02)
            seen = transport.status()[f"p{1 - client}"]["step"]
            together_until.wait(60)
            return seen
        finally:
            transport.close()

    import threading

    together_until = threading.Barrier(2)
    assert together(2, party)[1] <= 2
