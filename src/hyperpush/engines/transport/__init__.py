"""Transports move bytes between peers. Here are their protocol, a network in memory, and Eclipse Zenoh (`zenoh/`)."""

from hyperpush.engines.transport.memory import MemoryTransport as MemoryTransport
from hyperpush.engines.transport.protocol import LAST as LAST
from hyperpush.engines.transport.protocol import LEAD as LEAD
from hyperpush.engines.transport.protocol import Transport as Transport
