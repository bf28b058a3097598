"""The places where wrong labels are searched, and the number found."""

import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.influence.label_noise import share_found, suspects


def test_shares_by_hand():
    scores, flipped = np.array([3.0, -1.0, 0.0, -5.0, 2.0]), np.array([False, True, True, True, False])
    assert share_found(scores, flipped, 0.4) == pytest.approx(2 / 3)


@pytest.mark.long
def test_suspects_are_the_lowest_scores_of_each_client():
    network, task = hp.networks.Ring(3), hp.tasks.logistic(3, 0, examples=10)
    found = hp.influence.scores(task, hp.TrackedHGP(20), network, key=0, curvature_steps=0)
    for number, (name, own) in enumerate(suspects(found, 0.3).items()):
        assert name == str(number)
        np.testing.assert_array_equal(own, np.argsort(found.examples[number])[:3])
    assert [len(own) for own in suspects(found, 0).values()] == [0, 0, 0]
    with pytest.raises(InvalidInput, match="share: got 2"):
        suspects(found, 2)
