"""Linear models and their convex losses, for two classes, more classes, and numbers."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import log_softmax

from hyperpush.tables.schema import Schema
from hyperpush.tasks.logistic import softplus


class LinearHead(eqx.Module):
    """A linear model and its loss, for classes or numbers.

    The last entry of each row of params is the intercept, which is not penalized. Two classes have one row, for
    logistic regression. More classes have softmax with a row for each class except the last, whose scores are 0.
    Softmax with free intercepts of all classes would have a singular Hessian.

    Args:
        kind: `"softmax"` for classes, `"regression"` for numbers.
        classes: The number of classes; 0 for numbers.
        width: The number of features.
    """

    kind: Literal["softmax", "regression"] = eqx.field(static=True)
    classes: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    @staticmethod
    def of(schema: Schema, width: int) -> "LinearHead":
        """Return the head for the label of a schema, with `width` features."""
        return LinearHead("softmax" if schema.kind == "classes" else "regression", len(schema.classes), width)

    @property
    def rows(self) -> int:
        """Number of rows of the params, each with one coefficient per feature and an intercept."""
        return self.classes - 1 if self.classes > 2 else 1

    @property
    def size(self) -> int:
        """Number of params."""
        return self.rows * (self.width + 1)

    def start(self) -> Float[Array, "rows width_and_one"]:
        """Return the starting params, which are zeros."""
        return jnp.zeros((self.rows, self.width + 1))

    def scores(self, params: Float[Array, "rows _"], inputs: Float[Array, "m width"]) -> Float[Array, "m rows"]:
        """Return the linear scores of each record, one for each row of params."""
        return inputs @ params[:, :-1].T + params[:, -1]

    def losses(self, params: Float[Array, "rows _"], inputs: Any, labels: Float[Array, " m"]) -> Float[Array, " m"]:
        """Return the cross-entropy, or the squared error, of each record."""
        scores = self.scores(params, inputs)
        if self.kind == "regression":
            return (scores[:, 0] - labels) ** 2
        if self.rows == 1:
            return softplus(scores[:, 0]) - labels * scores[:, 0]
        full = jnp.concatenate([scores, jnp.zeros_like(scores[:, :1])], axis=1)
        picked = jnp.take_along_axis(full, labels.astype(jnp.int32)[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(full, axis=1) - picked

    def penalty(self, params: Float[Array, "rows _"], l2: Any) -> Float[Array, ""]:
        """Return the penalty ½·l2·‖w‖² on the coefficients w, without the intercepts."""
        return 0.5 * l2 * jnp.sum(params[:, :-1] ** 2)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return class probabilities of scores [records, rows], in the order of the classes."""
    zeros = np.zeros((len(scores), 1))
    # One row scores the second class against the first; more rows score the other classes against the last.
    full = [zeros, scores] if scores.shape[1] == 1 else [scores, zeros]
    return np.exp(log_softmax(np.concatenate(full, axis=1), axis=1))
