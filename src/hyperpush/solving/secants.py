"""The last changes of a point and of the gradient there, which accelerate and judge a client's steps."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WORSE = 100  # growth of the tracked gradient over its smallest norm at which a client returns and takes plain steps
PATIENCE = 100  # steps without a smaller tracked gradient before plain steps are taken
MIXED = 1  # largest ratio of mixing to change at which a curvature's sign counts; beyond, the change compares clients
REACH = 10  # longest step along the last changes, as a multiple of the longest of these changes
WINDOW = 20  # changes per remembered smallest curvature; only two such windows count, as older changes were badly mixed


class Secants(eqx.Module):
    """The last k points and tracked gradients of a client, and the curvatures of the mean cost along their changes.

    Changes are differences of successive points, so 2k vectors are enough.
    """

    points: Float[Array, "k d"]  # q, the latest first
    slopes: Float[Array, "k d"]  # tracked gradients at these points
    mixing_ratios: Float[Array, " k"]  # part of each change due to mixing
    pace: Float[Array, ""]  # 1 for accelerated steps; below 1: plain steps with this share of the step size
    least: Float[Array, ""]  # size of the smallest tracked gradient at this pace
    since: Int[Array, ""]  # steps since the smallest tracked gradient
    smallest: Float[Array, ""]  # smallest curvature along the last changes, at most `WINDOW`; 0: none yet
    earlier: Float[Array, ""]  # smallest curvature along the `WINDOW` changes before; 0: none
    age: Int[Array, ""]  # number of changes in `smallest`
    flat: Int[Array, ""]  # number of steps in a row with hardly any change of the tracked gradient
    latest: Float[Array, ""]  # curvature along the latest change, with its sign; 0: not known, or too much mixing

    @staticmethod
    def start(count: int, q: Float[Array, " d"], slope: Float[Array, " d"], earlier: Float[Array, ""]) -> "Secants":
        none, zero = jnp.zeros(count, q.dtype), jnp.zeros((), jnp.int32)
        one, least = jnp.ones((), q.dtype), jnp.sqrt(jnp.finfo(q.dtype).max)  # none yet; states must be finite
        unknown = jnp.zeros_like(one)
        return Secants(
            none[:, None] + q, none[:, None] + slope, none, one, least, zero, unknown, earlier, zero, zero, unknown
        )

    def advance(
        self,
        q: Float[Array, " d"],
        slope: Float[Array, " d"],
        aim: Float[Array, " d"],
        step_size: Float[Array, ""],
        floor: Float[Array, ""],
        step: Int[Array, ""],
    ) -> tuple["Secants", Float[Array, " d"]]:
        """Return the secants after this point, and the next displacement. `aim` is q before it was mixed.

        Changes of the tracked gradient below `floor` count as rounding.
        """
        known = step > 1  # until step 1 the tracked gradient is the client's gradient alone
        rise, mixing, size = jnp.linalg.norm(slope), jnp.linalg.norm(q - aim), jnp.linalg.norm(q - self.points[0])
        mixing_ratio = jnp.where(mixing < 1e3 * size, mixing / jnp.where(size > 0, size, 1), 1e3)
        mixing_ratios = jnp.where(known, jnp.roll(self.mixing_ratios, 1).at[0].set(mixing_ratio), 0)
        accelerates = self.pace == 1
        worse = known & (rise > WORSE * self.least) & (rise > floor)
        slower = worse | (accelerates & (self.since >= PATIENCE))
        record = known & (rise > 0) & ((rise < self.least) | slower)
        pace = jnp.where(slower, jnp.where(accelerates, 0.5, self.pace / 4), self.pace)
        accelerated = self._accelerate(q, slope, jnp.max(mixing_ratios), step_size, known)
        # The best combination for one client can be bad for all, such as where its own Hessian is zero. Then mixed
        # values are worse, so all clients notice it within about one step. A client returns by a displacement and not
        # by a copy of its earlier state. So sums of pushed values are conserved whichever clients return, and when.
        plain = jnp.where(worse, self.points[0] - q, -pace * step_size * slope)
        turn, sound = jnp.linalg.norm(slope - self.slopes[0]) + floor, self._is_sound(slope, floor)
        flat = turn * step_size <= jnp.sqrt(jnp.finfo(q.dtype).eps) * size
        current = _least(self.smallest, self._latest(q, slope, floor))
        full = known & (self.age >= WINDOW)
        after = Secants(
            points=_newest(self.points, q, known),
            slopes=_newest(self.slopes, slope, known),
            mixing_ratios=mixing_ratios,
            pace=pace,
            least=jnp.where(record, rise, self.least),
            since=jnp.where(known & ~record, self.since + 1, 0).astype(jnp.int32),
            smallest=jnp.where(known & ~full, current, jnp.where(full, 0, self.smallest)),
            earlier=jnp.where(full, current, self.earlier),
            age=jnp.where(full, 0, self.age + (known & sound)).astype(jnp.int32),
            flat=jnp.where(known & flat & (size > 0), self.flat + 1, 0).astype(jnp.int32),
            latest=jnp.where(known & sound & (mixing_ratio <= MIXED), self._curvature_to(q, slope), 0),
        )
        return after, jnp.where(pace == 1, accelerated, plain)

    def _accelerate(
        self, q: Array, slope: Array, mixing_ratio: Array, step_size: Array, known: Array
    ) -> Float[Array, " d"]:
        """Return a step from the combination of the last changes with the smallest gradient (Anderson 1965)."""
        moves = jnp.where(known, _changes(q, self.points), 0)
        turns = jnp.where(known, _changes(slope, self.slopes), 0)
        weights = smallest(turns, slope, mixing_ratio)
        along = weights @ moves
        size, most = jnp.linalg.norm(along), REACH * jnp.max(jnp.linalg.norm(moves, axis=1))
        share = jnp.where(size > most, most / jnp.where(size > 0, size, 1), 1)
        return -share * along - step_size * (slope - share * (weights @ turns))

    def curvature(self, q: Float[Array, " d"], slope: Float[Array, " d"], floor: Float[Array, ""]) -> Float[Array, ""]:
        """Return the smallest curvature along recent changes, including the one to (q, slope); 0: not known.

        Steps that converge slowly go along directions of small curvature, so recent changes reveal small curvatures.
        """
        return _least(self.remembered, self._latest(q, slope, floor))

    @property
    def remembered(self) -> Float[Array, ""]:
        """The smallest curvature of all remembered changes; 0: not known."""
        return _least(self.smallest, self.earlier)

    def _latest(self, q: Float[Array, " d"], slope: Float[Array, " d"], floor: Float[Array, ""]) -> Float[Array, ""]:
        """Return the curvature along the change to (q, slope); an upper bound if the change is mostly rounding."""
        size = jnp.linalg.norm(q - self.points[0])
        spoiled = jnp.where(self._is_sound(slope, floor), 0, floor) / jnp.where(size > 0, size, 1)
        most = jnp.sqrt(jnp.finfo(size.dtype).max)
        return jnp.where(size > 0, jnp.clip(jnp.abs(self._curvature_to(q, slope)) + spoiled, 1 / most, most), 0)

    def _curvature_to(self, q: Float[Array, " d"], slope: Float[Array, " d"]) -> Float[Array, ""]:
        """Return the curvature along the change to (q, slope), with its sign."""
        move, size = q - self.points[0], jnp.linalg.norm(q - self.points[0])
        most, safe = jnp.sqrt(jnp.finfo(size.dtype).max), jnp.where(size > 0, size, 1)
        return jnp.clip(move @ (slope - self.slopes[0]) / safe / safe, -most, most)

    def _is_sound(self, slope: Float[Array, " d"], floor: Float[Array, ""]) -> Bool[Array, ""]:
        return jnp.linalg.norm(slope - self.slopes[0]) > floor


def smallest(
    turns: Float[Array, "k d"], slope: Float[Array, " d"], mixing_ratio: Float[Array, ""]
) -> Float[Array, " k"]:
    """Return the weights w that minimize ‖slope − w·turns‖, regularized by the share of mixing; 0 for zero turns."""
    sizes = jnp.linalg.norm(turns, axis=1)
    scale = jnp.where(sizes > 0, 1 / jnp.where(sizes > 0, sizes, 1), 0)
    unit = turns * scale[:, None]
    least = 100 * jnp.finfo(turns.dtype).eps
    normal = unit @ unit.T + jnp.maximum(0.1 * mixing_ratio**2, least) * jnp.eye(turns.shape[0], dtype=turns.dtype)
    return jnp.linalg.solve(normal, unit @ slope) * scale


def _changes(latest: Float[Array, " d"], rows: Float[Array, "k d"]) -> Float[Array, "k d"]:
    """Return the differences between successive rows, the latest first."""
    return jnp.concatenate([latest[None], rows[:-1]]) - rows


def _newest(rows: Float[Array, "k d"], row: Float[Array, " d"], known: Bool[Array, ""]) -> Float[Array, "k d"]:
    """Return the rows with `row` in front and without the last one; copies of `row` if the others are not known."""
    return jnp.where(known, jnp.concatenate([row[None], rows[:-1]]), row)


def _least(one: Float[Array, ""], two: Float[Array, ""]) -> Float[Array, ""]:
    """Return the minimum of two positive numbers; 0 means unknown."""
    return jnp.where((one > 0) & (two > 0), jnp.minimum(one, two), jnp.maximum(one, two))
