"""A process that holds a member's certificate or none, and sends a peer arbitrary messages over plain Zenoh."""

import copy
import time

from hyperpush.engines.transport.zenoh import session
from hyperpush.engines.transport.zenoh.control import ControlMessage, Departure, Topic, unpack
from hyperpush.engines.transport.zenoh.parts import Stamp, split


class Impostor:
    """Context that dials one peer without access control on this side.

    Args:
        run: The name of the run.
        name: The member whose name the certificate shows.
        target: The name of the peer to attack.
        there: The address of that peer.
        who: The certificate to use; None connects without TLS.
        clients: The number of peers of the run.
        sender: The member whose name the messages carry.
        change: Changes to the settings of TLS.
    """

    def __init__(self, run, name, target, there, who, clients, sender=None, change=None, incarnation=7):
        made = copy.deepcopy(session.settings(run, name, None, {target: there}, who))
        made.pop("access_control", None)
        made["connect"]["retry"] = {"period_init_ms": 60_000, "period_max_ms": 60_000}
        if change is not None:
            change(made["transport"]["link"]["tls"])
        self.run, self.target, self.sender, self.clients = run, target, sender or name, clients
        self.incarnation, self.heard, self.session = incarnation, [], session.open_session(made)
        self._hold = self.session.declare_subscriber(
            session.message_key(run, target, self.sender, "control"),
            lambda sample: self._hear(sample.payload.to_bytes()),
        )
        self._token = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.session.close()

    def _hear(self, data):
        self.heard.append(unpack(data, self.clients))

    def live(self):
        """Declare a liveliness token under the sender's name."""
        self._token = self.session.liveliness().declare_token(session.alive_key(self.run, self.sender))

    def put(self, channel, payload, attachment=None):
        """Send bytes on a channel."""
        key = session.message_key(self.run, self.sender, self.target, channel)
        self.session.put(key, payload, attachment=attachment)

    def hello(self, seconds=10.0, **card):
        """Send a hello with the target's own card, changed as given; return the target's last hello."""
        self.live()
        until = time.monotonic() + seconds
        while not (hellos := [each for each in self.heard if each.topic == Topic.HELLO]):
            assert time.monotonic() < until
            time.sleep(0.02)
        last = hellos[-1]
        more = copy.copy(last.more)
        for name, value in {"session": session.session_number(self.session), **card}.items():
            object.__setattr__(more, name, value)
        self.digest, nobody = last.run, frozenset()
        said = ControlMessage(
            Topic.HELLO, Departure.NO, 0, self.incarnation, last.incarnation, last.run, nobody, nobody, more=more
        )
        self.put("control", said.pack(self.clients))
        time.sleep(0.3)
        return last

    def send(self, step, payload, run=None, incarnation=None):
        """Send a message of the program, stamped with this or another run and process."""
        stamp = Stamp(run or self.digest, self.incarnation if incarnation is None else incarnation)
        for header, part in split(1, step, payload, stamp):
            self.put("data", bytes(part), header)
