"""Models in plain JAX: each draws its params from a key and maps them and a batch of examples to predictions."""
