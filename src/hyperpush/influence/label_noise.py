"""Candidates for wrong labels, the most likely first."""

import numpy as np
from jaxtyping import Bool, Float, Int

from hyperpush.base.checks import check_probability
from hyperpush.influence.scores import Influence


def suspects(scores: Influence, share: float = 0.1) -> dict[str, Int[np.ndarray, " _"]]:
    """Return every client's most likely wrong labels: the examples whose removal helps all clients most.

    Wrong labels hurt the others' validation loss, so they have the lowest scores. On digits of which two clients
    labeled a tenth wrongly, 92 % of random and all systematic errors were among the worst fifth
    (docs/results/influence.md).

    **Use it** if a client may mislabel systematically: a model trained on such errors gives them a small loss. **Avoid
    it** for random errors alone, because the loss under the shared model finds more of them. Avoid it also if
    validation labels are wrong.

    Args:
        scores: The result of `hp.influence.scores`.
        share: The share of a client's examples to list, from 0 (none) to 1 (all, worst first). Begin with the expected
            share of wrong labels, and continue as long as you find some.

    Returns:
        Numbers of the examples by the client's name, the most harmful first.

    Raises:
        InvalidInput: `share` is not from 0 to 1.

    Example:
        >>> import hyperpush as hp
        >>> from hyperpush.influence.label_noise import suspects
        >>> network = hp.networks.Ring(3)
        >>> task = hp.tasks.logistic(3, seed=0, examples=20)
        >>> trained = hp.train(task, hp.SGP(200, 1.0), network, key=0)
        >>> found = hp.influence.scores(trained.task, hp.TrackedHGP(), network, key=0, curvature_steps=0)
        >>> {name: len(own) for name, own in suspects(found, 0.2).items()}
        {'0': 4, '1': 4, '2': 4}
    """
    check_probability("share", share)
    return {
        name: scores.ranking(name)[: round(share * len(own))]
        for name, own in zip(scores.names, scores.examples, strict=True)
    }


def share_found(scores: Float[np.ndarray, " m"], wrong: Bool[np.ndarray, " m"], share: float) -> float:
    """Return the fraction of wrong labels found among the `share` of a client's examples with the lowest scores."""
    worst = np.argsort(scores, kind="stable")[: round(share * len(scores))]
    return float(np.sum(wrong[worst]) / np.sum(wrong))
