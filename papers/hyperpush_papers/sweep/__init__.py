"""Sweeps: tune methods with equal budgets, select on validation, report over seeds (docs/guides/sweep.md)."""
