"""Personal models over a network: recipes, baselines, and what cooperation adds."""
