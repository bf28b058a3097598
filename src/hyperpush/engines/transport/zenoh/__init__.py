"""A `Transport` on Eclipse Zenoh: one session per peer, with direct links to its neighbors only."""
