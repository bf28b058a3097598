"""Compiled engines: a program becomes XLA loops over stacked clients, which a thin loop on the host starts."""
