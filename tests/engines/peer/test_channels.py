"""Checks of mass at a receiver: it refuses impossible mass, and reports when it has received little."""

import numpy as np
import pytest

from hyperpush.engines.peer.channels import LEAST, LITTLE, Channel
from hyperpush.engines.transport.wire import RefusalReason, Rejected

CLIENTS = 4


def channel():
    return Channel((0,), np.zeros(2), tolerant=True)


def receive(at, sender, mass):
    """Receive a total that adds this mass, checked and credited as a messenger does."""
    counter = at.incoming.counters.get(sender, 0) + 1
    total = at.incoming.total(sender) + np.array([0.0, 0.0, mass])
    at.check_mass(sender, counter, total, CLIENTS)
    at.pending = at.pending + at.incoming.take(sender, counter, total)


def exchange(at, shares):
    """Send shares of the mass to others, and take in what has arrived."""
    at.put(np.zeros(2), np.asarray(shares))
    at.take(1.0 - sum(shares))


def test_mass_that_comes_and_goes_for_long_is_no_lie():
    """In a thousand rounds among four members, each link carries far more than the total mass."""
    at = channel()
    for _ in range(1000):
        at.put(np.zeros(2), np.array([0.0, 0.25, 0.25, 0.25]))
        for sender in (1, 2, 3):
            receive(at, sender, 0.25)
        at.take(0.25)
    assert at.incoming.total(1)[-1] == pytest.approx(250)
    assert at.mass == pytest.approx(1.0)


def test_it_may_hold_the_mass_of_all_but_no_more():
    at = channel()
    for sender in (1, 2, 3):
        receive(at, sender, 1.0)
    at.take()
    assert at.mass == CLIENTS
    with pytest.raises(Rejected, match=r"would hold a mass of 4\.5, and all together have 4"):
        receive(at, 1, 0.5)


def test_small_additions_that_make_mass_are_refused_at_their_sender_alone():
    """Each added mass is in (0, n], which an older check allowed; only the liar among the senders is blamed."""
    at, blamed = channel(), []
    for number in range(60):
        exchange(at, [0.0, at.mass and 0.3, 0.3, 0.3])
        given = 0.3 * at.mass
        for sender, mass in ((1, given), (2, given), (3, 0.5 + 0.05 * number)):
            try:
                receive(at, sender, mass)
            except Rejected as rejected:
                blamed.append((sender, rejected.reason))
    assert len(blamed) >= 3
    assert set(blamed) == {(3, RefusalReason.WRONG_MASS)}


@pytest.mark.parametrize("mass", [0.0, -0.5, CLIENTS + 0.1, np.nan])
def test_a_total_adds_mass_between_nothing_and_that_of_all(mass):
    with pytest.raises(Rejected, match="is not in"):
        receive(channel(), 1, mass)


def test_a_stage_in_which_little_was_heard_says_so():
    calm, silent, drained = channel(), channel(), channel()
    for each, heard in ((calm, 0.75), (silent, 0.75 * 0.9 * LITTLE), (drained, 0.75)):
        for _ in range(50):
            each.due += 0.75
            receive(each, 1, heard)
            exchange(each, [0.0, heard, 0.0, 0.0])
    exchange(drained, [0.0, 1 - 0.1 * LEAST, 0.0, 0.0])
    assert calm.isolated == ""
    assert silent.isolated == "this party received 0.045 of the mass that the network would bring"
    assert drained.isolated.startswith("this party held only a mass of 0.0003")
    assert channel().isolated == ""  # no mass was due
