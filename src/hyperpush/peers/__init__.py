"""Peers on a real network: one process per party, next to its own data, over Eclipse Zenoh."""
