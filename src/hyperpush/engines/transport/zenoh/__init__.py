"""A `Transport` on Eclipse Zenoh: each peer has one session, with direct links to its neighbors only."""
