"""Compare the cards of two peers: their versions of JAX, configurations and code must agree."""

from hyperpush.engines.transport.wire import RefusalReason
from hyperpush.engines.transport.zenoh.control import Card

NOT_COMPARED = bytes(16)  # the code digest of a program that cannot be compared


def difference(name: str, theirs: Card, me: str, ours: Card) -> tuple[RefusalReason, str] | None:
    """Return why two peers must not exchange messages, and a text with both values; None if their cards agree."""
    if theirs.jax != ours.jax:
        return RefusalReason.ANOTHER_JAX, f"{name} has JAX {theirs.jax}, {me} has JAX {ours.jax}"
    if theirs.configuration != ours.configuration:
        held = _shown(name, theirs.configuration), _shown(me, ours.configuration)
        return RefusalReason.ANOTHER_CONFIGURATION, f"{held[0]} holds another configuration than {held[1]}"
    if theirs.code != ours.code:  # code that cannot be compared has the same digest `NOT_COMPARED` at all parties
        held = _shown(name, theirs.code), _shown(me, ours.code)
        return RefusalReason.ANOTHER_CODE, f"{held[0]} runs other code than {held[1]}"
    return None


def _shown(name: str, digest: bytes) -> str:
    return f"{name} ({digest.hex()[:16]}…)"
