"""Weights of examples or classes, or L2 rates, tuned by every bilevel algorithm."""
