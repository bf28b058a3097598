"""Implementation of `hyperpush peer`, `swarm` and `certificates`, which run one process per party next to its data."""
