"""Personal models over a network: recipes, baselines, and the gain by cooperation."""
