"""The papers' figures and tables, one folder each: options in `config`, which imports no JAX; the rest in `study`."""
