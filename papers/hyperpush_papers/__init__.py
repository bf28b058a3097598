"""The papers' figures and tables, one folder each. `config` has the options, without JAX; `study` has the code."""
