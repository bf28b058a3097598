"""Rates of wrong and of flagged estimates, over families of problems and networks."""
