import time

import pytest
from peers.parties import Places, together

from hyperpush.engine.faults import Faults
from hyperpush.peers.deadlines import Deadline, Typical
from hyperpush.peers.faulty import Faulty


def test_the_longest_but_one_of_the_last_sixteen():
    rounds = Typical()
    assert rounds.seconds is None
    rounds.add(9.0)  # compiled
    assert rounds.seconds == 9.0
    for number in range(14):
        rounds.add(0.1 * (number % 3))
        assert rounds.seconds <= 0.2  # one long round is no habit
    rounds.add(8.0)
    assert rounds.seconds == 8.0  # two are
    rounds.add(0.1)
    assert rounds.seconds == 0.2  # the first is forgotten


def test_a_round_and_the_way_with_a_margin_within_bounds():
    link = Deadline(least=0.5, most=3.0)
    assert link.seconds == 3.0
    link.pace = 0.4
    assert link.seconds == 3.0  # the way is not known
    link.way.add(0.2)
    assert link.seconds == pytest.approx(0.9)
    link.pace = 1e-6
    assert link.seconds == 0.5
    link.pace = 1e6
    assert link.seconds == 3.0


@pytest.mark.parametrize(
    "faults", [Faults(loss=0.3), Faults(loss=0.5), Faults(loss=0.3, delay=2)], ids=["0.3", "0.5", "late"]
)
def test_waiting_in_vain_does_not_make_waits_longer(faults):
    clients, rounds, most = 4, 150, 5.0
    places = Places(clients)

    def party(client):
        transport = places.open(client, mode="asynchronous", longest_wait=most)
        lossy, others = Faulty(transport, faults, 5, client), [c for c in range(clients) if c != client]
        try:
            transport.ready()
            began = time.monotonic()
            for step in range(rounds):
                for other in others:
                    lossy.send(other, step, b"x")
                lossy.collect(step, others)
            took = time.monotonic() - began
            waits = [link["deadline"] for link in transport.status().values()]
            transport.done()
            return took, lossy.lost, waits
        finally:
            transport.close()

    found = together(clients, party)
    assert sum(lost for _, lost, _ in found) > 300
    # With deadlines learned from waits, every one of them was at the longest wait after some ten rounds.
    assert max(wait for *_, waits in found for wait in waits) < most / 2
    assert max(took for took, *_ in found) < rounds * most / 4


def test_a_slow_neighbour_is_waited_for_and_one_that_nobody_hears_is_not_run_away_from():
    clients, rounds = 3, 40
    places = Places(clients)
    reached = {}

    def party(client):
        transport = places.open(client, mode="asynchronous", longest_wait=5.0)
        silent = Faulty(transport, Faults(loss=0.99 if client == 2 else 0.0), 0, client)
        others = [c for c in range(clients) if c != client]
        try:
            transport.ready()
            heard, lead = 0, 0
            for step in range(rounds):
                if client == 1:
                    time.sleep(0.03)
                reached[client] = step
                for other in others:
                    silent.send(other, step, b"x")
                heard += sum(1 for sender, _ in silent.collect(step, others) if sender == 1)
                lead = max(lead, step - min(reached.get(c, 0) for c in range(clients)))
            transport.done()
            return heard, lead
        finally:
            transport.close()

    found = together(clients, party)
    assert found[0][0] >= rounds - 3  # what came in its round, or late; the last may be under way
    assert max(lead for _, lead in found) <= 4
