"""The compiled engines: programs become XLA loops over stacked clients, started by a thin loop on the host."""
