"""A peer runs one client in a process or thread: it walks the program, calls jitted functions and exchanges messages.

Incoming messages are untrusted bytes. They are decoded and checked before they touch the state; invalid ones are
counted and dropped. On links that lose messages, conserved quantities travel as running sums per link.

A peer with a `PeerStore` saves its place in the program, its state and the totals of its links before it sends a
message. If it is killed at any moment, a new process continues from there, and sends the same messages again. So no
mass is lost or counted twice.
"""

from hyperpush.engines.peer.checkpoint import Checkpoint as Checkpoint
from hyperpush.engines.peer.durable import PeerStore as PeerStore
from hyperpush.engines.peer.exchanges import SERVER as SERVER
from hyperpush.engines.peer.functions import row as row
from hyperpush.engines.peer.members import Left as Left
from hyperpush.engines.peer.members import Members as Members
from hyperpush.engines.peer.peer import Peer as Peer
