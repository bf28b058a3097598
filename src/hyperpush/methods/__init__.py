"""What inner solvers, estimators and algorithms share: their base class, optimizers, and the registry of names."""
