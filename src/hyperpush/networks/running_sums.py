"""Push-sum that survives lost, late, repeated and reordered messages: running sums, one per directed edge.

The sender j of edge j → i adds each share to a total σ and sends (counter, σ) instead of the share. The receiver
remembers ρ, the last total it has accounted for, and adds σ − ρ: whatever was lost comes with the next message. At
every moment

    Σ_i w_i + Σ_edges (σ − ρ)

is what it was at the start. Both ends need the edge's own total: a single total per sender creates mass as soon as its
set of receivers changes. The counter refuses messages that were overtaken, which would otherwise take mass back and
turn push weights negative.

Vectors are flat float64 (values and push weight together): a total grows with the rounds, and what is added to it does
not.

After C. N. Hadjicostis, N. H. Vaidya, A. D. Domínguez-García, "Robust distributed average consensus via exchange of
running sums", IEEE Transactions on Automatic Control 61 (6), 2016.
"""

from typing import final

import numpy as np
from jaxtyping import Float64

from hyperpush.base.errors import InvalidInput

Vector = Float64[np.ndarray, " size"]


@final
class Outgoing:
    """One client's totals σ and counters, by target; an edge that is not used keeps its own.

    Args:
        size: The length of the vectors.

    Example:
        The first message is lost. The second one brings its share, too.

        >>> import numpy as np
        >>> from hyperpush.networks.running_sums import Incoming, Outgoing
        >>> sender, receiver = Outgoing(1), Incoming(1)
        >>> lost = sender.add(1, np.array([0.25]))
        >>> counter, total = sender.add(1, np.array([0.5]))
        >>> receiver.take(0, counter, total).tolist()
        [0.75]
    """

    def __init__(self, size: int):
        self.size = size
        self.totals: dict[int, Vector] = {}
        self.counters: dict[int, int] = {}

    def add(self, target: int, share: Vector) -> tuple[int, Vector]:
        """Put `share` on the edge to `target`; returns the (counter, total) to send. The total is read-only."""
        counter = self.counters.get(target, 0) + 1
        total = self.total(target) + _check_vector("share", share, self.size)
        total.flags.writeable = False
        self.counters[target], self.totals[target] = counter, total
        return counter, total

    def total(self, target: int) -> Vector:
        """σ of the edge to `target`."""
        return self.totals.get(target, np.zeros(self.size))


@final
class Incoming:
    """One client's accounted totals ρ and last counters, by sender.

    Args:
        size: The length of the vectors.

    Example:
        A message that was overtaken adds nothing.

        >>> import numpy as np
        >>> from hyperpush.networks.running_sums import Incoming
        >>> receiver = Incoming(1)
        >>> receiver.take(0, 2, np.array([0.75])).tolist(), receiver.take(0, 1, np.array([0.25]))
        ([0.75], None)
    """

    def __init__(self, size: int):
        self.size = size
        self.totals: dict[int, Vector] = {}
        self.counters: dict[int, int] = {}

    def take(self, sender: int, counter: int, total: Vector) -> Vector | None:
        """What a message of `sender` adds to this client, or None if a message at least as new came before it."""
        total = _check_vector("total", total, self.size)
        if counter <= self.counters.get(sender, 0):
            return None
        increment = total - self.total(sender)
        # A copy: the caller's array may live in a buffer that is used again.
        self.counters[sender], self.totals[sender] = counter, total.copy()
        return increment

    def total(self, sender: int) -> Vector:
        """ρ of the edge from `sender`."""
        return self.totals.get(sender, np.zeros(self.size))


def in_flight(outgoing: Outgoing, target: int, incoming: Incoming, sender: int) -> Vector:
    """σ − ρ, what is on its way, of the edge from `sender` (who owns `outgoing`) to `target` (who owns `incoming`)."""
    return outgoing.total(target) - incoming.total(sender)


def _check_vector(name: str, vector: Vector, size: int) -> Vector:
    if vector.dtype != np.float64 or vector.shape != (size,):
        raise InvalidInput(name, f"{vector.dtype}{list(vector.shape)}", f"a float64 vector of length {size}")
    return vector
