"""What `hyperpush peer`, `swarm` and `certificates` do: one process per party, next to its own data."""
