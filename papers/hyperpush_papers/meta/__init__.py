"""Decentralized meta-learning by every bilevel algorithm."""
