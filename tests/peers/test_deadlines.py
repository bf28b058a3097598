import numpy as np
import pytest

from hyperpush.peers.deadlines import Deadline


def test_mean_plus_four_deviations_as_in_rfc_6298():
    link, waits = Deadline(most=100.0), np.random.default_rng(0).uniform(0.1, 0.3, 50)
    mean, deviation = waits[0], waits[0] / 2
    link.waited(waits[0])
    for wait in waits[1:]:
        deviation = 0.75 * deviation + 0.25 * abs(mean - wait)
        mean = 0.875 * mean + 0.125 * wait
        link.waited(wait)
    assert link.seconds == pytest.approx(mean + 4 * deviation)


def test_bounds_and_the_first_wait():
    link = Deadline(least=0.5, most=3.0)
    assert link.seconds == 3.0
    link.waited(0.0)
    assert link.seconds == 0.5
    link.waited(1000.0)
    assert link.seconds == 3.0


def test_a_slow_link_gets_more_time_and_a_lossy_one_does_not():
    slow, lossy = Deadline(least=0.001, most=10.0), Deadline(least=0.001, most=10.0)
    for step in range(200):
        slow.want(step, step)
        slow.came(step, step + 1.5)  # always after we went on
        lossy.want(step, step)
        if step % 2:
            lossy.came(step, step + 0.01)
    assert slow.seconds == pytest.approx(1.5, rel=0.01)
    assert lossy.seconds == pytest.approx(0.01, rel=0.01)


def test_what_nobody_waited_for_says_nothing_and_old_wants_are_forgotten():
    link = Deadline()
    link.came(3, 1.0)
    assert link.mean is None
    for step in range(10_000):
        link.want(step, 0.0)
    assert len(link._wanted) <= 256
