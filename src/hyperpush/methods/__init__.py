"""Shared code of inner solvers, estimators and algorithms: base class, optimizers, and the registry of names."""
