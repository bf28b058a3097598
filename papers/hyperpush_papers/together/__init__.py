"""The whole story on one task: train, learn personal parts and example weights, score, drop, continue."""
