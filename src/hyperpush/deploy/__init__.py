"""Implementation of `hyperpush peer`, `swarm` and `certificates`: one process per party, next to its own data."""
