"""The bytes that devices send to each other."""

from collections.abc import Mapping

from hyperpush.engines.compiled.interpreter import composes
from hyperpush.engines.compiled.placement import Placement, SingleDevice
from hyperpush.networks import Network
from hyperpush.programs import Average, Exchange, Path, Profile, Server


def moved_bytes(
    placement: Placement, network: Network, found: Profile, agreed: Mapping[Path, int], agreement: int
) -> int:
    """Bytes that devices send to each other: for each place that sends, rows of a message, times how often.

    Weights that go along with wide messages of dense networks, a small part of them, are not counted.
    """
    if isinstance(placement, SingleDevice) or placement.devices == 1:
        return 0
    passes, others, total = found.passes(agreed), placement.devices - 1, 0
    for place in found.sendings:
        rows, times, node = placement.rows_out, place.messages(agreement), place.node
        by_receiver = isinstance(node, Exchange) and (
            node.reduce == "stack" or node.weights not in ("push", "gossip", "ones")
        )
        if isinstance(node, Server) or by_receiver:
            rows = others * placement.block  # all see all
        elif isinstance(node, Average) and node.by in ("exact", "tree"):  # a sum over devices, whatever clients send
            rows, times = others, 1
        elif isinstance(node, Average) and composes(network, place.floats):
            rows, times = others * placement.block, 1
        total += passes[place.body] * times * rows * place.bytes * placement.devices
    return total
