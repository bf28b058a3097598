"""The first thing to run: what a model of one's own wins for twenty clients."""
