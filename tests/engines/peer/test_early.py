"""Totals for a place that a peer has not reached: kept until their round, if the program can have such a place."""

import numpy as np
import pytest
from engines.peer.hall import Hall, Seat

from hyperpush.engines.peer.channels import Channel
from hyperpush.engines.peer.messenger import Messenger
from hyperpush.engines.peer.state import PeerState
from hyperpush.engines.transport import wire
from hyperpush.engines.transport.wire import Kind, RefusalReason

ROUND, WRONG = 5, RefusalReason.WRONG_NODE.value
TOTAL = np.array([2.0, 4.0, 1.0])


@pytest.fixture
def peer():
    """Return a function that makes a peer in round 0 whose running sums belong to a scope, or to none."""

    def make(scope):
        messenger = Messenger(0, Seat(Hall(2), 0), True, PeerState(0), 2)
        messenger.channels.add(Channel((0, 1), np.zeros(2), tolerant=True, scope=scope))
        return messenger

    return make


def hear(messenger, number):
    """Let a peer hear a total of a later round, and return its refused messages."""
    header = wire.Header(0, number, ROUND, 1, counter=1, kind=Kind.TOTAL)
    messenger.transport.hall.mail[0].append((1, wire.encode(header, TOTAL)))
    messenger.take_arrived(0, [])
    return messenger.state.counts.rejections


def test_a_place_that_no_program_without_scopes_has_is_refused_at_once(peer):
    messenger = peer(None)
    assert hear(messenger, messenger.channels.number((0, 1)) ^ 1) == {WRONG: 1}


def test_a_place_that_does_not_come_in_its_round_is_refused_then(peer):
    messenger = peer((0,))
    assert not hear(messenger, messenger.channels.number((0, 1)) ^ 1)
    messenger.state.step = ROUND
    messenger.take_arrived(ROUND, [])
    assert messenger.state.counts.rejections == {WRONG: 1}


def test_a_place_that_comes_in_its_round_gets_its_total(peer):
    messenger, ahead = peer((0,)), peer((0,))
    ahead.channels.restart((0,), (7,))
    assert not hear(messenger, ahead.channels.number((0, 1)))
    messenger.state.step = ROUND
    messenger.channels.restart((0,), (7,))
    messenger.take_arrived(ROUND, [])
    assert not messenger.state.counts.rejections
    np.testing.assert_array_equal(messenger.channels.current[0, 1].pending, TOTAL)
