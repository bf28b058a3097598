"""The first run: the gain of personal models for twenty clients."""
