"""Parties are killed and stopped, and messages are delayed, by a seeded schedule: no mass is created or lost."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines.peer.hall import Hall, Kept, Seat, walk
from engines.peer.parties import push_sum, values

import hyperpush as hp
from hyperpush.engines.peer import ending
from hyperpush.engines.transport import LAST, LEAD
from hyperpush.engines.transport.retransmission import Backoff
from hyperpush.engines.transport.zenoh.links import Link
from hyperpush.engines.transport.zenoh.parts import split

CLIENTS, ROUNDS = 4, 25
START = values(CLIENTS)


class Turns(Hall):
    """A hall in which parties act one at a time; a seed determines their order and all faults.

    A tick is one party's turn. A message arrives some ticks after it was sent. A killed party returns some ticks
    later.
    """

    def __init__(self, clients, seed, stores):
        super().__init__(clients, patience=600.0)
        self.rng = np.random.default_rng([seed, 11])
        self.tick, self.turn, self.stores = 0, None, stores
        self.due, self.steps = [], dict.fromkeys(range(clients), 0)
        self.asleep = dict.fromkeys(range(clients), 0)
        self.doomed, self.kills, self.over = {}, 0, set()  # number of messages until a party dies

    def pass_on(self, client):
        """End a turn, and wait for the next one."""
        with self.lock:
            self.turn = None
            self.lock.notify_all()
            self.lock.wait_for(lambda: self.turn == client, 300)
            assert self.turn == client

    def back(self, client):
        self.asleep[client] = self.tick + int(self.rng.integers(5, 60))
        self.pass_on(client)
        super().back(client)

    def play(self, check):
        """Assign turns until all parties have finished."""
        while len(self.over) < self.clients:
            with self.lock:
                self.tick += 1
                for late in [late for late in self.due if late[0] <= self.tick]:
                    self.due.remove(late)
                    if self.alive[late[1]]:
                        self.mail[late[1]].append(late[2:])
                awake = [c for c in range(self.clients) if c not in self.over and self.asleep[c] <= self.tick]
                if not awake:
                    continue
                chosen = int(self.rng.choice(awake))
                fate = self.rng.random()
                if fate < 0.01:
                    self.asleep[chosen] = self.tick + int(self.rng.integers(20, 120))  # stopped
                    continue
                if fate < 0.04 and self.kills < 12 and self.stores[chosen].kept is not None:
                    self.kills += 1
                    self.doomed[chosen] = int(self.rng.integers(0, 4))
                self.turn = chosen
                self.lock.notify_all()
                assert self.lock.wait_for(lambda: self.turn is None, 300)
                check()


class TurnSeat(Seat):
    """A member's transport in a hall with turns."""

    def send(self, to, step, payload):
        hall = self.hall
        with hall.lock:
            left = hall.doomed.get(self.client)
            if left == 0:
                del hall.doomed[self.client]
                hall.die(self.client)
                raise ConnectionAbortedError
            if left is not None:
                hall.doomed[self.client] = left - 1
            # a message may be sent twice, each copy with a random delay
            for _ in range(1 + (hall.rng.random() < 0.1)):
                hall.due.append((hall.tick + int(hall.rng.integers(1, 30)), to, self.client, bytes(payload)))

    def collect(self, step, expected):
        hall = self.hall
        while True:
            hall.pass_on(self.client)
            self.hear()
            if step >= LAST:
                break
            hall.steps[self.client] = max(hall.steps[self.client], step)
            here = [each for each in range(hall.clients) if each not in self.said and each != self.client]
            if all(hall.steps[each] >= step - LEAD for each in here):
                break
        found, hall.mail[self.client] = hall.mail[self.client], []
        return found

    def missing(self):
        self.hall.pass_on(self.client)
        return super().missing()


def mass_of_all(stores):
    """Sum the mass of all parties and links from their stores: a party that has stored nothing has sent nothing."""
    facts = [store.load() for store in stores]
    channels = [None if each is None else each["channels"][0] for each in facts]
    total = 0.0
    for client, (each, channel) in enumerate(zip(facts, channels, strict=True)):
        if each is None or channel is None:
            total += 1.0
            continue
        kept = each["own"] if each["stage"] == 0 else 1.0
        total += kept * channel["mass"] + channel["pending"][-1]
        for target, sent in channel["out"][1].items():
            there = channels[int(target)]
            taken = None if there is None else there["in"][1].get(str(client))
            total += sent[-1] - (0.0 if taken is None else taken[-1])
    return total


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30))])
def test_mass_is_the_same_at_every_pause_whoever_is_killed_stopped_or_late(seed, monkeypatch):
    monkeypatch.setattr(ending, "LOOK", 0.0)
    monkeypatch.setattr(Backoff, "is_due", lambda backoff: True)
    stores = [Kept() for _ in range(CLIENTS)]
    hall, least = Turns(CLIENTS, seed, stores), [1.0]
    network = hp.networks.RandomDirected(CLIENTS, probability=(0.4, 0.8))
    found, peers, failures = {}, {}, []

    def party(client):
        try:
            with hall.lock:
                hall.lock.wait_for(lambda: hall.turn == client, 300)
            found[client], peers[client] = walk(
                hall,
                network,
                push_sum(ROUNDS),
                lambda c: (jnp.asarray(START[c]), jnp.ones(())),
                client,
                store=stores[client],
                dies=[None] * 12,
                seat=TurnSeat,
            )
        except BaseException as failure:
            failures.append(failure)
        finally:
            with hall.lock:
                hall.over.add(client)
                hall.turn = None
                hall.lock.notify_all()

    def check():
        assert mass_of_all(stores) == pytest.approx(CLIENTS, rel=1e-12)
        held = [store.load() for store in stores]
        least.extend(each["channels"][0]["mass"] for each in held if each is not None)

    threads = [threading.Thread(target=party, args=(client,), daemon=True) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    hall.play(check)
    assert not failures, failures
    assert hall.kills >= 2
    for peer in peers.values():  # no party is taken for a liar, and each has received enough from the others
        assert not peer.counts.rejections["wrong-mass"]
        assert peer.counts.isolation == ""
    assert min(least) > 0.02  # no party has sent away all its mass
    with jax.enable_x64(True):
        assert sum(float(mass) for _, mass in found.values()) == pytest.approx(CLIENTS, rel=1e-12)
        np.testing.assert_allclose(sum(np.asarray(w) for w, _ in found.values()), START.sum(0), atol=1e-11)


def test_what_is_of_rounds_to_come_is_handed_up_at_ones_own_pace():
    """After a restart a party is behind the others: their totals count at once, as acknowledgments do."""
    link = Link(1 << 20, in_step=False)
    for number, step in enumerate((7, 0, 9)):
        for header, part in split(number, step, b"%d" % step):
            link.add(header, bytes(part), 0)
    assert link.take(3) == [b"0", b"7", b"9"]
    assert link.take(9) == []
    assert link.has(9)
    assert not link.has(10)
