"""The compiled engines: programs become XLA loops over stacked clients, which a thin loop on the host starts."""
