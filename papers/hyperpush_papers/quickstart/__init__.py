"""The first run: harmful parties among twenty, and the gain of dropping them."""
