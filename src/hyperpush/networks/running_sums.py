"""Push-sum that survives lost, late, repeated and reordered messages: running sums, one per directed edge.

The sender j of edge j → i adds each share to a total σ and sends (counter, σ) instead of the share. The receiver
remembers ρ, the last total that it has used, and adds σ − ρ, so lost shares come with the next message. At every moment

    Σ_i w_i + Σ_edges (σ − ρ)

equals its value at the start. Each edge needs its own total: with a single total per sender, a changing set of
receivers creates mass. The receiver ignores a message whose counter is not above the last one. A message that was
overtaken would take mass back and make push weights negative.

Vectors are flat float64 (values and push weight together), because totals grow with the rounds while shares do not.

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
    """The sender's side of one client's edges: total σ and counter of each edge, by target.

    Args:
        size: Length of the vectors.

    Example:
        The first message is lost. The second message also delivers the first share.

        >>> import numpy as np
        >>> from hyperpush.networks.running_sums import IncomingSums, Outgoing
        >>> sender, receiver = Outgoing(1), IncomingSums(1)
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
        """Put `share` on the edge to `target` and return the (counter, total) to send. The total is read-only."""
        counter = self.counters.get(target, 0) + 1
        total = self.total(target) + _check_vector("share", share, self.size)
        total.flags.writeable = False
        self.counters[target], self.totals[target] = counter, total
        return counter, total

    def total(self, target: int) -> Vector:
        """Return σ of the edge to `target`."""
        return self.totals.get(target, np.zeros(self.size))


@final
class IncomingSums:
    """The receiver's side of one client's edges: last used total ρ and last counter of each edge, by sender.

    Args:
        size: Length of the vectors.

    Example:
        An overtaken message adds nothing.

        >>> import numpy as np
        >>> from hyperpush.networks.running_sums import IncomingSums
        >>> receiver = IncomingSums(1)
        >>> receiver.take(0, 2, np.array([0.75])).tolist(), receiver.take(0, 1, np.array([0.25]))
        ([0.75], None)
    """

    def __init__(self, size: int):
        self.size = size
        self.totals: dict[int, Vector] = {}
        self.counters: dict[int, int] = {}

    def take(self, sender: int, counter: int, total: Vector) -> Vector | None:
        """Return the mass that a message of `sender` adds; None if an equally new or newer message was used before."""
        total = _check_vector("total", total, self.size)
        if counter <= self.counters.get(sender, 0):
            return None
        increment = total - self.total(sender)
        # The total is copied, because the caller may reuse the buffer of its array.
        self.counters[sender], self.totals[sender] = counter, total.copy()
        return increment

    def total(self, sender: int) -> Vector:
        """Return ρ of the edge from `sender`."""
        return self.totals.get(sender, np.zeros(self.size))


def in_flight(outgoing: Outgoing, target: int, incoming: IncomingSums, sender: int) -> Vector:
    """Return σ − ρ, the mass on the edge from `sender` (owner of `outgoing`) to `target` (owner of `incoming`)."""
    return outgoing.total(target) - incoming.total(sender)


def _check_vector(name: str, vector: Vector, size: int) -> Vector:
    if vector.dtype != np.float64 or vector.shape != (size,):
        raise InvalidInput(name, f"{vector.dtype}{list(vector.shape)}", f"a float64 vector of length {size}")
    return vector
