"""Engines host clients and interpret programs: on one device, on many, or one process per client."""

from hyperpush.engine import peer as peer
from hyperpush.engine import shard as shard
from hyperpush.engine import simulate as simulate
