"""Running sums in a plain simulation of a faulty network, and two simplifications that fail."""

from dataclasses import dataclass

import jaxtyping
import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.networks.running_sums import IncomingSums, Outgoing, in_flight

CLIENTS, LOSS, DUPLICATE, DELAY = 20, 0.3, 0.1, 5


@pytest.fixture
def unchecked():
    """Disable type checks of half a million calls; other tests check the types."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@dataclass
class Run:
    drift: float
    """Largest change of Σ w + Σ (σ − ρ) seen."""
    smallest_weight: float
    error: float
    """Largest distance of a client's w / ω from the mean at the end."""
    stale: int


class PerSender:
    """Simplification: one total per sender instead of one per edge, to which the share is added once per round."""

    def __init__(self):
        self.outgoing = Outgoing(2)
        self.share = None

    def add(self, target, share):
        if share is not self.share:
            self.share = share
            self.outgoing.add(0, share)
        return self.outgoing.counters[0], self.outgoing.total(0)

    def total(self, target):
        return self.outgoing.total(0)


class Uncounted:
    """Simplification: a receiver that accepts every message, even if a newer one has arrived before."""

    def __init__(self):
        self.incoming = IncomingSums(2)

    def take(self, sender, counter, total):
        self.incoming.counters.pop(sender, None)
        return self.incoming.take(sender, counter, total)

    def total(self, sender):
        return self.incoming.total(sender)


def simulate(rounds, outgoing=lambda: Outgoing(2), incoming=lambda: IncomingSums(2), seed=0):
    random = np.random.default_rng(seed)
    mass = np.stack([random.normal(size=CLIENTS), np.ones(CLIENTS)], axis=1)
    start, mean = mass.sum(0), mass[:, 0].mean()
    senders, receivers = [outgoing() for _ in range(CLIENTS)], [incoming() for _ in range(CLIENTS)]
    arriving = [[] for _ in range(rounds + DELAY)]
    drift, smallest, stale = 0.0, np.inf, 0
    for step in range(rounds):
        degrees = random.integers(0, 4, CLIENTS)
        # A client never draws itself, because its own number is sorted last.
        targets = np.argsort(random.random((CLIENTS, CLIENTS)) + np.eye(CLIENTS), axis=1)[:, :3].tolist()
        lost = random.random((CLIENTS, 3, 2)) < LOSS
        lost[..., 1] |= random.random((CLIENTS, 3)) >= DUPLICATE
        late = np.where(lost, -1, random.integers(0, DELAY + 1, lost.shape)).tolist()
        shares = mass / (degrees + 1)[:, None]
        mass = shares.copy()
        for sender, degree in enumerate(degrees.tolist()):
            share = shares[sender]
            for target, delays in zip(targets[sender][:degree], late[sender][:degree], strict=True):
                message = (target, sender, *senders[sender].add(target, share))
                for delay in delays:
                    if delay >= 0:
                        arriving[step + delay].append(message)
        for place in random.permutation(len(arriving[step])).tolist():
            target, sender, counter, total = arriving[step][place]
            increment = receivers[target].take(sender, counter, total)
            if increment is None:
                stale += 1
            else:
                mass[target] += increment
        arriving[step] = []
        smallest = min(smallest, mass[:, 1].min())
        if step % 100 == 99:
            edges = [(one, other) for one in range(CLIENTS) for other in range(CLIENTS) if one != other]
            moving = sum(senders[one].total(other) - receivers[other].total(one) for one, other in edges)
            drift = max(drift, np.abs(mass.sum(0) + moving - start).max())
    return Run(drift, smallest, np.abs(mass[:, 0] / mass[:, 1] - mean).max(), stale)


@pytest.mark.usefixtures("unchecked")
def test_exact_average_and_conserved_mass_on_a_bad_network():
    run = simulate(10_000)
    assert run.drift < 1e-9
    assert run.smallest_weight > 0
    assert run.error < 1e-9
    assert run.stale > 10_000


@pytest.mark.usefixtures("unchecked")
def test_one_total_per_sender_creates_mass():
    assert simulate(300, outgoing=PerSender).drift > 1e6


@pytest.mark.usefixtures("unchecked")
def test_without_the_counter_weights_become_negative():
    """The sum still telescopes, but mass is taken back from a client that has already passed it on."""
    assert simulate(300, incoming=Uncounted).smallest_weight < -0.01
    assert simulate(300).smallest_weight > 0


def test_one_edge_by_hand():
    outgoing, incoming = Outgoing(2), IncomingSums(2)
    first = outgoing.add(7, np.array([1.0, 0.5]))
    second = outgoing.add(7, np.array([2.0, 0.25]))
    other = outgoing.add(8, np.array([4.0, 0.125]))
    assert [counter for counter, _ in (first, second, other)] == [1, 2, 1]
    np.testing.assert_array_equal(first[1], [1.0, 0.5])
    np.testing.assert_array_equal(second[1], [3.0, 0.75])
    np.testing.assert_array_equal(other[1], [4.0, 0.125])
    np.testing.assert_array_equal(in_flight(outgoing, 7, incoming, 3), [3.0, 0.75])
    np.testing.assert_array_equal(incoming.take(3, *second), [3.0, 0.75])
    np.testing.assert_array_equal(in_flight(outgoing, 7, incoming, 3), [0.0, 0.0])
    assert incoming.take(3, *second) is None
    assert incoming.take(3, *first) is None
    np.testing.assert_array_equal(incoming.total(3), [3.0, 0.75])


def test_what_is_kept_cannot_be_changed_from_outside():
    outgoing, incoming = Outgoing(1), IncomingSums(1)
    share = np.ones(1)
    counter, total = outgoing.add(0, share)
    share[:] = 5
    with pytest.raises(ValueError, match="read-only"):
        total[:] = 5
    buffer = total.copy()
    incoming.take(0, counter, buffer)
    buffer[:] = 5
    assert outgoing.total(0) == incoming.total(0) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("vector", [np.zeros(3), np.zeros((1, 2)), np.array(1.0), np.zeros(2, np.float32)])
def test_wrong_vectors_change_nothing(vector):
    outgoing, incoming = Outgoing(2), IncomingSums(2)
    with pytest.raises(InvalidInput, match="length 2"):
        outgoing.add(0, vector)
    with pytest.raises(InvalidInput, match="length 2"):
        incoming.take(0, 1, vector)
    assert not any((outgoing.counters, outgoing.totals, incoming.counters, incoming.totals))
