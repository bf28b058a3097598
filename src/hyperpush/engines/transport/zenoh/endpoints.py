"""Zenoh publishers and subscribers of a peer, for each neighbor and channel, and the token that shows its presence."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from hyperpush.base.checks import require
from hyperpush.engines.transport.zenoh.session import alive_key, message_key, number_of

zenoh = require("zenoh", "peers")

Take = Callable[[int, bytes, bytes], None]  # the neighbor, the attachment and the payload of a message


@final
class Endpoints:
    """One peer's publishers, subscribers and presence token.

    Args:
        session: The Zenoh session.
        run: Name of the run, part of every key.
        me: This peer's name.
        others: The neighbors' names, by number.
        takes: The callback for incoming messages, by channel.
        on_life: Called with a neighbor, and True if it has appeared, False if it has vanished.
        on_link: Called with the name in the certificate at the other end of a link, and the number of the session
            there. The third argument is True for a new link, False for one that has ended.
    """

    def __init__(
        self,
        session: Any,
        run: str,
        me: str,
        others: Mapping[int, str],
        takes: Mapping[str, Take],
        on_life: Callable[[int, bool], None],
        on_link: Callable[[str | None, bytes, bool], None],
    ):
        self._session, self._publishers = session, {}
        self._held: list[Any] = []  # references, because Zenoh drops declarations without any
        new = zenoh.SampleKind.PUT

        def hear_link(event: Any) -> None:
            on_link(event.link.auth_identifier, number_of(event.link.zid), event.kind == new)

        try:
            for place, name in others.items():
                for channel, take in takes.items():
                    # A delayed heartbeat is worthless, so a congested link drops it; all other messages wait.
                    full = zenoh.CongestionControl.DROP if channel == "pace" else zenoh.CongestionControl.BLOCK
                    self._publishers[place, channel] = session.declare_publisher(
                        message_key(run, me, name, channel),
                        congestion_control=full,
                        reliability=zenoh.Reliability.RELIABLE,
                        express=channel != "data",
                    )
                    key = message_key(run, name, me, channel)
                    self._held.append(session.declare_subscriber(key, partial(_unwrap, take, place)))
                watch = session.liveliness().declare_subscriber(
                    alive_key(run, name), lambda sample, place=place: on_life(place, sample.kind == new), history=True
                )
                self._held.append(watch)
            self._held.append(session.info.declare_link_events_listener(hear_link, history=True))
            # Declared last, so that the token implies that the subscribers exist.
            self._held.append(session.liveliness().declare_token(alive_key(run, me)))
        except BaseException:
            session.close()
            raise

    def put(self, to: int, channel: str, payload: bytes, attachment: bytes | None) -> bool:
        """Send bytes to a neighbor. Return False if the session is closing."""
        try:
            self._publishers[to, channel].put(payload, attachment=attachment)
        except zenoh.ZError:
            return False
        return True

    def close(self) -> None:
        """Withdraw all declarations and close the session."""
        self._held.clear()
        self._session.close()


def _unwrap(take: Take, place: int, sample: Any) -> None:
    take(place, b"" if sample.attachment is None else sample.attachment.to_bytes(), sample.payload.to_bytes())
