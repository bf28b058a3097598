"""One client per process or thread: it walks the program around its own jitted leaves and talks through a transport.

Everything that arrives is bytes from outside: it is decoded and checked before it touches the state, and what does not
fit is counted and dropped. On links that lose messages, conserved quantities travel as running sums per link.

A peer with a `Store` writes where it is in the program, its state and the totals of its links before it sends: killed
at any moment, it goes on from there, sends the same again, and no mass is lost or doubled.
"""

from hyperpush.engines.peer.durable import Store as Store
from hyperpush.engines.peer.leaves import row as row
from hyperpush.engines.peer.members import Left as Left
from hyperpush.engines.peer.members import Members as Members
from hyperpush.engines.peer.walk import SERVER as SERVER
from hyperpush.engines.peer.walk import Peer as Peer
from hyperpush.engines.peer.walk import check_conserved as check_conserved
