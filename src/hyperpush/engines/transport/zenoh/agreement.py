"""Comparison of the cards of two peers, which must agree."""

from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.control import Card

NOT_COMPARED = bytes(16)  # the code digest of a program that cannot be compared


def difference(name: str, theirs: Card, me: str, ours: Card) -> tuple[RefusalReason, str] | None:
    """Return the reason why two peers do not fit together, with both values; None if they fit."""
    if theirs.jax != ours.jax:
        return RefusalReason.ANOTHER_JAX, f"{name} has JAX {theirs.jax}, {me} has JAX {ours.jax}"
    if theirs.configuration != ours.configuration:
        held = _shown(name, theirs.configuration), _shown(me, ours.configuration)
        return RefusalReason.ANOTHER_CONFIGURATION, f"{held[0]} holds another configuration than {held[1]}"
    if theirs.code != ours.code:  # where it cannot be compared, it cannot at any party
        held = _shown(name, theirs.code), _shown(me, ours.code)
        return RefusalReason.ANOTHER_CODE, f"{held[0]} runs other code than {held[1]}"
    return None


def _shown(name: str, digest: bytes) -> str:
    return f"{name} ({digest.hex()[:16]}…)"
