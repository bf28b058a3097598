"""The last changes of a point and of the gradient there: a client's steps are accelerated by them, and judged."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WORSE = 100  # times the smallest tracked gradient so far: a client that has seen that goes back and takes plain steps
REACH = 10  # times the last changes, that a step may go along them
FORGET = 1.05  # by how much the smallest curvature may grow from step to step: secants of long ago were badly mixed


class Secants(eqx.Module):
    """The last k points and tracked gradients of a client, and what their changes say of the mean Hessian.

    Changes are taken between neighbors: all that is held are 2k vectors.
    """

    points: Float[Array, "k d"]  # q, the latest first
    slopes: Float[Array, "k d"]  # the tracked gradient there
    doubts: Float[Array, " k"]  # what part of each change was mixing
    accelerates: Bool[Array, ""]  # whether no tracked gradient was much larger than an earlier one
    least: Float[Array, ""]  # size of the smallest tracked gradient so far
    since: Int[Array, ""]  # steps since then
    smallest: Float[Array, ""]  # curvature along recent changes; 0: none yet
    flattest: Float[Array, ""]  # the smallest ‖change of the gradient‖/‖change of the point‖ of all

    @staticmethod
    def start(count: int, q: Float[Array, " d"], slope: Float[Array, " d"], smallest: Float[Array, ""]) -> "Secants":
        none = jnp.zeros(count, q.dtype)
        least = jnp.sqrt(jnp.finfo(q.dtype).max)  # none yet; states must be finite
        zero = jnp.zeros((), jnp.int32)
        return Secants(none[:, None] + q, none[:, None] + slope, none, jnp.ones((), bool), least, zero, smallest, least)

    def advance(
        self,
        q: Float[Array, " d"],
        slope: Float[Array, " d"],
        aim: Float[Array, " d"],
        step_size: Float[Array, ""],
        floor: Float[Array, ""],
        step: Int[Array, ""],
    ) -> tuple["Secants", Float[Array, " d"]]:
        """The next displacement from here, and the secants after it. `aim` is where q was before it was mixed."""
        known = step > 1  # the first tracked gradient that is not the own one alone belongs to step 1
        rise, mixing, size = jnp.linalg.norm(slope), jnp.linalg.norm(q - aim), jnp.linalg.norm(q - self.points[0])
        doubt = jnp.where(mixing < 1e3 * size, mixing / jnp.where(size > 0, size, 1), 1e3)
        doubts = jnp.where(known, jnp.roll(self.doubts, 1).at[0].set(doubt), 0)
        turn = jnp.linalg.norm(slope - self.slopes[0]) + floor
        record = known & (rise < self.least)
        worse = known & (rise > WORSE * self.least)
        accelerated = self._accelerated(q, slope, jnp.max(doubts), step_size, known)
        plain = -step_size * slope / 2
        # Combinations that a client alone finds best can be bad for all, such as where its own Hessian is zero. As all
        # that was mixed is worse then, everyone sees it within a step or so. A displacement leads back, and not a copy
        # of the state before: so what is pushed stays conserved, whoever goes back and when.
        back = jnp.where(self.accelerates & worse, self.points[0] - q, plain)
        after = Secants(
            points=_newest(self.points, q, known),
            slopes=_newest(self.slopes, slope, known),
            doubts=doubts,
            accelerates=self.accelerates & ~worse,
            least=jnp.where(record, rise, self.least),
            since=jnp.where(known & ~record, self.since + 1, 0).astype(jnp.int32),
            smallest=jnp.where(known, self.curvature(q, slope, floor), self.smallest),
            flattest=jnp.where(known & (size > 0), jnp.minimum(self.flattest, turn / _positive(size)), self.flattest),
        )
        return after, jnp.where(after.accelerates, accelerated, back)

    def _accelerated(self, q: Array, slope: Array, doubt: Array, step_size: Array, known: Array) -> Float[Array, " d"]:
        """From where the tracked gradient is smallest among the combinations of the last changes (Anderson 1965)."""
        moves = jnp.where(known, _changes(q, self.points), 0)
        turns = jnp.where(known, _changes(slope, self.slopes), 0)
        weights = smallest(turns, slope, doubt)
        along = weights @ moves
        size, most = jnp.linalg.norm(along), REACH * jnp.max(jnp.linalg.norm(moves, axis=1))
        share = jnp.where(size > most, most / jnp.where(size > 0, size, 1), 1)
        return -share * along - step_size * (slope - share * (weights @ turns))

    def curvature(self, q: Float[Array, " d"], slope: Float[Array, " d"], floor: Float[Array, ""]) -> Float[Array, ""]:
        """The smallest curvature of the mean cost along recent changes, the one to (q, slope) included.

        Changes that rounding, `floor`, has spoiled only count as what their curvature is at most.
        """
        move, turn = q - self.points[0], slope - self.slopes[0]
        size = jnp.linalg.norm(move)
        sound = jnp.linalg.norm(turn) > floor
        own = (jnp.abs(move @ turn) / jnp.where(size > 0, size, 1) + jnp.where(sound, 0, floor)) / _positive(size)
        own = jnp.minimum(own, jnp.sqrt(jnp.finfo(own.dtype).max))
        before = jnp.where(sound, FORGET, 1) * self.smallest
        return jnp.where(size > 0, jnp.where(before > 0, jnp.minimum(before, own), own), self.smallest)

    def turns_back(self, q: Float[Array, " d"], slope: Float[Array, " d"], floor: Float[Array, ""]) -> Bool[Array, ""]:
        """Whether the cost is curved downward along the last change."""
        move, turn = q - self.points[0], slope - self.slopes[0]
        return move @ turn < -(floor + 0.5 * jnp.linalg.norm(turn)) * jnp.linalg.norm(move)


def smallest(turns: Float[Array, "k d"], slope: Float[Array, " d"], doubt: Float[Array, ""]) -> Float[Array, " k"]:
    """The w that makes ‖slope − w·turns‖ smallest, regularized as much as the turns are in doubt; 0 for zero turns."""
    sizes = jnp.linalg.norm(turns, axis=1)
    scale = jnp.where(sizes > 0, 1 / jnp.where(sizes > 0, sizes, 1), 0)
    unit = turns * scale[:, None]
    least = 100 * jnp.finfo(turns.dtype).eps
    normal = unit @ unit.T + jnp.maximum(0.1 * doubt**2, least) * jnp.eye(turns.shape[0], dtype=turns.dtype)
    return jnp.linalg.solve(normal, unit @ slope) * scale


def _changes(latest: Float[Array, " d"], rows: Float[Array, "k d"]) -> Float[Array, "k d"]:
    """Differences between neighbors, from the latest on back."""
    return jnp.concatenate([latest[None], rows[:-1]]) - rows


def _newest(rows: Float[Array, "k d"], row: Float[Array, " d"], known: Bool[Array, ""]) -> Float[Array, "k d"]:
    """With the row in front of the others; alone where these are not known."""
    return jnp.where(known, jnp.concatenate([row[None], rows[:-1]]), row)


def _positive(number: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(number > 0, number, 1)
