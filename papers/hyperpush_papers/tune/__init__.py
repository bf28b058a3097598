"""Tune weights of examples or classes, or L2 rates, by every bilevel algorithm."""
