"""The command line `hyperpush`."""
