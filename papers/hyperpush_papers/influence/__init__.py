"""Influence of training examples: predicted, and checked by retraining without them."""
