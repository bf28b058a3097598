"""A `Transport` on Eclipse Zenoh: one session per peer, links to its neighbors only, nobody in between."""
