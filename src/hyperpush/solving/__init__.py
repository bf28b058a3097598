"""Shared parts of inner solvers and estimators: conjugate gradients with Ritz values, and tracked gradient steps."""
